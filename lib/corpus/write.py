"""
Write a corpus as token files, in two passes over its text.

The first pass hashes the documents: equal ones are kept once, and each gets its split. The second
pass encodes. After each batch it notes in state.json how far it came, and a killed preparation
goes on from there. Neither pass holds more of the text than a batch.
"""
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lib.common.errors import UserError
from lib.common.files import discard, read_json, write_text
from lib.common.progress import Progress
from lib.corpus import vocabulary
from lib.corpus.batches import SPLITS, Corpus
from lib.corpus.download import file_sha256

BATCH = 2**21  # characters encoded at once, or ids read at once: some 100 MB


class Source(NamedTuple):
    """A file of a corpus, or another source of its text."""
    name: str
    read: Callable  # returns a new stream of the text (see text.py)
    split: str | None = None  # the official split; None where documents are to be held out
    drop_heldout: bool = False  # leave sentences of val and test out of train


def write_corpus(name, origin, sources, vocab, val_every=0):
    """Write data/<name>/, whole or not at all, and print its content.

    origin: where the text is from, in words. sources: a list of Source.
    vocab: the tokens by id, or how many to learn from the training documents.
    val_every: one document of this many is for val, one for test, and only the first of equal
    documents is kept. With 0 the sources have their official splits, and all documents are kept.
    UserError for a source without text. Unfinished work is in data/.part_<name>/. The next call
    with the same text goes on from there, and writes the same bytes.
    """
    counts, hashes, n_lines = _hash_documents(sources)
    splits = _assign_splits(sources, counts, hashes, val_every)
    heldout = _heldout_sentences(sources, counts, splits)
    folder, work = Path("data", name), Path("data", f".part_{name}")
    task = repr(vocab).encode() + hashes.tobytes() + splits.tobytes()
    task = hashlib.sha256(task).hexdigest()
    state = read_json(work / "state.json") if (work / "state.json").exists() else {}
    if state.get("task") == task:
        print(f"{work}: going on after {state['lines']:,} lines")
    else:
        discard(work)
        state = {"task": task, "lines": 0, "bytes": [0, 0, 0]}
        if isinstance(vocab, int):
            def read_train():
                lines = _read_lines(sources, splits, heldout)
                return (line for line, split in lines if split == 0 and line)
            vocab = vocabulary.train_vocab(read_train, n_lines, vocab)
        vocabulary.write_vocab(work, vocab)
    vocab = vocabulary.read_vocab(work)
    lines = itertools.islice(_read_lines(sources, splits, heldout), state["lines"], None)
    _encode(work, state, Progress(lines, desc=f"encoding {name}", total=n_lines,
                                  initial=state["lines"], unit=" lines"))
    facts = vocabulary.vocab_facts(vocab)
    ids = {split: _count_ids(work / f"{split}.bin", len(vocab)) for split in SPLITS}
    no_words = [facts[key] for key in ("pad_id", "cls_id", "sep_id", "mask_id")]
    write_text(work / "meta.json", json.dumps({
        "name": name, "source": origin, **facts, "duplicates": int((splits < 0).sum()),
        "unigram_perplexity": unigram_perplexity(ids["train"], ids["val"], no_words),
        "documents": {split: int(count[facts["sep_id"]]) for split, count in ids.items()},
        "tokens": {split: int(count.sum()) for split, count in ids.items()},
        "unknown": {split: int(count[facts["unk_id"]]) for split, count in ids.items()},
        "sha256": {split: file_sha256(work / f"{split}.bin") for split in SPLITS},
    }, indent=1) + "\n")
    discard(folder)
    os.replace(work, folder)
    discard(folder / "state.json")
    _print_summary(Corpus(name))


