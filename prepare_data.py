"""
Text in, token files out: data/<name>/ with train.bin, val.bin, test.bin, vocab.txt, meta.json.

$ python prepare_data.py docs                              # offline: this Python's docstrings
$ python prepare_data.py text books novels/ more.txt --vocab_size 16384
$ python prepare_data.py wikitext2 --vocab bert-base-uncased   # --from PATH if it is on disk
$ python prepare_data.py wikibooks                         # the paper's: Wikipedia + BookCorpus
$ python prepare_data.py check wikibooks                   # are the files as they were written?
$ python prepare_data.py weights bert-base-uncased         # to data/weights/, for init_from
$ python prepare_data.py glue SST-2 RTE                    # to data/glue/; squad: to data/squad/

The .bin files are flat little-endian uint16 token ids, every document ended by [SEP], no [CLS].
vocab.txt is BERT's (WordPiece), a trained one, or GPT-2's (--tokenizer gpt2; tokenizer.json lies
beside it). data.Corpus reads it all. A command that was stopped goes on where it was.
"""
import collections
import contextlib
import hashlib
import itertools
import json
import os
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import common
import data
import download
import tasks
from common import (
    Failure,
    Parser,
    Progress,
    UserError,
    atomic,
    discard,
    need,
    run,
    whole,
    write_text,
)
from data import GPT2_SPECIALS, SPECIALS, SPLITS
from text import BETWEEN_WORDS, docstrings, find_codecs, find_files, stream

BATCH = 2**21  # characters encoded, or ids read back, at once: some 100 MB
LOSS_STD = 2.7  # of the loss over masked tokens (configs/demo.py after 200 steps, 10,240 tokens)


def _byte_characters():
    """The character that stands for each byte in the tokens of byte-level BPE (Radford et al.):
    printable ones for themselves, the others from 256 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def gpt2_vocab():
    """GPT-2's tokens by id, then <s>, </s>, <pad>, <mask>. tiktoken downloads them, or has them
    in TIKTOKEN_CACHE_DIR."""
    try:
        gpt2 = need("tiktoken", "--tokenizer gpt2").get_encoding("gpt2")
    except (OSError, ValueError) as error:
        raise Failure(f"no GPT-2 vocabulary ({error}): without a network, put tiktoken's two files "
                      "into TIKTOKEN_CACHE_DIR") from None
    characters = _byte_characters()
    tokens = ["".join(characters[byte] for byte in gpt2.decode_single_token_bytes(token_id))
              for token_id in range(gpt2.n_vocab - 1)]
    return [*tokens, "<|endoftext|>", "<s>", "</s>", "<pad>", "<mask>"]


def _merges(ids):
    """The merges of a byte-level BPE vocabulary {token: id} whose ids are in the order in which
    they were learned: what the earlier merges make of a token's characters is its own merge."""
    merges = []
    for token in ids.keys() - set(GPT2_SPECIALS):
        parts = list(token)
        while len(parts) > 2:
            ranks = [ids.get(a + b, len(ids)) for a, b in itertools.pairwise(parts)]
            at = ranks.index(min(ranks))
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(parts)
    return sorted(map(tuple, merges), key=lambda pair: ids["".join(pair)])


def byte_level_tokenizer(vocab):
    """The tokenizers.Tokenizer of GPT-2's tokens, for tokenizer.json."""
    ids = {token: token_id for token_id, token in enumerate(vocab)}
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, _merges(ids)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # <mask> strips the space before it, as RoBERTa's does: it stands for a word and its space
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, lstrip=token == "<mask>",
                                                        normalized=False)
                                  for token in GPT2_SPECIALS])
    return tokenizer


