"""
Write a corpus as token files, in two passes over its text.

The first pass hashes the documents: equal ones are kept once, and each gets its split. The second
pass encodes. After each batch it notes in state.json how far it came, and a killed preparation
goes on from there. Neither pass holds more of the text than a batch.
"""
import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lib.common.errors import UserError
from lib.common.files import discard, write_text
from lib.common.progress import Progress
from lib.corpus import vocabulary
from lib.corpus.batches import MASKED, SPLITS, Corpus
from lib.corpus.download import replace_folder

BATCH = 2**21  # characters encoded at once, or ids read at once: some 100 MB
LOSS_STD = 2.7  # of the loss over masked tokens (configs/demo.py after 200 steps, 10,240 tokens)


class Source(NamedTuple):
    """A file of a corpus, or another source of its text."""
    name: str
    read: Callable  # returns a new stream of the text (see text.py)
    split: str | None = None  # the official split; None where documents are to be held out
    drop_heldout: bool = False  # leave sentences of val and test out of train


def write_corpus(name, origin, sources, vocab, val_every=0):
    """Write data/<name>/, whole or not at all, in place of an older one; print what is in it.

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
    task = hashlib.sha256(repr(vocab).encode())
    task.update(hashes)
    task.update(splits)
    try:
        state = json.loads((work / "state.json").read_text())
    except (OSError, ValueError):  # missing or damaged
        state = {}
    if state.get("task") == task.hexdigest():
        print(f"{work}: going on after {state['documents']:,} documents")
    else:
        discard(work)
        state = {"task": task.hexdigest(), "documents": 0, "lines": 0, "bytes": [0, 0, 0],
                 "sha256": [hashlib.sha256().hexdigest()] * 3}
        if isinstance(vocab, int):
            def read_train():
                lines = _read_lines(sources, counts, splits, heldout)
                return (line for line, split in lines if split == 0 and line)
            vocab = vocabulary.train_vocab(read_train, n_lines, vocab)
        vocabulary.write_vocab(work, vocab)
    vocab = vocabulary.read_vocab(work)
    lines = Progress(_read_lines(sources, counts, splits, heldout, state["documents"]),
                     desc=f"encoding {name}", total=n_lines, initial=state["lines"], unit=" lines")
    _encode(work, state, lines)
    facts = vocabulary.vocab_facts(vocab)
    ids = {split: _count_ids(work / f"{split}.bin", len(vocab)) for split in SPLITS}
    no_words = [facts[key] for key in ("pad_id", "cls_id", "sep_id", "mask_id")]
    write_text(work / "meta.json", json.dumps({
        "name": name, "source": origin, **facts, "duplicates": int((splits < 0).sum()),
        "unigram_perplexity": unigram_perplexity(ids["train"], ids["val"], no_words),
        "documents": {split: int(count[facts["sep_id"]]) for split, count in ids.items()},
        "tokens": {split: int(count.sum()) for split, count in ids.items()},
        "unknown": {split: int(count[facts["unk_id"]]) for split, count in ids.items()},
        "sha256": dict(zip(SPLITS, state["sha256"])),
    }, indent=1) + "\n")
    replace_folder(folder, work)
    discard(folder / "state.json")
    _print_summary(Corpus(name), val_every)


def _hash_documents(sources):
    """Read the text once, and count and hash its documents. Returns the number of documents of each
    source; every document's hash of 8 bytes (among 10 million documents, two different ones have
    the same with probability 3e-6); and the number of lines."""
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
    documents = splits[np.repeat(drops, counts)]
    sources, counts = (list(itertools.compress(items, drops)) for items in (sources, counts))
    lines = _read_lines(sources, counts, documents)
    return {line for line, split in lines if split > 0 and line}


def _read_lines(sources, counts, splits, heldout=frozenset(), done=0):
    """Yield (line, split) for the text after the first `done` documents. split: of the line's
    document; -1 for a line to leave out, which is in a duplicate or, in train, is one of the
    `heldout` sentences."""
    document = 0
    for source, count in zip(sources, counts):
        if document + count <= done:  # a file that is done is not even opened
            document += count
            continue
        for line in source.read():
            if document >= done:
                split = splits[document]
                repeated = source.drop_heldout and split == 0 and line in heldout
                yield line, -1 if repeated else split
            document += line is None


def _encode(work, state, lines):
    """Append ids to work/{train,val,test}.bin, and keep `state` beside them, up to date. lines:
    (line, split) for all that `state` says is not encoded yet. At the end state["sha256"] has the
    SHA-256 of the files."""
    tokenizer = vocabulary.text_tokenizer(work)
    sep_id = vocabulary.special_ids(tokenizer).sep
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(work / f"{split}.bin", "ab+")) for split in SPLITS]
        hashes = [_cut_back(*file_state)
                  for file_state in zip(files, state["bytes"], state["sha256"])]
        for documents, texts in _batches(lines, state["documents"]):
            for file, sha256, split_texts in zip(files, hashes, texts):
                ids = ((sep_id,) if text == "" else ids
                       for text, ids in zip(split_texts, vocabulary.encode(tokenizer, split_texts)))
                written = np.fromiter(itertools.chain.from_iterable(ids), "<u2").tobytes()
                file.write(written)
                file.flush()
                os.fsync(file.fileno())
                sha256.update(written)
            if documents:
                state |= {"documents": documents, "lines": lines.n,
                          "bytes": [file.tell() for file in files],
                          "sha256": [sha256.hexdigest() for sha256 in hashes]}
                write_text(work / "state.json", json.dumps(state))


def _cut_back(file, size, sha256):
    """Cut an open .bin to the `size` that state.json says; return its hashlib.sha256 to go on with.
    UserError if the file is shorter, or its SHA-256 is not `sha256`."""
    shorter = file.tell() < size
    file.truncate(None if shorter else size)
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256")
    if shorter or digest.hexdigest() != sha256:
        raise UserError(f"{file.name}: {'shorter' if shorter else 'changed'} since it was left: "
                        f"remove {Path(file.name).parent}")
    return digest


def _batches(lines, documents):
    """Yield about BATCH characters at a time: (documents, texts). documents: how many are encoded
    after this batch, or 0 if it ends inside a very long one. texts: a list of lines for each split,
    with "" at the end of a document."""
    texts, length = ([], [], []), 0
    for line, split in lines:
        documents += line is None
        if split >= 0:
            texts[split].append(line or "")
            length += len(line or "")
        if length >= (BATCH if line is None else 2 * BATCH):
            yield documents if line is None else 0, texts
            texts, length = ([], [], []), 0
    if any(texts):
        yield documents, texts


def _count_ids(file, vocab_size):
    """Count how often each id occurs in a .bin file: (vocab_size,)."""
    counts = np.zeros(vocab_size, np.int64)
    with open(file, "rb") as source:
        while len(ids := np.fromfile(source, "<u2", BATCH)):
            counts += np.bincount(ids, minlength=vocab_size)
    return counts


def unigram_perplexity(train, heldout, special_ids):
    """Return the held-out perplexity of a model that knows only how frequent tokens are. It has the
    frequencies of the training text, add-one smoothed. train, heldout: how often each id occurs,
    (vocab_size,). special_ids: ids to leave out. None without training text."""
    if not train.any():
        return None
    train, heldout = (np.delete(counts, special_ids) for counts in (train + 1, heldout))
    return float(np.exp(-(heldout @ np.log(train / train.sum())) / heldout.sum()))


def _print_summary(corpus, val_every):
    """Print what is in a corpus; warn if its val is too short to measure a perplexity on."""
    folder, meta = corpus.folder, corpus.meta
    print(f"{folder}: {corpus.vocab_size:,} tokens in the vocabulary, hash "
          f"{corpus.tokenizer_hash[:12]}; {meta['duplicates']:,} duplicate documents left out; "
          f"{meta['source']}")
    for split in SPLITS:
        documents, tokens, unknown = (
            meta[key][split] for key in ("documents", "tokens", "unknown"))
        print(f"{folder}/{split}.bin: {documents:,} documents, {tokens:,} tokens, "
              f"{corpus.split(split).nbytes / 1e6:.1f} MB, {unknown / max(tokens, 1):.3%} unknown")
    masked = int(MASKED * meta["tokens"]["val"])
    if masked and (error := LOSS_STD / masked ** 0.5) > 0.05:
        more = ", or a smaller --val_every," if val_every else ""
        print(f"warning: {folder}/val.bin: a perplexity on its {masked:,} masked tokens has a "
              f"standard error of about {error:.0%}; more text{more} makes it less")
