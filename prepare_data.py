"""
Text in, token files out: data/<name>/ with train.bin, val.bin, test.bin, vocab.txt, meta.json.

$ python prepare_data.py docs                              # offline: this Python's own docstrings
$ python prepare_data.py text books novels/ more.txt --vocab_size 16384
$ python prepare_data.py wikitext2 --vocab bert-base-uncased   # --from PATH if it is on disk
$ python prepare_data.py wikibooks                         # the paper's: Wikipedia + BookCorpus
$ python prepare_data.py weights bert-base-uncased         # to data/weights/, for init_from
$ python prepare_data.py glue SST-2 RTE                    # to data/glue/; squad: to data/squad/

The .bin files are flat little-endian uint16 token ids, every document ended by [SEP], no [CLS].
vocab.txt is BERT's (WordPiece), a trained one, or GPT-2's (--tokenizer gpt2). Corpus reads it all
back. A command that was stopped goes on where it was.
"""
import argparse
import array
import ast
import collections
import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import time
import warnings
import zipfile
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from configs import Failure, Parser, UserError, atomic, discard, need, run

SPLITS = ("train", "val", "test")
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
GPT2_SPECIALS = ("<pad>", "<|endoftext|>", "<s>", "</s>", "<mask>")  # their parts, GPT-2's names
IDS = ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id")
HUB = "https://huggingface.co"  # HF_ENDPOINT names another
_GLUE, _SMERITY = "https://dl.fbaipublicfiles.com/glue/data/", "https://wikitext.smerity.com/"
_SENTEVAL = "https://dl.fbaipublicfiles.com/senteval/senteval_data/"
_SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset/"
PG19 = "https://storage.googleapis.com/deepmind-gutenberg/test/"
BOOKCORPUS_COPY = f"{HUB}/api/datasets/rojagtap/bookcorpus/parquet/default/train"
SOURCES = {  # name: licence, files as (URL, bytes, SHA-256); 0 and "" where only the server knows
    "wikitext2": ("CC BY-SA 3.0", [(_SMERITY + "wikitext-2-v1.zip", 4475746, (
        "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"))]),
    "wikitext2_raw": ("CC BY-SA 3.0", [(_SMERITY + "wikitext-2-raw-v1.zip", 4721645, (
        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"))]),
    "wikitext103": ("CC BY-SA 3.0", [(_SMERITY + "wikitext-103-v1.zip", 190229076, (
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"))]),
    "wikitext103_raw": ("CC BY-SA 3.0", [(_SMERITY + "wikitext-103-raw-v1.zip", 191984949, (
        "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794"))]),
    "wikipedia": ("CC BY-SA 4.0", [(
        f"{HUB}/datasets/wikimedia/wikipedia/resolve/main/20231101.en/train-{n:05}-of-00041.parquet",
        0, "") for n in range(41)]),
    "bookcorpus": ("none stated", [
        ("https://storage.googleapis.com/huggingface-nlp/datasets/bookcorpus/bookcorpus.tar.bz2",
         1179510242, "03a29333b2b35e98a375b6ad7d2f1651835655cd348fb89c864136bce69a964c")]),
    "pg19": ("Apache-2.0", [
        (f"{HUB}/datasets/deepmind/pg19/resolve/main/data/test_files.txt", 0, "")]),
    "squad": ("CC BY-SA 4.0", [
        (_SQUAD + "train-v1.1.json", 30288272,
         "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955"),
        (_SQUAD + "dev-v1.1.json", 4854279,
         "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9")]),
}
MIRRORS = {  # the same bytes
    _SMERITY + "wikitext-2-raw-v1.zip":
        f"{HUB}/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",
    _SMERITY + "wikitext-103-raw-v1.zip":
        f"{HUB}/datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip"}
CORPORA = {"docs": (), "wikitext2": (), "wikitext103": (), "wikitext2_raw": (),
           "wikitext103_raw": (), "wikipedia": ("wikipedia",), "bookcorpus": ("bookcorpus",),
           "wikibooks": ("wikipedia", "bookcorpus"), "pg19": ("pg19",)}
WEIGHTS = {"bert-base-uncased": "google-bert/bert-base-uncased",  # Apache-2.0, by name on the hub
           "bert-large-uncased": "google-bert/bert-large-uncased",
           "distilbert-base-uncased": "distilbert/distilbert-base-uncased"}
BERT_VOCAB = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"  # of all three
GLUE = {  # the tasks' licences are their authors'; see gluebenchmark.com
    "CoLA": [(_GLUE + "CoLA.zip", 376971,
              "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff")],
    "SST-2": [(_GLUE + "SST-2.zip", 7439277,
               "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa")],
    "MRPC": [(_SENTEVAL + "msr_paraphrase_train.txt", 1047044,
              "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89"),
             (_SENTEVAL + "msr_paraphrase_test.txt", 441275,
              "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784"),
             (_GLUE + "mrpc_dev_ids.tsv", 6222,
              "971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7")],
    "STS-B": [(_GLUE + "STS-B.zip", 802872,
               "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85")],
    "QQP": [(_GLUE + "QQP-clean.zip", 41696084,
             "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0")],
    "MNLI": [(_GLUE + "MNLI.zip", 312783507,
              "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633")],
    "QNLI": [(_GLUE + "QNLIv2.zip", 10627589,
              "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5")],
    "RTE": [(_GLUE + "RTE.zip", 697150,
             "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee")],
}
DOWNLOADS = Path("data/downloads")
TIMEOUT = 30  # seconds without a byte before a download is tried again
BATCH = 2**21  # characters encoded, or ids read back, at once: three batches are a few 100 MB


class Corpus:
    """A prepared corpus: data/<name>/. UserError when it is missing, cut short or inconsistent.

    Attributes: name, meta (meta.json as a dict), vocab_size, pad_id, unk_id, cls_id, sep_id,
    mask_id, special_ids (the tuple of those five), tokenizer_hash. A corpus that is only for
    measuring (pg19) has no train and val tokens, and no unigram_perplexity in its meta.
    """

    def __init__(self, name, root="data"):
        self.name, self.folder = name, Path(root, name)
        file = self.folder / "meta.json"
        if not file.is_file():
            command = name.replace("_raw", " --raw") if name in CORPORA else f"text {name} PATH..."
            raise UserError(f"{self.folder}: no such corpus: python prepare_data.py {command}")
        facts = _facts(read_vocab(self.folder))
        try:
            self.meta = json.loads(file.read_text(encoding="utf-8"))
            tokens = [self.meta["tokens"][split] for split in SPLITS]
            whole = facts.items() <= self.meta.items() and min(tokens) >= 0 < max(tokens)
            whole = whole and (min(tokens) == 0 or self.meta["unigram_perplexity"] > 0)
        except (ValueError, LookupError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise UserError(f"{file}: damaged, or not of the vocab.txt beside it (which hashes to "
                            f"{facts['tokenizer_hash'][:12]}): prepare the corpus again")
        self.vocab_size, self.tokenizer_hash = facts["vocab_size"], facts["tokenizer_hash"]
        self.special_ids = tuple(facts[key] for key in IDS)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = self.special_ids

    def tokenizer(self):
        return build_tokenizer(self.folder)

    def split(self, which):
        """Token ids of split 'train', 'val' or 'test': a read-only np.memmap of uint16, (tokens,).
        UserError when the file's size is not meta.json's or an id is outside the vocabulary."""
        file, expected = self.folder / f"{which}.bin", 2 * self.meta["tokens"][which]
        size = file.stat().st_size if file.is_file() else 0
        if size != expected:
            raise UserError(f"{file}: expected {expected} bytes, found {size}: prepare it again")
        ids = np.memmap(file, dtype="<u2", mode="r") if size else np.empty(0, "<u2")
        for at in range(0, len(ids), BATCH):
            outside = ids[at:at + BATCH] >= self.vocab_size
            if outside.any():
                at += int(outside.argmax())
                raise UserError(f"{file}: id {ids[at]} at position {at}, but the vocabulary has "
                                f"{self.vocab_size} tokens: prepare it again")
        return ids


def read_vocab(path):
    """The tokens of a vocab.txt, or of the one in the folder `path`: a list of str, by id."""
    path = Path(path, "vocab.txt") if Path(path).is_dir() else Path(path)
    try:
        tokens = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: no vocabulary of UTF-8 text ({error})") from None
    missing = [token for token in special_tokens(tokens) if token not in tokens]
    again = [token for token, number in collections.Counter(tokens).items() if number > 1]
    if missing or again or len(tokens) > 2**16:
        raise UserError(f"{path}: not a vocabulary: " + (
            f"no {', '.join(missing)}" if missing else f"{again[0]!r} more than once" if again
            else f"{len(tokens):,} tokens, but ids of 16 bits allow 65,536"))
    return tokens


def special_tokens(vocab):
    """What a vocabulary (anything that says what is in it) calls its padding, unknown, first,
    separator and mask tokens. GPT-2's has bytes, nothing is unknown to it: its <|endoftext|>."""
    return GPT2_SPECIALS if "<mask>" in vocab else SPECIALS


def build_tokenizer(vocab):
    """The tokenizer (tokenizers.Tokenizer) of a vocab.txt, a corpus's folder or a list of tokens:
    uncased BERT's, or GPT-2's. It adds no special tokens; those in a text become their ids."""
    vocab = vocab if isinstance(vocab, list) else read_vocab(vocab)
    ids, specials = {token: number for number, token in enumerate(vocab)}, special_tokens(vocab)
    if specials is SPECIALS:
        tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    else:
        tokenizer = tokenizers.Tokenizer(models.BPE(ids, _merges(ids)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    # as RoBERTa's, <mask> takes the place of a word with the space before it
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, lstrip=token == "<mask>",
                                                        normalized=False) for token in specials])
    return tokenizer


def _merges(ids):
    """The merges of a byte-level BPE vocabulary whose ids are in the order in which they were
    learned: a token's is what the merges before it make of its characters."""
    merges = []
    for token in ids.keys() - set(GPT2_SPECIALS):
        parts = list(token)
        while len(parts) > 2:
            numbers = [ids.get(a + b, len(ids)) for a, b in itertools.pairwise(parts)]
            at = numbers.index(min(numbers))
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(parts)
    return sorted(map(tuple, merges), key=lambda pair: ids["".join(pair)])


def _byte_characters():
    """The character that stands for each byte in the tokens of byte-level BPE (Radford et al.):
    the printable ones for themselves, the others from 256 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def gpt2_vocab():
    """GPT-2's tokens by id, then <s>, </s>, <pad>, <mask>. tiktoken downloads them, or has them
    in TIKTOKEN_CACHE_DIR."""
    try:
        gpt2 = need("tiktoken", "--tokenizer gpt2").get_encoding("gpt2")
    except (OSError, ValueError) as error:
        raise Failure(f"GPT-2's vocabulary cannot be had ({error}): without a network, put tiktoken's "
                      "two files into TIKTOKEN_CACHE_DIR") from None
    characters = _byte_characters()
    tokens = ["".join(characters[byte] for byte in gpt2.decode_single_token_bytes(number))
              for number in range(gpt2.n_vocab - 1)]
    return [*tokens, "<|endoftext|>", "<s>", "</s>", "<pad>", "<mask>"]


def _encoder(vocab):
    """texts -> the ids of each, on all cores. A "[SEP]" in a text is text, not the token."""
    if special_tokens(vocab) is SPECIALS:
        tokenizer = build_tokenizer(vocab)
        tokenizer.encode_special_tokens = True
        return lambda texts: [pieces.ids for pieces in tokenizer.encode_batch_fast(
            texts, add_special_tokens=False)]
    numbers = {character: byte for byte, character in enumerate(_byte_characters())}
    ranks = {bytes(numbers[c] for c in token): number for number, token in enumerate(vocab)
             if token not in GPT2_SPECIALS}
    gpt2 = need("tiktoken", "--tokenizer gpt2").Encoding("gpt2", pat_str=(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
        mergeable_ranks=ranks, special_tokens={})
    return lambda texts: gpt2.encode_ordinary_batch(texts, num_threads=os.cpu_count())


def vocab_hash(vocab):
    """What tells vocabularies, lists of tokens, apart: their SHA-256."""
    return hashlib.sha256("\n".join(vocab).encode()).hexdigest()


def _facts(vocab):
    """What meta.json says of a vocabulary."""
    return {"vocab_size": len(vocab), **dict(zip(IDS, map(vocab.index, special_tokens(vocab)))),
            "tokenizer_hash": vocab_hash(vocab)}


def unigram_perplexity(train, heldout, special_ids):
    """Perplexity of the held-out ordinary tokens under the training tokens' unigram frequencies,
    add-one smoothed: that of a model which knows how often tokens occur and nothing else.
    train, heldout: how often each id occurs, (vocab_size,); special tokens count in neither."""
    train, heldout = (np.delete(counts, list(special_ids)) for counts in (train + 1, heldout))
    return float(np.exp(-(heldout @ np.log(train / train.sum())) / heldout.sum()))


def _count(file, vocab_size):
    """How often each id occurs in a .bin file: (vocab_size,)."""
    counts = np.zeros(vocab_size, np.int64)
    with open(file, "rb") as source:
        while len(ids := np.fromfile(source, "<u2", BATCH)):
            counts += np.bincount(ids, minlength=vocab_size)
    return counts


class Progress:
    """How far a long work is: one line rewritten on a terminal, elsewhere a line every 10 s.
    size: all of it, in bytes or characters, 0 if unknown; done: what an earlier try has done."""

    def __init__(self, what, size, done=0):
        self.what, self.size, self.terminal = what, size, sys.stdout.isatty()
        self.first = self.done = done
        self.start = self.shown = time.monotonic()

    def __call__(self, more=0, tokens=0, last=False):
        """`more` is done; tokens: how many came of all so far, where that is the measure."""
        self.done += more
        now = time.monotonic()
        if now - self.shown > (0.2 if self.terminal else 10) or last:
            self.shown, spent = now, now - self.start + 1e-9
            rate = f"{tokens / spent:,.0f} tokens/s" if tokens else (
                f"{(self.done - self.first) / spent / 1e6:.1f} MB/s")
            left = spent * (self.size - self.done) / max(self.done - self.first, 1)
            left = f"ETA {left:.0f} s" if self.size else f"{spent:.0f} s"
            whole = f" of {self.size / 1e6:.1f}" if self.size else ""
            print("\r\033[K" * self.terminal + f"{self.what}: {self.done / 1e6:.1f}{whole} MB, "
                  f"{rate}, {f'{spent:.0f} s' if last else left}",
                  end="" if self.terminal and not last else "\n", flush=True)


# From here on a text is a stream: its lines, and None at the end of every document. A corpus is
# made of parts (name, split, read): read() gives the stream, as often as it is called; split is
# the part's official one, or None where documents are to be held out.

def write_corpus(name, source, parts, vocab, val_every=0, root="data"):
    """Write data/<name>/ whole or not at all, in place of an older one, and print what is in it.

    source: where the text is from; vocab: the tokens by id, or how many to learn from the training
    documents; val_every: of so many documents one is for val, one for test, and documents that
    are the same are kept once. UserError for a part without text. What is done so far is in
    data/.part_<name>/: the next call with the same text goes on from there, to the same bytes.
    """
    counts, splits, size, digest = _plan(parts, val_every)
    folder = Path(root, name)
    work = folder.with_name(f".part_{name}")
    job = {"text": digest, "splits": hashlib.sha256(splits).hexdigest(), "source": source,
           "vocab": vocab if isinstance(vocab, int) else vocab_hash(vocab)}
    if _read_json(work / "job.json") != job:
        discard(work)
        work.mkdir(parents=True)
        with atomic(work / "job.json") as temporary:
            temporary.write_text(json.dumps(job))
    if not (work / "vocab.txt").is_file():
        if isinstance(vocab, int):
            vocab = _train_vocab((line for _, _, line, split in _lines(parts, counts, splits)
                                  if split == 0 and line), size, vocab)
        with atomic(work / "vocab.txt") as temporary:
            temporary.write_text("\n".join(vocab) + "\n", encoding="utf-8")
    vocab = read_vocab(work)
    facts = _facts(vocab)
    _encode(work, parts, counts, splits, vocab, size)
    seen = [_count(work / f"{split}.bin", len(vocab)) for split in SPLITS]
    found = {"documents": facts["sep_id"], "tokens": slice(None), "unknown": facts["unk_id"]}
    meta = {"name": name, "source": source, **facts, "duplicates": int((splits < 0).sum()),
            "unigram_perplexity": None if not seen[0].any() else unigram_perplexity(
                *seen[:2], [facts[key] for key in IDS]),
            **{key: {split: int(ids[which].sum()) for split, ids in zip(SPLITS, seen)}
               for key, which in found.items()}}
    with atomic(work / "meta.json") as temporary:
        temporary.write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    _replace(folder, work)
    for file in ("job.json", "state.json"):
        discard(folder / file)
    corpus = Corpus(name, root)
    print(f"{folder}: {corpus.vocab_size:,} tokens in the vocabulary, hash "
          f"{corpus.tokenizer_hash[:12]}; {meta['duplicates']:,} documents more were duplicates; "
          f"{source}")
    for split in SPLITS:
        documents, tokens, unknown = (meta[key][split] for key in found)
        print(f"{folder}/{split}.bin: {documents:,} documents, {tokens:,} tokens, "
              f"{corpus.split(split).nbytes / 1e6:.1f} MB, {unknown / max(tokens, 1):.3%} unknown")


def _plan(parts, val_every):
    """Read all of the text once: it holds no more surprises then. Returns how many documents each
    part has; an int8 for each document, its split's place in SPLITS or -1 for one that came before;
    the number of characters; a digest of it all. 8 bytes a document tell duplicates: of 10 million
    documents, any two differ with a chance of 1 - 3e-6; it takes about 40 bytes a document."""
    counts, splits, digests, size = [], [], array.array("Q"), 0
    progress = Progress("reading", 0)
    for name, split, read in parts:
        before, text = len(digests), hashlib.blake2b(digest_size=8)
        for line in read():
            if line is None:
                digests.append(int.from_bytes(text.digest(), "little"))
                text = hashlib.blake2b(digest_size=8)
            else:
                text.update(line.encode())
                size += len(line)
                progress(len(line))
        counts.append(len(digests) - before)
        if not counts[-1]:
            raise UserError(f"{name}: empty: no text in it")
        if split:
            splits.append(np.full(counts[-1], SPLITS.index(split), np.int8))
    digests = np.frombuffer(digests, np.uint64)
    if val_every:
        kept = np.sort(np.unique(digests, return_index=True)[1])  # the first of each
        if len(kept) < 3:
            raise UserError(f"{parts[0][0]}: {len(kept)} documents in all: it takes 3 different "
                            "ones to have one for val and one for test")
        period = min(len(kept), val_every)
        number = np.arange(len(kept)) % period
        splits = [np.full(len(digests), -1, np.int8)]
        splits[0][kept] = (number == period - 2) + 2 * (number == period - 1)
    return counts, np.concatenate(splits), size, hashlib.sha256(digests).hexdigest()


def _read_json(path):
    """What is in the file, None if it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _lines(parts, counts, splits, done=0):
    """The text after the first `done` documents, as (document, last of it?, line, split)."""
    document = 0
    for (_, _, read), count in zip(parts, counts):
        if document + count <= done:  # not even opened
            document += count
            continue
        for line in read():
            if document >= done:
                yield document, line is None, line, splits[document]
            document += line is None


def _encode(work, parts, counts, splits, vocab, size):
    """Fill work/{train,val,test}.bin, from where state.json says that an earlier call came to."""
    fresh = {"documents": 0, "characters": 0, "bytes": [0, 0, 0]}
    state = _read_json(work / "state.json") or fresh
    sep = vocab.index(special_tokens(vocab)[3])
    encode, tokens = _encoder(vocab), 0
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(work / f"{split}.bin", "ab")) for split in SPLITS]
        if any(file.tell() < kept for file, kept in zip(files, state["bytes"])):
            state = fresh
        for file, kept in zip(files, state["bytes"]):
            file.truncate(kept)
        if state["documents"]:
            print(f"{work}: going on after {state['documents']:,} documents")
        progress = Progress(f"{work.name.removeprefix('.part_')}: encoding", size,
                            state["characters"])
        batches = _batches(_lines(parts, counts, splits, state["documents"]))
        for (done, texts, where), ids in _ahead(lambda batch: encode(batch[1]), batches):
            pieces = ((sep,) if text == "" else some for text, some in zip(texts, ids))
            for split, group in itertools.groupby(zip(where, pieces), key=lambda pair: pair[0]):
                flat = np.fromiter(itertools.chain.from_iterable(some for _, some in group), "<u2")
                files[split].write(flat.tobytes())
                tokens += len(flat)
            progress(sum(map(len, texts)), tokens)
            if done:
                for file in files:
                    file.flush()
                    os.fsync(file.fileno())
                with atomic(work / "state.json") as temporary:
                    temporary.write_text(json.dumps({
                        "documents": done, "characters": progress.done,
                        "bytes": [file.tell() for file in files]}))
    progress(tokens=tokens, last=True)


def _batches(lines):
    """About BATCH characters at a time, whole documents but of very long ones: (documents done,
    0 inside one; texts, "" at the end of a document; their splits)."""
    texts, where, length = [], [], 0
    for document, last, line, split in lines:
        if split >= 0:
            for text in [""] if last else _pieces(line):
                texts.append(text)
                where.append(split)
            length += len(line or "")
        if length >= (BATCH if last else 2 * BATCH):
            yield document + 1 if last else 0, texts, where
            texts, where, length = [], [], 0
    if texts:
        yield document + 1, texts, where


def _pieces(line, most=2**16):
    """A long line in pieces, for all cores; cut before single spaces, where tokens end anyway."""
    start = 0
    while len(line) - start > most and (cut := BETWEEN_WORDS.search(line, start + most)):
        yield line[start:cut.start()]
        start = cut.start()
    yield line[start:]


BETWEEN_WORDS = re.compile(r"(?<=\w) (?=\w)")


def _ahead(function, items):
    """(item, function(item)) in order; threads are at the next two while this one is used."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = collections.deque()
        for item in items:
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) > 2:
                item, future = waiting.popleft()
                yield item, future.result()
        for item, future in waiting:
            yield item, future.result()


def _replace(folder, new):
    """Rename `new` to `folder`, an older one goes. Killed between the two renames, it leaves both,
    and the same command ends it."""
    old = folder.with_name(f".old_{folder.name}")
    if folder.exists():
        discard(old)
        os.replace(folder, old)
    os.replace(new, folder)
    discard(old)


def _train_vocab(stream, size, vocab_size):
    """BERT's special tokens, then the WordPieces that `tokenizers` learns from the stream. Two
    runs may differ, which is why a vocabulary's hash is kept with whatever was made with it."""
    progress = Progress(f"learning {vocab_size:,} WordPieces", size)
    tokenizer = build_tokenizer(list(SPECIALS))
    # every character costs two tokens, "a" and "##a": all of them would fill a small vocabulary
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=list(SPECIALS),
                                        limit_alphabet=vocab_size // 16, show_progress=False)
    lines = (progress(len(line)) or line for line in stream if line is not None)
    tokenizer.train_from_iterator(lines, trainer)
    progress(last=True)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.get)


def _documents(path, starts):
    """A text file as a stream, without its blank lines. starts(before, line, after): whether
    `line`, between those two, starts a new document. UserError at a byte that is not UTF-8."""
    before, line, at, inside = "", "", 0, False
    with path.open("rb") as file:
        for raw in itertools.chain(file, [b""]):  # the last line has an empty one after it
            try:
                after, bad = raw.decode(), raw.find(b"\0")
            except UnicodeDecodeError as error:
                bad = error.start
            if bad >= 0:
                raise UserError(f"{path}: byte {at + bad} is {raw[bad]:#04x}, not UTF-8 text")
            at += len(raw)
            if inside and starts(before, line, after):
                yield None
                inside = False
            if line.strip():
                yield line if line.endswith("\n") else line + "\n"
                inside = True
            before, line = line, after
    if inside:
        yield None


STARTS = {
    "blank": lambda before, line, after: not line.strip(),
    "file": lambda before, line, after: False,
    # " = Title = ", not " = = Section = = ". Lines of tables look like it, " = Goals ; A = ", but
    # have no blank lines around: so WikiText-2 has 600, 60 and 60 articles, as published
    "wikitext": lambda before, line, after: (not before.strip() and not after.strip()
                                             and re.match(r" = (?!= ).* = $", line)),
}


SENTENCES = 1000  # BookCorpus has a sentence a line and no book boundaries: a document is so many


def _read(path, kind):
    """A file as a stream. kind: where documents end, one of STARTS, or 'sentences': at a blank
    line and after SENTENCES lines at the latest. Of a .parquet file a row's `text` is a document,
    or with 'sentences' a line."""
    sentences = kind == "sentences"
    if path.suffix == ".parquet":
        stream = _parquet(path, whole=not sentences)
    else:
        stream = _documents(path, STARTS["blank" if sentences else kind])
    number = 0
    for line in stream:
        if line is not None or number:
            yield line
        number = 0 if line is None else number + 1
        if sentences and number == SENTENCES:
            yield None
            number = 0
    if number:
        yield None


def _parquet(path, whole):
    """The lines of column `text`, and with `whole` None at the end of each row."""
    parquet = need("pyarrow.parquet", f"{path}")
    try:
        with parquet.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise UserError(f"{path}: no column 'text' in it")
            for batch in file.iter_batches(1000, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    for line in (text or "").split("\n"):
                        if line.strip():
                            yield line + "\n"
                    if whole:
                        yield None
    except UserError:
        raise
    except (ValueError, OSError) as error:  # pyarrow's own errors are one or the other
        raise UserError(f"{path}: damaged ({str(error).splitlines()[0]}): remove it to download it "
                        "again") from None


def _files(path, *suffixes):
    """`path`, or the files in the folder `path` that end in one of `suffixes`."""
    found = sorted(p for p in path.rglob("*") if p.suffix in suffixes) if path.is_dir() else (
        [path] if path.exists() else [])
    if not found:
        raise UserError(f"{path}: no such file, or a folder without *{' or *'.join(suffixes)}")
    return found


def prepare_text(name, vocab, paths, split, val_every):
    """Text files, and folders of *.txt, whose documents end at blank lines or with the file."""
    files = dict.fromkeys(file for path in paths for file in _files(Path(path), ".txt"))
    write_corpus(name, f"{len(files)} text files: {' '.join(paths)}",
                 [(file, None, partial(_read, file, split)) for file in files], vocab, val_every)


def prepare_wikitext(name, vocab, place):
    """WikiText in its official splits, from the folder or zip `place` or else downloaded."""
    path = Path(place) if place else fetch(SOURCES[name][1])[0]
    if not path.is_dir() and not zipfile.is_zipfile(path):
        raise UserError(f"{path}: neither a folder nor a whole zip file")
    top = path if path.is_dir() else zipfile.Path(str(path))
    folders, parts = [top, *(inside for inside in top.iterdir() if inside.is_dir())], []
    for split, stem in zip(SPLITS, ("train", "valid", "test")):
        names = (f"wiki.{stem}.{'raw' if name.endswith('_raw') else 'tokens'}", f"{stem}.txt")
        found = [file for folder in folders for n in names if (file := folder / n).is_file()]
        if not found:
            raise UserError(f"{path}: no {' or '.join(names)} in it")
        parts.append((found[0], split, partial(_read, found[0], "wikitext")))
    try:
        write_corpus(name, place or SOURCES[name][1][0][0], parts, vocab)
    except zipfile.BadZipFile as error:
        raise UserError(f"{path}: damaged ({error}): remove it to download it again") from None


def prepare_paper(name, vocab, places, val_every):
    """The paper's corpora: wikipedia, bookcorpus, both as wikibooks; pg19, for measuring only.
    places: for each of them a file or folder (.parquet or text; for BookCorpus also the tar), or
    none to download it."""
    parts, sources = [], []
    for one, place in zip(CORPORA[name], places or [None, None]):
        place = Path(place) if place else {"wikipedia": _wikipedia, "bookcorpus": _bookcorpus,
                                           "pg19": _pg19}[one]()
        if place.name.endswith(".tar.bz2"):
            place = _untar(place)
        kind = {"wikipedia": "blank", "bookcorpus": "sentences", "pg19": "file"}[one]
        split = "test" if one == "pg19" else None
        parts += [(file, split, partial(_read, file, kind))
                  for file in _files(place, ".parquet", ".txt")]
        sources.append(f"{one}: {place}")
    write_corpus(name, "; ".join(sources), parts, vocab, 0 if name == "pg19" else val_every)


def _wikipedia():
    return fetch(SOURCES["wikipedia"][1], DOWNLOADS / "wikipedia")[0].parent


def _bookcorpus():
    """The tar, or where that is gone its copy on the hub, which lists its own parquet files."""
    try:
        return fetch(SOURCES["bookcorpus"][1])[0]
    except Failure as error:
        print(f"{error}; trying {BOOKCORPUS_COPY}", flush=True)
    folder = DOWNLOADS / "bookcorpus_copy"
    listing, = fetch([(BOOKCORPUS_COPY, 0, "")], folder)
    urls = _read_json(listing)
    if not (isinstance(urls, list) and urls and all(isinstance(url, str) for url in urls)):
        discard(listing)
        raise Failure(f"{BOOKCORPUS_COPY}: no list of files came")
    return fetch([(url, 0, "") for url in urls], folder)[0].parent


def _pg19():
    """The 100 books of PG-19's test split."""
    listing, = fetch(SOURCES["pg19"][1], DOWNLOADS / "pg19")
    ids = re.findall(r"test/(\d+)\.txt", listing.read_text(errors="replace"))
    if not ids:
        raise Failure(f"{listing}: no list of books: remove it to download it again")
    return fetch([(f"{PG19}{n}.txt", 0, "") for n in ids], DOWNLOADS / "pg19" / "test")[0].parent


def _untar(path):
    """The folder in data/downloads/ with a tar's files."""
    folder = DOWNLOADS / path.name.split(".")[0]
    if not folder.exists():
        print(f"{path}: unpacking", flush=True)
        try:
            with atomic(folder) as temporary, tarfile.open(path) as archive:
                archive.extractall(temporary, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise UserError(f"{path}: not unpacked ({error})") from None
    return folder


def prepare_weights(name, place=None, only=None):
    """Google's or Hugging Face's weights: data/weights/<name>/ with config.json, vocab.txt and
    model.safetensors, or pytorch_model.bin where safetensors is not installed; `only`: one of these
    files. Returns the folder. UserError for an unknown name, or if the folder `place` lacks one."""
    if name not in WEIGHTS:
        raise unknown_weights(name)
    folder = Path("data/weights", name)
    formats = ["model.safetensors", "pytorch_model.bin"]
    if not importlib.util.find_spec("safetensors"):
        formats.reverse()
    for file in [only] if only else ["config.json", "vocab.txt", formats]:
        choices = [file] if isinstance(file, str) else formats
        if any((folder / choice).exists() for choice in choices):
            continue
        if place is None:
            sha256 = BERT_VOCAB if file == "vocab.txt" else ""
            download(f"{HUB}/{WEIGHTS[name]}/resolve/main/{choices[0]}", folder / choices[0],
                     sha256=sha256)
            continue
        found = [choice for choice in choices if (place / choice).is_file()]
        if not found:
            raise UserError(f"{place}: no {' or '.join(choices)} in it")
        with atomic(folder / found[0]) as temporary:
            shutil.copyfile(place / found[0], temporary)
    return folder


def unknown_weights(name):
    """The UserError for weights that are neither on disk nor known."""
    if "roberta" in name.lower():
        return UserError(f"{name}: RoBERTa's weights have ids of their own for GPT-2's tokens, and "
                         "are not read here: train from scratch on a corpus of --tokenizer gpt2")
    return UserError(f"{name}: no weights there: python pretrain.py configs/{Path(name).name}.py "
                     f"makes a run, python prepare_data.py weights NAME gets {', '.join(WEIGHTS)}")


def fetch(sources, folder=DOWNLOADS):
    """The local files of [(URL, bytes, SHA-256)], downloaded to `folder` where it has none yet."""
    paths = [Path(folder, Path(url).name) for url, _, _ in sources]
    for path, (url, size, sha256) in zip(paths, sources):
        if not path.exists():
            try:
                download(url, path, size, sha256)
            except Failure as error:
                if url not in MIRRORS:
                    raise
                print(f"{error}; trying {MIRRORS[url]}", flush=True)
                download(MIRRORS[url], path, size, sha256)
    return paths


def download(url, path, size=0, sha256=""):
    """Fetch `url` to the file `path`, which is whole or absent, in up to four attempts.

    What came so far is in <path>.part: the next attempt, or the next call, goes on from there if
    the server can. size (bytes) and sha256 are checked where known; the hub tells its large files'
    SHA-256 itself. HF_ENDPOINT takes the hub's place, HTTPS_PROXY and the like are honoured.
    Failure when it cannot be had.
    """
    requests = need("requests", "a download")
    url = url.replace(HUB, os.environ.get("HF_ENDPOINT", HUB).rstrip("/"))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    for pause in (2, 8, 30, 0):
        try:
            told = _receive(requests, url, part)
            break
        except requests.RequestException as error:
            status = getattr(error.response, "status_code", 500)
            if not pause or 400 <= status < 500 and status not in (408, 429):
                why = {401: "it is gated or private: ", 403: "it is gated or private: ",
                       404: "there is no such file: "}.get(status, "")
                raise Failure(f"{url}: {why}{error}") from None
            print(f"{url}: {error}: again in {pause} s", flush=True)
            time.sleep(pause)
    with open(part, "rb+") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        length = file.tell()
        os.fsync(file.fileno())
    if size not in (0, length) or (sha256 or told) not in ("", found):
        discard(part)
        raise Failure(f"{url}: {length:,} bytes with SHA-256 {found[:12]} came, expected "
                      f"{f'{size:,} bytes with ' * (size > 0)}{(sha256 or told)[:12]}: the file is "
                      "another one now, or was damaged on its way")
    os.replace(part, path)


def _receive(requests, url, part):
    """One attempt to complete the file `part`. Returns the SHA-256 that the hub tells, or ''."""
    start = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "Mozilla/5.0",  # wikitext.smerity.com wants a browser
               "Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as reply:
        told = [r.headers.get("X-Linked-Etag", "").strip('"') for r in (*reply.history, reply)]
        told = next((tag for tag in told if re.fullmatch("[0-9a-f]{64}", tag)), "")
        numbers = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+)",
                               reply.headers.get("Content-Range", ""))
        if reply.status_code == 416 and numbers and int(numbers[2]) == start:
            return told  # all of it had come
        if reply.status_code == 416 or reply.status_code == 206 and not (
                numbers and int(numbers[1] or -1) == start):
            discard(part)  # the part is not the beginning of what is there now
            raise requests.RequestException(f"it cannot go on at byte {start:,}")
        reply.raise_for_status()
        start = start if reply.status_code == 206 else 0
        length = int(reply.headers.get("Content-Length", 0))
        progress = Progress(f"{part.with_suffix('')}: download", length and start + length, start)
        with open(part, "ab" if start else "wb") as file:
            for chunk in reply.iter_content(2**16):
                file.write(chunk)
                progress(len(chunk))
        if progress.size not in (0, progress.done):
            raise requests.RequestException(f"{progress.done:,} of {progress.size:,} bytes came")
        progress(last=True)
        return told


def prepare_task(folder, sources, place, force, alone=True):
    """data/glue/TASK/ or data/squad/ with the official files, as the official archive unpacks.
    place: a folder that holds the downloads, or what they unpack to; where the task is asked for
    `alone` also that archive, or a folder with just its files."""
    if folder.exists() and not force:
        print(f"{folder} exists already (--force replaces it)")
        return
    names = [Path(url).name for url, _, _ in sources]
    if place is None:
        files = fetch(sources)
    elif place.is_file() and names[0].endswith(".zip") and alone:
        files = [place]
    else:
        wanted = [names, ["train.tsv"]] if names[0].endswith(".zip") else [names]
        found = [[home / name for name in some] for home in (place / folder.name, place)
                 for some in wanted if all((home / name).is_file() for name in some)
                 and (alone or home != place or some is names)]
        if not found:
            raise UserError(f"{place}: no {' or '.join(map(', '.join, wanted))} in it")
        files = found[0]
        if files[0].name == "train.tsv":
            files = sorted(file for file in files[0].parent.iterdir() if file.is_file())
    new = folder.with_name(f".new_{folder.name}")
    discard(new)
    with atomic(new) as temporary:
        temporary.mkdir()
        for file in files:
            if names[0].endswith(".zip") and len(files) == 1:
                _unpack(file, temporary)
            else:
                shutil.copyfile(file, temporary / file.name)
    _replace(folder, new)
    print(f"{folder}: {', '.join(sorted(p.name for p in folder.iterdir() if p.is_file()))}")


def _unpack(path, folder):
    """The files of a zip, without the one folder that they are in (QQP-clean.zip: QQP/)."""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                parts = Path(info.filename).parts
                if info.is_dir() or parts[0] == "__MACOSX":
                    continue
                if ".." in parts or Path(info.filename).is_absolute():
                    raise zipfile.BadZipFile(f"{info.filename} would be outside")
                target = folder.joinpath(*parts[1:] or parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as source, open(target, "wb") as file:
                    shutil.copyfileobj(source, file)
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged ({error}): remove it to download it again") from None


def prepare_docs(root="data", vocab=4096):
    """The docstrings of the standard library, torch and numpy as installed: about 9 MB, found in
    their source, nothing imported. A document is a source file, a line of it a docstring."""
    source, files = _read_docs()
    documents = [line for _, texts in files for line in [*(f"{text}\n" for text in texts), None]]
    write_corpus("docs", source, [(source, None, lambda: documents)], vocab, 20, root)


def prepare_docs_task(root="data"):
    """data/docs_task/{train,dev,test}.tsv: which package is a docstring of? Only its first
    paragraph is given. What is dev here is val in the corpus."""
    _, files = _read_docs()
    rows = {"train": ["sentence\tlabel"], "dev": ["sentence\tlabel"], "test": ["index\tsentence"]}
    for number, (package, texts) in enumerate(files):
        split = {18: "dev", 19: "test"}.get(number % 20, "train")
        for text in texts:
            text = " ".join(text.split("\n\n")[0].split())
            rows[split].append(f"{len(rows[split]) - 1}\t{text}" if split == "test" else
                               f"{text}\t{package}")
    with atomic(Path(root, "docs_task")) as temporary:
        temporary.mkdir()
        for split, lines in rows.items():
            (temporary / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _read_docs():
    """Where the docstrings are from, and the (package, docstrings) of every file that has some;
    each docstring once."""
    folders = {f"Python {sys.version.split()[0]}": sysconfig.get_path("stdlib")}
    for package in ("torch", "numpy"):
        folder = Path(importlib.util.find_spec(package).origin).parent
        folders[f"{package} {importlib.metadata.version(package)}"] = folder
    # not other packages, and no tests, whose docstrings are mostly one-line labels
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [(name.split()[0], file) for name, folder in folders.items()
             for file in sorted(Path(folder).rglob("*.py"))
             if skip.isdisjoint(file.relative_to(folder).parts)]
    source = f"docstrings of {', '.join(folders)}"
    progress = Progress(source, sum(file.stat().st_size for _, file in files))
    documents, seen = [], set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        for package, file in files:
            code = file.read_bytes()
            progress(len(code))
            try:
                found = dict.fromkeys(_docstrings(ast.parse(code)))
            except (SyntaxError, ValueError, RecursionError):
                continue  # a template, or meant for another Python
            new = [text for text in found if text and text not in seen]
            seen.update(new)
            if new:  # a lone surrogate has no UTF-8
                documents.append((package, [text.encode("utf-8", "replace").decode()
                                            for text in new]))
    progress(last=True)
    return source, documents


def _docstrings(node):
    """Docstrings in a syntax tree, in its order, and those attached by calls such as
    add_newdoc(...) and fft = _add_docstr(_fft.fft_fft, '''...''')."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield ast.get_docstring(node) or ""
    for child in ast.iter_child_nodes(node):
        if isinstance(call := getattr(child, "value", None), ast.Call):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if re.match("_?add_(docstr|newdoc)", name):
                yield from (inspect.cleandoc(part.value) for part in ast.walk(call)
                            if isinstance(part, ast.Constant) and "\n" in str(part.value))
        elif not isinstance(child, ast.expr):
            yield from _docstrings(child)


def parse_arguments():
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--force", action="store_true", help="replace the corpus if it exists")
    either = shared.add_mutually_exclusive_group()
    either.add_argument("--vocab", metavar="PATH", help="a vocab.txt, another corpus's folder, or "
                        "bert-base-uncased: BERT's (the default of the paper's corpora)")
    either.add_argument("--vocab_size", type=int, metavar="N",
                        help="train a vocabulary of N tokens (4096 for docs, else 8192)")
    either.add_argument("--tokenizer", choices=["gpt2"], help="GPT-2's byte-level BPE (RoBERTa's)")
    parser = Parser(description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("docs", parents=[shared], help="docstrings: Python, torch, numpy")
    for name in ("wikitext2", "wikitext103"):
        wikitext = commands.add_parser(name, parents=[shared], help="Wikipedia articles")
        wikitext.add_argument("--from", dest="place", metavar="PATH", help="folder or zip on disk")
        wikitext.add_argument("--raw", action="store_true", help="the version without <unk>")
    text = commands.add_parser("text", parents=[shared], help="text of your own")
    text.add_argument("name", help="the corpus is data/NAME")
    text.add_argument("paths", nargs="+", metavar="PATH", help="a text file or a folder of *.txt")
    text.add_argument("--split", choices=("blank", "file"), default="blank",
                      help="documents end at blank lines (default) or with their file")
    text.add_argument("--val_every", type=int, default=100, metavar="N",
                      help="of N documents one is for val, one for test (100; fewer if need be)")
    for name, what in (("wikipedia", "English Wikipedia of 2023-11-01"), ("bookcorpus", "BookCorpus"),
                       ("wikibooks", "both"), ("pg19", "100 books, for measuring only")):
        paper = commands.add_parser(name, parents=[shared], help=what)
        paper.add_argument("--from", dest="place", nargs=len(CORPORA[name]),
                           metavar=tuple(f"{one.upper()}" for one in CORPORA[name]),
                           help="file or folder on disk: parquet or text")
        if name != "pg19":
            paper.add_argument("--val_every", type=int, default=1000, metavar="N",
                               help="of N documents one is for val, one for test (1000)")
    glue = commands.add_parser("glue", help="the tasks of GLUE, for finetune.py")
    glue.add_argument("names", nargs="*", metavar="TASK", help=f"of {', '.join(GLUE)}; all")
    weights = commands.add_parser("weights", help="trained models, for init_from")
    weights.add_argument("names", nargs="+", metavar="NAME", help=f"of {', '.join(WEIGHTS)}")
    for command in (glue, weights, commands.add_parser("squad", help="SQuAD 1.1, for finetune.py")):
        command.add_argument("--from", dest="place", type=Path, metavar="PATH",
                             help="folder (or zip) that has the files")
        if command is not weights:
            command.add_argument("--force", action="store_true", help="replace what exists")
    return parser.parse_args()


def main():
    args = parse_arguments()
    if args.command == "squad":
        prepare_task(Path("data/squad"), SOURCES["squad"][1], args.place, args.force)
    elif args.command == "glue":
        if unknown := sorted(set(args.names) - GLUE.keys()):
            raise UserError(f"{unknown[0]}: no task of GLUE: expected {', '.join(GLUE)}")
        for task in args.names or GLUE:
            prepare_task(Path("data/glue", task), GLUE[task], args.place, args.force,
                         alone=len(args.names) == 1)
    elif args.command == "weights":
        if args.place and len(args.names) > 1:
            raise UserError("--from PATH has the files of one model: give one NAME")
        for name in args.names:
            print(f"{prepare_weights(name, args.place)}: there")
    else:
        prepare_corpus(args)


def prepare_corpus(args):
    name = getattr(args, "name", args.command) + "_raw" * getattr(args, "raw", False)
    paper = bool(CORPORA.get(args.command))
    if Path(name).name != name or name.startswith("."):
        raise UserError(f"{name}: a corpus's name is a folder's name, without / or a leading .")
    if Path("data", name).exists() and not args.force:
        raise UserError(f"data/{name} exists already (--force replaces it)")
    if getattr(args, "val_every", 3) < 3:
        raise UserError(f"--val_every {args.val_every}: expected at least 3: train, val and test")
    if name == "pg19" and args.vocab_size:
        raise UserError("pg19 has no training split to learn a vocabulary from: give --vocab")
    size = (4096 if name == "docs" else 8192) if args.vocab_size is None else args.vocab_size
    if not 256 <= size <= 2**16:
        raise UserError(f"--vocab_size={size}: expected 256 to 65,536")
    known = args.vocab or ("bert-base-uncased" if paper and not args.vocab_size else None)
    if args.tokenizer:
        vocab = gpt2_vocab()
    elif known in WEIGHTS and not Path(known).exists():
        vocab = read_vocab(prepare_weights(known, only="vocab.txt"))
    else:
        vocab = read_vocab(known) if known else size
    if name == "docs":
        prepare_docs(vocab=vocab)
    elif args.command == "text":
        prepare_text(name, vocab, args.paths, args.split, args.val_every)
    elif paper:
        prepare_paper(name, vocab, args.place, getattr(args, "val_every", 0))
    else:
        prepare_wikitext(name, vocab, args.place)


if __name__ == "__main__":
    run(main)