def _encoder(vocab):
    """texts -> the ids of each, on all cores. A "[SEP]" in a text is text, not the token."""
    if data.special_tokens(vocab) is SPECIALS:
        tokenizer = data.wordpiece_tokenizer(vocab)
        tokenizer.encode_special_tokens = True
        return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch_fast(
            texts, add_special_tokens=False)]
    bytes_of = {character: byte for byte, character in enumerate(_byte_characters())}
    ranks = {bytes(bytes_of[c] for c in token): rank for rank, token in enumerate(vocab)
             if token not in GPT2_SPECIALS}
    gpt2 = need("tiktoken", "--tokenizer gpt2").Encoding("gpt2", pat_str=(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
        mergeable_ranks=ranks, special_tokens={})
    return lambda texts: gpt2.encode_ordinary_batch(texts, num_threads=os.cpu_count())


def unigram_perplexity(train, heldout, special_ids):
    """Perplexity of the held-out ordinary tokens under the training tokens' unigram frequencies,
    add-one smoothed: that of a model which knows how often tokens occur and nothing else.
    train, heldout: how often each id occurs, (vocab_size,); special tokens count in neither.
    None where there is no training text."""
    if not train.any():
        return None
    train, heldout = (np.delete(counts, list(special_ids)) for counts in (train + 1, heldout))
    return float(np.exp(-(heldout @ np.log(train / train.sum())) / heldout.sum()))


def _count(file, vocab_size):
    """How often each id occurs in a .bin file: (vocab_size,)."""
    counts = np.zeros(vocab_size, np.int64)
    with open(file, "rb") as source:
        while len(ids := np.fromfile(source, "<u2", BATCH)):
            counts += np.bincount(ids, minlength=vocab_size)
    return counts


class Part(NamedTuple):
    """What a corpus is made of."""
    name: str
    read: Callable  # gives the stream (see text.py), as often as it is called
    split: str | None = None  # the official one; None where documents are to be held out
    sentences: bool = False  # what is held out does not stand in train, sentence by sentence


def write_corpus(name, source, parts, vocab, val_every=0):
    """Write data/<name>/, whole or not at all, in place of an older one; print what is in it.

    source: where the text is from; vocab: the tokens by id, or how many to learn from the training
    documents; val_every: one document of this many is for val, one for test, and of equal documents
    only the first is kept. UserError for a part without text. Unfinished work is in
    data/.part_<name>/: the next call with the same text goes on from there, to the same bytes.
    """
    counts, digests, size = _scan(parts)
    splits = _assign(parts, counts, digests, val_every)
    heldout = _heldout_sentences(parts, counts, splits)
    folder, work = Path("data", name), Path("data", f".part_{name}")
    job = hashlib.sha256(repr(("with SHA-256", vocab)).encode())
    job.update(digests)
    job.update(splits)
    try:
        state = json.loads((work / "state.json").read_text())
    except (OSError, ValueError):  # missing or damaged
        state = {}
    if state.get("job") != job.hexdigest():
        discard(work)
        state = {"job": job.hexdigest(), "documents": 0, "lines": 0, "bytes": [0, 0, 0],
                 "sha256": [hashlib.sha256().hexdigest()] * 3}
        if isinstance(vocab, int):
            def read():
                return (line for line, split in _lines(parts, counts, splits, heldout)
                        if split == 0 and line)
            vocab = _train_vocab(read, size, vocab)
        write_text(work / "vocab.txt", "\n".join(vocab) + "\n")
    else:
        print(f"{work}: going on after {state['documents']:,} documents")
    vocab = data.read_vocab(work)
    if data.special_tokens(vocab) is GPT2_SPECIALS:
        write_text(work / "tokenizer.json", byte_level_tokenizer(vocab).to_str(pretty=True))
    lines = Progress(_lines(parts, counts, splits, heldout, state["documents"]), total=size,
                     desc=f"encoding {name}", initial=state["lines"], unit=" lines")
    _encode(work, state, lines, vocab)
    facts = data.vocab_facts(vocab)
    seen = {split: _count(work / f"{split}.bin", len(vocab)) for split in SPLITS}
    write_text(work / "meta.json", json.dumps({
        "name": name, "source": source, **facts, "duplicates": int((splits < 0).sum()),
        "unigram_perplexity": unigram_perplexity(
            seen["train"], seen["val"], [facts[key] for key in data.IDS if key != "unk_id"]),
        "documents": {split: int(ids[facts["sep_id"]]) for split, ids in seen.items()},
        "tokens": {split: int(ids.sum()) for split, ids in seen.items()},
        "unknown": {split: int(ids[facts["unk_id"]]) for split, ids in seen.items()},
        "sha256": dict(zip(SPLITS, state["sha256"])),
    }, indent=1) + "\n")
    download.replace(folder, work)
    discard(folder / "state.json")
    _report(data.Corpus(name), val_every)


def _report(corpus, val_every):
    """Print what is in a corpus, and whether it has few tokens to measure a perplexity on."""
    folder, meta = corpus.folder, corpus.meta
    print(f"{folder}: {corpus.vocab_size:,} tokens in the vocabulary, hash "
          f"{corpus.tokenizer_hash[:12]}; {meta['duplicates']:,} duplicate documents left out; "
          f"{meta['source']}")
    for split in SPLITS:
        documents, tokens, unknown = (
            meta[key][split] for key in ("documents", "tokens", "unknown"))
        print(f"{folder}/{split}.bin: {documents:,} documents, {tokens:,} tokens, "
              f"{corpus.split(split).nbytes / 1e6:.1f} MB, {unknown / max(tokens, 1):.3%} unknown")
    masked = int(data.MASKED * meta["tokens"]["val"])
    if masked and (error := LOSS_STD / masked ** 0.5) > 0.05:
        more = ", or a smaller --val_every," if val_every else ""
        print(f"warning: {folder}/val.bin: a perplexity on its {masked:,} masked tokens has a "
              f"standard error of about {error:.0%}; more text{more} makes it less")


def _scan(parts):
    """First pass over the text: validate and count. Returns the number of documents of each part,
    8 bytes of hash of every document (of 10 million different ones, two agree with a chance of
    3e-6), and the number of lines."""
    counts, digests = [], bytearray()
    with Progress(desc="reading", unit=" lines") as progress:
        for part in parts:
            before, text = len(digests), hashlib.blake2b(digest_size=8)
            for line in part.read():
                progress.update()
                if line is None:
                    digests += text.digest()
                    text = hashlib.blake2b(digest_size=8)
                else:
                    text.update(line.encode())
            counts.append((len(digests) - before) // 8)
            if not counts[-1]:
                raise UserError(f"{part.name}: empty: no text in it")
    return counts, np.frombuffer(digests, "<u8"), progress.n


def _assign(parts, counts, digests, val_every):
    """Every document's index in SPLITS, -1 for a duplicate that is left out: int8 (documents,)."""
    if not val_every:
        return np.repeat([SPLITS.index(part.split) for part in parts], counts).astype(np.int8)
    kept = np.sort(np.unique(digests, return_index=True)[1])  # the first of each
    if len(kept) < 3:
        raise UserError(f"{parts[0].name}: {len(kept)} documents in all: it takes 3 different "
                        "ones to have one for val and one for test")
    period = min(len(kept), val_every)
    at = np.arange(len(kept)) % period
    splits = np.full(len(digests), -1, np.int8)
    splits[kept] = (at == period - 2) + 2 * (at == period - 1)
    return splits


def _heldout_sentences(parts, counts, splits):
    """The lines of val and test, of those parts that are sentences: a set, as large as these."""
    chosen = [part.sentences for part in parts]
    own = (list(itertools.compress(each, chosen)) for each in (parts, counts))
    return {line for line, split in _lines(*own, splits[np.repeat(chosen, counts)])
            if split > 0 and line}


def _lines(parts, counts, splits, heldout=frozenset(), done=0):
    """The text after the first `done` documents, each line with its document's split, or -1 if it
    is to be left out: a duplicate, or in train one of the `heldout` sentences."""
    document = 0
    for part, count in zip(parts, counts):
        if document + count <= done:  # a part that is done is not even opened
            document += count
            continue
        for line in part.read():
            if document >= done:
                known = part.sentences and splits[document] == 0 and line in heldout
                yield line, -1 if known else splits[document]
            document += line is None


def _encode(work, state, lines, vocab):
    """Fill work/{train,val,test}.bin, starting where `state` says that an earlier call ended; at the
    end state["sha256"] has the SHA-256 of what was written."""
    encode, sep = _encoder(vocab), data.vocab_facts(vocab)["sep_id"]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(work / f"{split}.bin", "ab+")) for split in SPLITS]
        hashes = [_kept(*each) for each in zip(files, state["bytes"], state["sha256"])]
        for done, texts in _batches(lines, state["documents"]):
            for file, written, some in zip(files, hashes, texts):
                pairs = zip(some, encode(some))
                pieces = ((sep,) if text == "" else ids for text, ids in pairs)
                ids = np.fromiter(itertools.chain.from_iterable(pieces), "<u2").tobytes()
                file.write(ids)
                file.flush()
                os.fsync(file.fileno())
                written.update(ids)
            if done:
                state |= {"documents": done, "lines": lines.n,
                          "bytes": [file.tell() for file in files],
                          "sha256": [written.hexdigest() for written in hashes]}
                write_text(work / "state.json", json.dumps(state))


