"""
Text in, token files out: data/<name>/ with train.bin, val.bin, test.bin, vocab.txt, meta.json.

$ python prepare_data.py docs                              # offline: this Python's own docstrings
$ python prepare_data.py wikitext2 --vocab bert/vocab.txt  # --from FOLDER if it is on disk
$ python prepare_data.py text books novels/ more.txt --vocab_size 16384
$ python prepare_data.py glue SST-2 RTE                    # to data/glue/; squad: to data/squad/

The .bin files are flat little-endian uint16 token ids, every document ended by [SEP], no [CLS].
Without --vocab, a WordPiece vocabulary is trained on the train split. Corpus reads it all back.
"""
import argparse
import ast
import collections
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
import time
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from configs import Failure, UserError, atomic, discard, run

SPLITS = ("train", "val", "test")
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
IDS = ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id")
HUB = "https://huggingface.co"  # HF_ENDPOINT names another
_GLUE, _SMERITY = "https://dl.fbaipublicfiles.com/glue/data/", "https://wikitext.smerity.com/"
_SENTEVAL = "https://dl.fbaipublicfiles.com/senteval/senteval_data/"
_SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset/"
SOURCES = {  # name: licence, files as (URL, bytes, SHA-256)
    "wikitext2": ("CC BY-SA 3.0", [(_SMERITY + "wikitext-2-v1.zip", 4475746, (
        "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"))]),
    "wikitext2_raw": ("CC BY-SA 3.0", [(_SMERITY + "wikitext-2-raw-v1.zip", 4721645, (
        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"))]),
    "wikitext103": ("CC BY-SA 3.0", [(_SMERITY + "wikitext-103-v1.zip", 190229076, (
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"))]),
    "wikitext103_raw": ("CC BY-SA 3.0", [(_SMERITY + "wikitext-103-raw-v1.zip", 191984949, (
        "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794"))]),
    "squad": ("CC BY-SA 4.0", [
        (_SQUAD + "train-v1.1.json", 30288272,
         "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955"),
        (_SQUAD + "dev-v1.1.json", 4854279,
         "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9")]),
}
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
BATCH = 2**22  # characters encoded, or ids read back, at once: a few hundred MB of memory


class Corpus:
    """A prepared corpus: data/<name>/. UserError when it is missing, cut short or inconsistent.

    Attributes: name, meta (meta.json as a dict), vocab_size, pad_id, unk_id, cls_id, sep_id,
    mask_id, special_ids (the tuple of those five), tokenizer_hash.
    """

    def __init__(self, name, root="data"):
        self.name, self.folder = name, Path(root, name)
        file = self.folder / "meta.json"
        if not file.is_file():
            command = name.replace("_raw", " --raw") if name in ("docs", *SOURCES) else (
                f"text {name} PATH...")
            raise UserError(f"{self.folder}: no such corpus: python prepare_data.py {command}")
        facts = _facts(read_vocab(self.folder))
        try:
            self.meta = json.loads(file.read_text(encoding="utf-8"))
            whole = facts.items() <= self.meta.items() and self.meta["unigram_perplexity"] > 0
            whole = whole and all(self.meta["tokens"][split] > 0 for split in SPLITS)
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
        ids = np.memmap(file, dtype="<u2", mode="r")
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
    missing = [token for token in SPECIALS if token not in tokens]
    again = [token for token, number in collections.Counter(tokens).items() if number > 1]
    if missing or again or len(tokens) > 2**16:
        raise UserError(f"{path}: not a vocabulary: " + (
            f"no {', '.join(missing)}" if missing else f"{again[0]!r} more than once" if again
            else f"{len(tokens):,} tokens, but ids of 16 bits allow 65,536"))
    return tokens


def build_tokenizer(vocab):
    """The uncased BERT tokenizer (tokenizers.Tokenizer) of a vocab.txt, a corpus's folder or a list
    of tokens. It adds no [CLS] and [SEP]; "[MASK]" in a text becomes mask_id."""
    vocab = vocab if isinstance(vocab, list) else read_vocab(vocab)
    ids = {token: number for number, token in enumerate(vocab)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def _facts(vocab):
    """What meta.json says of a vocabulary."""
    return {"vocab_size": len(vocab), **dict(zip(IDS, map(vocab.index, SPECIALS))),
            "tokenizer_hash": hashlib.sha256("\n".join(vocab).encode()).hexdigest()}


def unigram_perplexity(train_tokens, heldout_tokens, vocab_size, special_ids):
    """Perplexity of the held-out ordinary tokens under the training tokens' unigram frequencies,
    add-one smoothed: that of a model which knows how often tokens occur and nothing else.
    Tokens are arrays of ids; special tokens count in neither."""
    def counts(tokens):
        total = sum(np.bincount(tokens[at:at + BATCH], minlength=vocab_size)
                    for at in range(0, len(tokens), BATCH))
        return np.delete(total, list(special_ids))
    train, heldout = counts(train_tokens) + 1, counts(heldout_tokens)
    return float(np.exp(-(heldout @ np.log(train / train.sum())) / heldout.sum()))


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
            left = f"ETA {left:.0f} s" if self.size else ""
            print("\r\033[K" * self.terminal + f"{self.what}: {self.done / 1e6:.1f} of "
                  f"{self.size / 1e6:.1f} MB, {rate}, {f'{spent:.0f} s' if last else left}",
                  end="" if self.terminal and not last else "\n", flush=True)


# From here on a text is a stream: its lines, and None at the end of every document.

def write_corpus(name, source, stream, vocab, root="data"):
    """Write data/<name>/ whole or not at all, in place of an older one, and print what is in it.

    source: where the text is from; stream(split): the split's text, as often as it is called;
    vocab: the tokens by id, or how many to learn from split 'train'. UserError for an empty split.
    """
    sizes = {split: sum(len(line) for line in stream(split) if line) for split in SPLITS}
    if not all(sizes.values()):  # all of the text was read now: it holds no more surprises
        raise UserError(f"{source}: no text for {min(sizes, key=sizes.get)}")
    folder = Path(root, name)
    counts = {key: dict.fromkeys(SPLITS, 0) for key in ("documents", "tokens", "unknown")}
    with _replacing(folder) as temporary:
        temporary.mkdir()
        if isinstance(vocab, int):
            vocab = _train_vocab(stream("train"), sizes["train"], vocab)
        (temporary / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
        tokenizer, facts = build_tokenizer(vocab), _facts(vocab)
        tokenizer.encode_special_tokens = True  # a "[SEP]" in a text is text, not the token
        progress = Progress(f"{folder}: encoding", sum(sizes.values()))
        for split in SPLITS:
            with open(temporary / f"{split}.bin", "wb") as file:
                for batch in _batches(stream(split)):
                    encoded = tokenizer.encode_batch_fast([line or "" for line in batch],
                                                          add_special_tokens=False)
                    ids = np.array([i for line, pieces in zip(batch, encoded) for i in (
                        [facts["sep_id"]] if line is None else pieces.ids)])
                    assert ids.max() < 2**16
                    ids.astype("<u2").tofile(file)
                    counts["documents"][split] += batch.count(None)
                    counts["tokens"][split] += len(ids)
                    counts["unknown"][split] += int((ids == facts["unk_id"]).sum())
                    progress(sum(len(line or "") for line in batch), sum(counts["tokens"].values()))
        progress(tokens=sum(counts["tokens"].values()), last=True)
        train, val = (np.memmap(temporary / f"{split}.bin", "<u2", "r") for split in SPLITS[:2])
        unigram = unigram_perplexity(train, val, len(vocab), [facts[key] for key in IDS])
        meta = {"name": name, "unigram_perplexity": unigram, "source": source, **facts, **counts}
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    corpus = Corpus(name, root)
    print(f"{folder}: {corpus.vocab_size:,} tokens in the vocabulary, hash "
          f"{corpus.tokenizer_hash[:12]}; {source}")
    for split in SPLITS:
        documents, tokens, unknown = (corpus.meta[key][split] for key in counts)
        print(f"{folder}/{split}.bin: {documents:,} documents, {tokens:,} tokens, "
              f"{corpus.split(split).nbytes / 1e6:.1f} MB, {unknown / tokens:.3%} [UNK]")


@contextlib.contextmanager
def _replacing(folder):
    """atomic() for a folder that may exist: the old one goes when the new one is whole. Killed
    between the two renames, it leaves both, as .old_<name> and .new_<name>."""
    new, old = folder.with_name(f".new_{folder.name}"), folder.with_name(f".old_{folder.name}")
    if old.exists() and not folder.exists():
        os.replace(old, folder)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(new, ignore_errors=True)
    with atomic(new) as temporary:
        yield temporary
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)


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


def _batches(stream):
    """The stream in lists of about BATCH characters."""
    batch, length = [], 0
    for line in stream:
        batch.append(line)
        length += len(line or "")
        if length >= BATCH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _hold_out(stream, period, split):
    """The documents of one split: of every `period`, the last but one is val, the last test."""
    number = 0
    for line in stream:
        if split == {period - 2: "val", period - 1: "test"}.get(number % period, "train"):
            yield line
        number += line is None


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
                yield line
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


def prepare_text(name, vocab, paths, split, val_every):
    """Text files, and folders of *.txt, whose documents end at blank lines or with the file."""
    documents = {}
    for path in map(Path, paths):
        found = sorted(path.rglob("*.txt")) if path.is_dir() else [path] if path.exists() else []
        if not found:
            raise UserError(f"{path}: no such file, or a folder without *.txt")
        for file in found:
            documents[file] = sum(line is None for line in _documents(file, STARTS[split]))
            if not documents[file]:
                raise UserError(f"{file}: empty: no text in it")
    total = sum(documents.values())
    if total < 3:
        raise UserError(f"{paths[0]}: {total} documents in all, ended by --split {split}: it takes "
                        "3 to have one for val and one for test")
    if val_every < 3:
        raise UserError(f"--val_every {val_every}: expected at least 3: train, val and test")
    period = min(total, val_every)
    write_corpus(name, f"{len(documents)} text files: {' '.join(paths)}", lambda which: _hold_out(
        (line for file in documents for line in _documents(file, STARTS[split])), period, which),
        vocab)


def prepare_wikitext(name, vocab, place):
    """WikiText in its official splits, from the folder or zip `place` or else downloaded."""
    url = SOURCES[name][1][0][0]
    path = Path(place) if place else fetch(SOURCES[name][1])[0]
    if not path.is_dir() and not zipfile.is_zipfile(path):
        raise UserError(f"{path}: neither a folder nor a whole zip file")
    top = path if path.is_dir() else zipfile.Path(str(path))
    folders, files = [top, *(inside for inside in top.iterdir() if inside.is_dir())], {}
    for split, stem in zip(SPLITS, ("train", "valid", "test")):
        names = (f"wiki.{stem}.{'raw' if name.endswith('_raw') else 'tokens'}", f"{stem}.txt")
        found = [file for folder in folders for n in names if (file := folder / n).is_file()]
        if not found:
            raise UserError(f"{path}: no {' or '.join(names)} in it")
        files[split] = found[0]
    try:
        write_corpus(name, place or url,
                     lambda split: _documents(files[split], STARTS["wikitext"]), vocab)
    except zipfile.BadZipFile as error:
        raise UserError(f"{path}: damaged ({error}): remove it to download it again") from None


def fetch(sources, place=None):
    """The local files of [(URL, bytes, SHA-256)]: from the folder `place`, or else downloaded to
    data/downloads/. UserError where `place` lacks one."""
    paths = [Path(place or DOWNLOADS, Path(url).name) for url, _, _ in sources]
    for path, (url, size, sha256) in zip(paths, sources):
        if place and not path.is_file():
            raise UserError(f"{path}: no such file")
        if not path.exists():
            download(url, path, size, sha256)
    return paths


def download(url, path, size=0, sha256=""):
    """Fetch `url` to the file `path`, which is whole or absent, in up to four attempts.

    What came so far is in <path>.part: the next attempt, or the next call, goes on from there if
    the server can. size (bytes) and sha256 are checked where known; the hub tells its large files'
    SHA-256 itself. HF_ENDPOINT takes the hub's place, HTTPS_PROXY and the like are honoured.
    Failure when it cannot be had.
    """
    import requests  # only here: nothing else needs the network

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


def prepare_task(folder, sources, place, force):
    """data/glue/TASK/ or data/squad/ with the official files, as the official archive unpacks.
    place: a folder that holds the downloads, or what they unpack to, or that archive."""
    if folder.exists() and not force:
        print(f"{folder} exists already (--force replaces it)")
        return
    names = [Path(url).name for url, _, _ in sources]
    if place is None:
        files = fetch(sources)
    elif place.is_file() and names[0].endswith(".zip"):
        files = [place]
    else:
        wanted = [names, ["train.tsv"]] if names[0].endswith(".zip") else [names]
        found = [[home / name for name in some] for home in (place / folder.name, place)
                 for some in wanted if all((home / name).is_file() for name in some)]
        if not found:
            raise UserError(f"{place}: no {' or '.join(map(', '.join, wanted))} in it")
        files = found[0]
        if files[0].name == "train.tsv":
            files = sorted(file for file in files[0].parent.iterdir() if file.is_file())
    with _replacing(folder) as temporary:
        temporary.mkdir()
        for file in files:
            if names[0].endswith(".zip") and len(files) == 1:
                _unpack(file, temporary)
            else:
                shutil.copyfile(file, temporary / file.name)
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
    folders = {f"Python {sys.version.split()[0]}": sysconfig.get_path("stdlib")}
    for package in ("torch", "numpy"):
        folder = Path(importlib.util.find_spec(package).origin).parent
        folders[f"{package} {importlib.metadata.version(package)}"] = folder
    # not other packages, and no tests, whose docstrings are mostly one-line labels
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [file for folder in folders.values() for file in sorted(Path(folder).rglob("*.py"))
             if skip.isdisjoint(file.relative_to(folder).parts)]
    source = f"docstrings of {', '.join(folders)}"
    progress = Progress(source, sum(file.stat().st_size for file in files))
    documents, seen = [], set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        for file in files:
            code = file.read_bytes()
            progress(len(code))
            try:
                found = dict.fromkeys(_docstrings(ast.parse(code)))
            except (SyntaxError, ValueError, RecursionError):
                continue  # a template, or meant for another Python
            new = [text for text in found if text and text not in seen]
            seen.update(new)
            if new:  # a lone surrogate has no UTF-8
                documents += [text.encode("utf-8", "replace").decode() for text in new] + [None]
    progress(last=True)
    write_corpus("docs", source, lambda split: _hold_out(documents, 20, split), vocab, root)


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


def main():
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--force", action="store_true", help="replace the corpus if it exists")
    either = shared.add_mutually_exclusive_group()
    either.add_argument("--vocab", metavar="PATH", help="a vocab.txt, or another corpus's folder")
    either.add_argument("--vocab_size", type=int, metavar="N",
                        help="train a vocabulary of N tokens (4096 for docs, else 8192)")
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    corpora = parser.add_subparsers(dest="corpus", required=True)
    corpora.add_parser("docs", parents=[shared], help="docstrings: Python, torch, numpy")
    for name in ("wikitext2", "wikitext103"):
        wikitext = corpora.add_parser(name, parents=[shared], help="Wikipedia articles")
        wikitext.add_argument("--from", dest="place", metavar="PATH", help="folder or zip on disk")
        wikitext.add_argument("--raw", action="store_true", help="the version without <unk>")
    text = corpora.add_parser("text", parents=[shared], help="text of your own")
    text.add_argument("name", help="the corpus is data/NAME")
    text.add_argument("paths", nargs="+", metavar="PATH", help="a text file or a folder of *.txt")
    text.add_argument("--split", choices=("blank", "file"), default="blank",
                      help="documents end at blank lines (default) or with their file")
    text.add_argument("--val_every", type=int, default=100, metavar="N",
                      help="of N documents one is for val, one for test (100; fewer if need be)")
    glue = corpora.add_parser("glue", help="the tasks of GLUE, for finetune.py")
    glue.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(GLUE)}; all")
    for command in (glue, corpora.add_parser("squad", help="SQuAD 1.1, for finetune.py")):
        command.add_argument("--from", dest="place", type=Path, metavar="PATH",
                             help="folder (or zip) that has the files")
        command.add_argument("--force", action="store_true", help="replace what exists")
    args = parser.parse_args()
    if args.corpus == "squad":
        return prepare_task(Path("data/squad"), SOURCES["squad"][1], args.place, args.force)
    if args.corpus == "glue":
        if unknown := sorted(set(args.tasks) - GLUE.keys()):
            raise UserError(f"{unknown[0]}: no task of GLUE: expected {', '.join(GLUE)}")
        for task in args.tasks or GLUE:
            prepare_task(Path("data/glue", task), GLUE[task], args.place, args.force)
        return
    name = getattr(args, "name", args.corpus) + "_raw" * getattr(args, "raw", False)
    if Path(name).name != name or name.startswith("."):
        raise UserError(f"{name}: a corpus's name is a folder's name, without / or a leading .")
    if Path("data", name).exists() and not args.force:
        raise UserError(f"data/{name} exists already (--force replaces it)")
    size = (4096 if args.corpus == "docs" else 8192) if args.vocab_size is None else args.vocab_size
    if not 256 <= size <= 2**16:
        raise UserError(f"--vocab_size={size}: expected 256 to 65,536")
    vocab = size if args.vocab is None else read_vocab(args.vocab)
    if args.corpus == "docs":
        prepare_docs(vocab=vocab)
    elif args.corpus == "text":
        prepare_text(name, vocab, args.paths, args.split, args.val_every)
    else:
        prepare_wikitext(name, vocab, args.place)


if __name__ == "__main__":
    run(main)
