"""
Write a corpus as token files.
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
from lib.corpus.batches import MASKED, SPLITS, Corpus
from lib.corpus.download import replace_folder
from lib.corpus.text import BETWEEN_WORDS
from lib.corpus.vocabulary import (
    GPT2_SPECIALS,
    IDS,
    byte_level_tokenizer,
    read_vocab,
    special_tokens,
    text_encoder,
    train_vocab,
    vocab_facts,
)

BATCH = 2**21  # characters encoded, or ids read back, at once: some 100 MB
LOSS_STD = 2.7  # of the loss over masked tokens (configs/demo.py after 200 steps, 10,240 tokens)


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
            vocab = train_vocab(read, size, vocab)
        write_text(work / "vocab.txt", "\n".join(vocab) + "\n")
    else:
        print(f"{work}: going on after {state['documents']:,} documents")
    vocab = read_vocab(work)
    if special_tokens(vocab) is GPT2_SPECIALS:
        write_text(work / "tokenizer.json", byte_level_tokenizer(vocab).to_str(pretty=True))
    lines = Progress(_lines(parts, counts, splits, heldout, state["documents"]), total=size,
                     desc=f"encoding {name}", initial=state["lines"], unit=" lines")
    _encode(work, state, lines, vocab)
    facts = vocab_facts(vocab)
    seen = {split: _count(work / f"{split}.bin", len(vocab)) for split in SPLITS}
    write_text(work / "meta.json", json.dumps({
        "name": name, "source": source, **facts, "duplicates": int((splits < 0).sum()),
        "unigram_perplexity": unigram_perplexity(
            seen["train"], seen["val"], [facts[key] for key in IDS if key != "unk_id"]),
        "documents": {split: int(ids[facts["sep_id"]]) for split, ids in seen.items()},
        "tokens": {split: int(ids.sum()) for split, ids in seen.items()},
        "unknown": {split: int(ids[facts["unk_id"]]) for split, ids in seen.items()},
        "sha256": dict(zip(SPLITS, state["sha256"])),
    }, indent=1) + "\n")
    replace_folder(folder, work)
    discard(folder / "state.json")
    _report(Corpus(name), val_every)


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
    masked = int(MASKED * meta["tokens"]["val"])
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
    encode, sep = text_encoder(vocab), vocab_facts(vocab)["sep_id"]
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