def _kept(file, size, sha256):
    """Cut an open .bin to the size that an earlier call left, and return its SHA-256 to go on with.
    UserError if it is not what was left."""
    whole = file.tell() >= size
    file.truncate(size if whole else None)
    file.seek(0)
    written = hashlib.file_digest(file, "sha256")
    if not whole or written.hexdigest() != sha256:
        raise UserError(f"{file.name}: {'changed' if whole else 'shorter'} since it was left: "
                        f"remove {Path(file.name).parent}")
    return written


def _batches(lines, documents):
    """About BATCH characters at a time, whole documents but of very long ones: (documents done,
    0 inside one; the texts of each split, "" at the end of a document)."""
    texts, length = ([], [], []), 0
    for line, split in lines:
        documents += line is None
        if split >= 0:
            texts[split].extend([""] if line is None else _pieces(line))
            length += len(line or "")
        if length >= (BATCH if line is None else 2 * BATCH):
            yield documents if line is None else 0, texts
            texts, length = ([], [], []), 0
    if any(texts):
        yield documents, texts


def _pieces(line, most=2**16):
    """A long line in pieces, for all cores; cut before single spaces, where tokens end anyway."""
    start = 0
    while len(line) - start > most and (cut := BETWEEN_WORDS.search(line, start + most)):
        yield line[start:cut.start()]
        start = cut.start()
    yield line[start:]