def _hash_documents(sources):
    """Read the text once, and count and hash its documents. Returns the number of documents of each
    source, every document's hash of 8 bytes, and the number of lines. Among 10 million documents,
    two different ones have the same hash with probability 3e-6."""
    counts, hashes = [], bytearray()
    with Progress(desc="reading", unit=" lines") as progress:
        for source in sources:
            before, document = len(hashes), hashlib.blake2b(digest_size=8)
            for line in source.read():
                progress.update()
                if line is None:
                    hashes += document.digest()
                    document = hashlib.blake2b(digest_size=8)
                else:
                    document.update(line.encode())
            counts.append((len(hashes) - before) // 8)
            if not counts[-1]:
                raise UserError(f"{source.name}: empty: no text in it")
    return counts, np.frombuffer(hashes, "<u8"), progress.n


def _assign_splits(sources, counts, hashes, val_every):
    """Return every document's index in SPLITS, or -1 for a duplicate: int8 (documents,)."""
    if not val_every:
        official = [SPLITS.index(source.split) for source in sources]
        return np.repeat(official, counts).astype(np.int8)
    firsts = np.sort(np.unique(hashes, return_index=True)[1])  # the first of equal documents
    if len(firsts) < 3:
        raise UserError(f"{sources[0].name}: {len(firsts)} documents in all: it takes 3 different "
                        "ones to have one for val and one for test")
    period = min(len(firsts), val_every)
    place = np.arange(len(firsts)) % period
    splits = np.full(len(hashes), -1, np.int8)
    splits[firsts] = (place == period - 2) + 2 * (place == period - 1)
    return splits


def _heldout_sentences(sources, counts, splits):
    """Return the lines of val and test that train must not repeat: a set, held in memory."""
    drops = [source.drop_heldout for source in sources]
    lines = _read_lines(itertools.compress(sources, drops), splits[np.repeat(drops, counts)])
    return {line for line, split in lines if split > 0 and line}


def _read_lines(sources, splits, heldout=frozenset()):
    """Yield (line, split) for all of the text. split: of the line's document; -1 for a line to
    leave out. It is in a duplicate or, in train, it is one of the `heldout` sentences."""
    document = 0
    for source in sources:
        for line in source.read():
            split = splits[document]
            repeated = source.drop_heldout and split == 0 and line in heldout
            yield line, -1 if repeated else split
            document += line is None


def _encode(work, state, lines):
    """Append ids to work/{train,val,test}.bin, and keep `state` beside them, up to date. lines:
    (line, split) of the text that is not encoded yet."""
    tokenizer = vocabulary.text_tokenizer(work)
    sep_id = vocabulary.special_ids(tokenizer).sep
    files = [work / f"{split}.bin" for split in SPLITS]
    for file, size in zip(files, state["bytes"]):
        file.touch()
        if file.stat().st_size < size:
            raise UserError(f"{file}: shorter since it was left: remove {work}")
        os.truncate(file, size)
    for batch in _batches(lines):
        for split, path in enumerate(files):
            texts = [line for line, its_split in batch if its_split == split]
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            ids = (encoding.ids if text else [sep_id]
                   for text, encoding in zip(texts, encodings))
            with open(path, "ab") as file:
                file.write(np.fromiter(itertools.chain.from_iterable(ids), "<u2").tobytes())
                file.flush()
                os.fsync(file.fileno())
                state["bytes"][split] = file.tell()
        state["lines"] += len(batch)
        write_text(work / "state.json", json.dumps(state))


def _batches(lines):
    """Yield lists of (line, split) with about BATCH characters each. A document ends with ""."""
    batch, length = [], 0
    for line, split in lines:
        batch.append((line or "", split))
        length += len(line or "")
        if length >= BATCH:
            yield batch
            batch, length = [], 0
    yield batch


def _count_ids(file, vocab_size):
    """Count how often each id occurs in a .bin file: (vocab_size,)."""
    counts = np.zeros(vocab_size, np.int64)
    with open(file, "rb") as source:
        while len(ids := np.fromfile(source, "<u2", BATCH)):
            counts += np.bincount(ids, minlength=vocab_size)
    return counts


def unigram_perplexity(train, heldout, special_ids):
    """Return the held-out perplexity of train's token frequencies, add-one smoothed. It is None
    without training text. train, heldout: how often each id occurs, (vocab_size,). special_ids: ids
    to leave out."""
    if not train.any():
        return None
    train, heldout = (np.delete(counts, special_ids) for counts in (train + 1, heldout))
    if not heldout.any():
        raise UserError("the documents held out as val have no word: take more text, or another "
                        "--val_every")
    return float(np.exp(-(heldout @ np.log(train / train.sum())) / heldout.sum()))


def _print_summary(corpus):
    """Print what is in a corpus."""
    meta = corpus.meta
    print(f"{corpus.folder}: {corpus.vocab_size:,} tokens in the vocabulary, hash "
          f"{corpus.tokenizer_hash[:12]}; {meta['duplicates']:,} duplicate documents left out; "
          f"{meta['source']}")
    for split, tokens in meta["tokens"].items():
        unknown = meta["unknown"][split] / max(tokens, 1)
        print(f"{corpus.folder}/{split}.bin: {meta['documents'][split]:,} documents, "
              f"{tokens:,} tokens, {unknown:.3%} unknown")