def _train_vocab(read, size, vocab_size):
    """BERT's special tokens, then the WordPieces that `tokenizers` learns; read() gives the lines.

    The same text gives the same vocabulary. `tokenizers` numbers the pieces "##a" in an order of
    chance and breaks ties between equally frequent merges by these numbers: so they are numbered
    here, as special tokens of the training.
    """
    tokenizer = data.wordpiece_tokenizer(list(SPECIALS))
    normalize, split = tokenizer.normalizer, tokenizer.pre_tokenizer
    counts = collections.Counter()
    for line in read():
        counts.update(line)
    characters = collections.Counter()
    for character, count in counts.items():
        for normal in normalize.normalize_str(character).strip():
            characters[normal] += count
    # every character costs two tokens, "a" and "##a": all of them would fill a small vocabulary
    alphabet = sorted(characters, key=lambda c: (-characters[c], c))[:vocab_size // 16]
    inside = [c for c in sorted(alphabet)
              if len(split.pre_tokenize_str(normalize.normalize_str(f"a{c}"))) == 1]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*SPECIALS, *(f"##{c}" for c in inside)],
        initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False)
    tokenizer.train_from_iterator(Progress(
        read(), desc=f"learning {vocab_size:,} WordPieces", total=size, unit=" lines"), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.get)


def _vocabulary(args, name, default):
    """The vocabulary of data/<name>/, which must not exist, as asked for on the command line, or
    `default`: the tokens by id, or how many to learn."""
    if Path("data", name).exists() and not args.force:
        raise UserError(f"data/{name} exists already (--force replaces it)")
    if args.tokenizer:
        return gpt2_vocab()
    if (args.vocab_size or 0) > 2**16:
        raise UserError(f"--vocab_size={args.vocab_size}: ids of 16 bits allow 65,536")
    chosen = args.vocab or args.vocab_size or default
    if isinstance(chosen, int):
        return chosen
    if chosen in common.PRETRAINED and not Path(chosen).exists():
        chosen = download.fetch_weights(chosen, only="vocab.txt")
    vocab, characters = data.read_vocab(chosen), set(_byte_characters())
    if data.special_tokens(vocab) is GPT2_SPECIALS and not (
            characters <= set(vocab) and characters >= set("".join({*vocab} - {*GPT2_SPECIALS}))):
        raise UserError(f"{chosen}: not a vocabulary of byte-level BPE: expected a token for each "
                        "of the 256 bytes, and tokens made of these")
    return vocab


def prepare_text(args):
    """Text files, and folders of *.txt, whose documents end at blank lines or with the file."""
    vocab = _vocabulary(args, args.name, 8192)
    files = dict.fromkeys(file for path in args.paths for file in find_files(Path(path), ".txt"))
    codecs = find_codecs(files, args.encoding)
    write_corpus(args.name, f"{len(files)} text files: {' '.join(args.paths)}",
                 [Part(file, partial(stream, file, args.split, codecs[file])) for file in files],
                 vocab, args.val_every)


def prepare_wikitext(args):
    """WikiText in its official splits, from a folder or zip on disk, or else downloaded."""
    vocab = _vocabulary(args, args.name, 8192)
    kind = args.command.removeprefix("wikitext") + "-raw" * args.raw
    source = download.FILES[f"wikitext-{kind}-v1.zip"]
    path = args.path or download.fetch([source])[0]
    if not path.is_dir() and not zipfile.is_zipfile(path):
        raise UserError(f"{path}: neither a folder nor a whole zip file")
    top = path if path.is_dir() else zipfile.Path(str(path))
    folders, parts = [top, *(inside for inside in top.iterdir() if inside.is_dir())], []
    for split, stem in zip(SPLITS, ("train", "valid", "test")):
        names = (f"wiki.{stem}.{'raw' if args.raw else 'tokens'}", f"{stem}.txt")
        files = [file for folder in folders for n in names if (file := folder / n).is_file()]
        if not files:
            raise UserError(f"{path}: no {' or '.join(names)} in it")
        parts.append(Part(files[0], partial(stream, files[0], "wikitext"), split))
    try:
        write_corpus(args.name, str(args.path or source[0]), parts, vocab)
    except zipfile.BadZipFile as error:
        raise download.damaged(path, error) from None


PAPER = {  # the parts of the paper's corpora: (name, where documents end, its split)
    "wikipedia": [("wikipedia", "blank", None)],
    "bookcorpus": [("bookcorpus", "sentences", None)],
    "pg19": [("pg19", "file", "test")]}
PAPER["wikibooks"] = PAPER["wikipedia"] + PAPER["bookcorpus"]


def prepare_paper(args):
    """The paper's corpora, each from a file or folder on disk (.parquet or text; for BookCorpus
    also the tar), or else downloaded. wikibooks is two of them; pg19 is for measuring only."""
    if args.command == "pg19" and args.vocab_size:
        raise UserError("pg19 has no training split to learn a vocabulary from: give --vocab")
    vocab = _vocabulary(args, args.name, "bert-base-uncased")
    parts, sources = [], []
    for (name, ends, split), path in zip(PAPER[args.command], args.path or [None, None]):
        path = path or download.fetch_corpus(name)
        if path.name.endswith(".tar.bz2"):
            path = download.unpack_once(path)
        parts += [Part(file, partial(stream, file, ends), split, ends == "sentences")
                  for file in find_files(path, ".parquet", ".txt")]
        sources.append(f"{name}: {path}")
    write_corpus(args.name, "; ".join(sources), parts, vocab, args.val_every)


def prepare_docs(args):
    """The docstrings of the standard library, torch and numpy as installed: about 9 MB, read from
    their source, nothing imported. A document is a source file, a line of it a docstring."""
    vocab = _vocabulary(args, args.name, 4096)
    source, files = docstrings()
    documents = [line for _, texts in files for line in [*(f"{text}\n" for text in texts), None]]
    write_corpus(args.name, source, [Part(source, lambda: documents)], vocab, val_every=20)


def prepare_docs_task(args):
    """data/docs_task/{train,dev,test}.tsv: which package is a docstring of? Only its first
    paragraph is given. What is dev here is val in the corpus, less what stands in train too."""
    if Path("data/docs_task").exists():
        raise UserError("data/docs_task exists already: remove it to make it again")
    rows = {"train": [], "dev": [], "test": []}
    for at, (package, texts) in enumerate(docstrings()[1]):
        split = {18: "dev", 19: "test"}.get(at % 20, "train")
        rows[split] += [(" ".join(text.split("\n\n")[0].split()), package) for text in texts]
    train = {text for text, _ in rows["train"]}
    with atomic(Path("data/docs_task")) as temporary:
        temporary.mkdir()
        for split, some in rows.items():
            new = [row for row in some if split == "train" or row[0] not in train]
            lines = ["index\tsentence", *(f"{n}\t{text}" for n, (text, _) in enumerate(new))]
            if split != "test":
                lines = ["sentence\tlabel", *map("\t".join, new)]
            write_text(temporary / f"{split}.tsv", "\n".join(lines) + "\n")


def check(args):
    """Compare a corpus with its meta.json: the vocabulary, sizes, ids and SHA-256."""
    corpus, damaged = data.Corpus(args.name), 0
    if "sha256" not in corpus.meta:
        raise UserError(f"{corpus.folder}/meta.json: has no SHA-256, it is of an earlier version: "
                        "prepare the corpus again with --force to have them")
    for split in SPLITS:
        file = corpus.folder / f"{split}.bin"
        found = "not there"
        if file.exists():
            with file.open("rb") as source:
                found = hashlib.file_digest(source, "sha256").hexdigest()
        same = found == corpus.meta["sha256"][split]
        damaged += not same
        print(f"{file}: " + ("as it was written" if same else f"DAMAGED: SHA-256 {found[:12]}, "
                             f"written was {corpus.meta['sha256'][split][:12]}"))
    if damaged:
        raise Failure(f"{corpus.folder}: {damaged} of {len(SPLITS)} files are not as they were "
                      "written: prepare the corpus again with --force")


def prepare_weights(args):
    """Trained weights: data/weights/NAME/."""
    if args.path and len(args.names) > 1:
        raise UserError("--from PATH has the files of one model: give one NAME")
    for name in args.names:
        print(f"{download.fetch_weights(name, args.path)}: there")


def prepare_squad(args):
    """Official files: data/squad/."""
    with common.lock(Path("data/squad"), "fetches it", wait=True):
        download.fetch_task(Path("data/squad"), download.SQUAD, args.path, args.force,
                            check=tasks.read_squad)


def prepare_glue(args):
    """Official files: data/glue/TASK/ of the tasks named, or of all."""
    names = args.names or list(download.GLUE)
    if unknown := sorted(set(names) - download.GLUE.keys()):
        raise UserError(f"{unknown[0]}: no task of GLUE: expected {', '.join(download.GLUE)}")
    path = args.path
    if path and len(names) > 1 and (path.is_file() or (path / "train.tsv").exists()):
        raise UserError(f"{path} has the files of one task: give one TASK")
    for name in names:
        with common.lock(Path("data/glue", name), "fetches it", wait=True):
            download.fetch_task(Path("data/glue", name), download.GLUE[name], path, args.force)


def parse_arguments():
    force, source, corpus, named = (Parser(add_help=False) for _ in range(4))
    force.add_argument("--force", action="store_true", help="replace what exists")
    source.add_argument("--from", dest="path", type=Path, metavar="PATH",
                        help="a folder or file on disk, instead of a download")
    either = corpus.add_mutually_exclusive_group()
    either.add_argument("--vocab", metavar="PATH", help="a vocab.txt, another corpus's folder, or "
                        "bert-base-uncased: BERT's (the default of the paper's corpora)")
    either.add_argument("--vocab_size", type=partial(whole, least=256), metavar="N",
                        help="train a vocabulary of N tokens (4096 for docs, else 8192)")
    either.add_argument("--tokenizer", choices=["gpt2"], help="GPT-2's byte-level BPE (RoBERTa's)")
    named.add_argument("--name", help="the corpus is data/NAME, by default named as the command")
    parser = Parser(description=__doc__)
    parser.set_defaults(name=None)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def add(name, function, what, *parents):
        command = commands.add_parser(name, help=what, parents=parents)
        command.set_defaults(prepare=function)
        return command

    once = Parser(add_help=False)
    once.add_argument("--if_missing", action="store_true",
                      help="do nothing if it is there, and wait if another process makes it")
    add("docs", prepare_docs, "docstrings: Python, torch, numpy", force, corpus, named, once)
    add("docs_task", prepare_docs_task, "which package is a docstring of? for finetune.py", once)
    for name in ("wikitext2", "wikitext103"):
        wikitext = add(name, prepare_wikitext, "Wikipedia articles", force, corpus, named, source)
        wikitext.add_argument("--raw", action="store_true", help="the version without <unk>")
    text = add("text", prepare_text, "text of your own", force, corpus)
    heldout = {"type": partial(whole, least=3), "metavar": "N",
               "help": "of N documents one is for val, one for test (%(default)s)"}
    text.add_argument("--val_every", default=100, **heldout)
    text.add_argument("name", help="the corpus is data/NAME")
    text.add_argument("paths", nargs="+", metavar="PATH", help="a text file or a folder of *.txt")
    text.add_argument("--encoding", default="utf-8", metavar="NAME",
                      help="of the files: %(default)s, another, or auto: UTF-8 or else Windows-1252")
    text.add_argument("--split", choices=("blank", "file"), default="blank",
                      help="documents end at blank lines (default) or with their file")
    helps = {"wikipedia": "English Wikipedia of 2023-11-01", "bookcorpus": "BookCorpus",
             "wikibooks": "both", "pg19": "100 books, for measuring only"}
    for name, what in helps.items():
        paper = add(name, prepare_paper, what, force, corpus, named)
        paper.set_defaults(val_every=0)
        if name != "pg19":
            paper.add_argument("--val_every", default=1000, **heldout)
        paper.add_argument("--from", dest="path", type=Path, nargs=len(PAPER[name]),
                           metavar=tuple(part[0].upper() for part in PAPER[name]),
                           help="files or folders on disk: parquet or text")
    glue = add("glue", prepare_glue, "the tasks of GLUE, for finetune.py", force, source)
    glue.add_argument("names", nargs="*", metavar="TASK",
                      help=f"of {', '.join(download.GLUE)} (all)")
    add("squad", prepare_squad, "SQuAD 1.1, for finetune.py", force, source)
    add("check", check, "is data/NAME as it was written?").add_argument("name", metavar="NAME")
    weights = add("weights", prepare_weights, "trained models, for init_from", source)
    weights.add_argument("names", nargs="+", metavar="NAME",
                         help=f"{', '.join(common.PRETRAINED)}, or ORG/NAME of the hub: any BERT")
    return parser.parse_args()


def main():
    args = parse_arguments()
    if args.prepare in (check, prepare_glue, prepare_squad, prepare_weights):
        return args.prepare(args)
    name = args.name
    if name is None:
        name = args.command + "_raw" * getattr(args, "raw", False)
    if Path(name).name != name or name[:1] in ("", "."):
        raise UserError(f"{name}: a corpus's name is a folder's name, without / or a leading .")
    args.name, if_missing = name, getattr(args, "if_missing", False)
    with common.lock(Path("data", name), "prepares it", wait=if_missing):
        if not (if_missing and Path("data", name).exists()):
            args.prepare(args)
    return 0


if __name__ == "__main__":
    run(main)
