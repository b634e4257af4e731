"""
Read text as documents, and write documents as token files.

>>> list(read_documents(Path("novel.txt"), "blank"))         # [["a line\\n", "another\\n"], ...]
>>> source = Source(partial(read_documents, Path("novel.txt"), "blank"))
>>> write_corpus("novel", "a novel", [source], 8192, val_every=100)     # data/novel/
"""
import collections
import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from tokenizers import trainers

from lib.corpus import SPLITS
from lib.device import Progress
from lib.download import file_sha256, new_folder, unpack
from lib.errors import UserError
from lib.files import write_text
from lib.tokenizer import (
    SPECIALS,
    special_ids,
    tokens_by_id,
    vocab_hash,
    wordpiece_tokenizer,
    write_vocab,
)

SENTENCES = 1000  # mean length of a BookCorpus document, in lines
BATCH = 4096  # lines that are encoded at once
PIECE = re.compile(r".{1,8192}(?= \w|\Z)|.{1,8192}", re.DOTALL)  # of a line, cut before a word
TRAIN, VAL, TEST, DUPLICATE = 0, 1, 2, -1  # the first three are places in SPLITS


def find_files(path, *endings):
    """List the files of a folder or an archive that have one of the endings; or [path], a file."""
    if path.name.endswith((".zip", ".tar.bz2")):
        path = unpack(path)
    if path.is_file():
        return [path]
    files = [file for file in sorted(path.rglob("*")) if file.name.lower().endswith(endings)]
    if not files:
        raise UserError(f"{path}: no such file, nor a folder with *{' or *'.join(endings)} in it")
    return files


def read_documents(path, ends):
    """Yield the documents of a file, each a list of lines. Blank lines are left out.

    A row of a .parquet file is a document. `ends` says where a document of a text file ends:
    'blank'      At a blank line.
    'file'       With the file.
    'wikitext'   Before the title of the next article.
    'sentences'  At a blank line, or after about 1,000 lines. A row of .parquet is a line here.

    'sentences' is for BookCorpus, a sentence a line without the ends of books. A third of its books
    are in it more than once (Bandy and Vincent, 2021). The hash of two lines says where a document
    ends, which cuts all copies of a book at the same places.
    """
    lines = read_lines(path)
    if path.suffix == ".parquet":
        rows = read_rows(path)
        if ends != "sentences":
            yield from filter(None, rows)
            return
        lines = itertools.chain.from_iterable(rows)
    document, before = [], ""
    for line, after in itertools.pairwise(itertools.chain(lines, [""])):
        blank = not line.strip()
        if ends == "wikitext":
            ended = is_title(line) and not before.strip() and not after.strip()
        else:
            ended = blank and ends != "file"
        if ended and document:
            yield document
            document = []
        if not blank:
            document.append(line)
            if ends == "sentences" and zlib.crc32((before + line).encode()) % SENTENCES == 0:
                yield document
                document = []
        before = line
    if document:
        yield document


def is_title(line):
    """Tell whether a line looks like " = Title = ", and not like " = = Section = = ".

    Lines of tables look like titles, too, but have no blank lines around them. With both rules
    WikiText-2 has 600, 60 and 60 articles, as published.
    """
    return re.match(r" = (?!= ).* = $", line)


def read_lines(path):
    """Yield the lines of a text file, a very long one in pieces."""
    with open(path, encoding="utf-8") as file:
        try:
            for line in file:
                yield from PIECE.findall(line.removesuffix("\n") + "\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text ({error.reason}): convert it, for example "
                            f"with iconv -f WINDOWS-1252 -t UTF-8 {path} > new.txt") from None


def read_rows(path):
    """Yield the rows of a .parquet file's column `text`, each a list of lines."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        if "text" not in file.schema_arrow.names:
            raise UserError(f"{path}: no column 'text' in it")
        for batch in file.iter_batches(1000, columns=["text"]):
            for text in batch["text"].to_pylist():
                lines = (text or "").replace("\r\n", "\n").split("\n")
                yield [f"{line}\n" for line in lines if line.strip()]


def train_tokenizer(read, size, vocab_size):
    """Learn WordPieces; return their tokenizer. The special tokens come first.

    read: returns an iterator over the lines of the text, whose number is `size`; called twice.
    `tokenizers` alone would number the pieces "##a" at random, and break ties by these numbers.
    Declared as special tokens they have fixed numbers.
    """
    tokenizer = wordpiece_tokenizer(SPECIALS)
    normalize = tokenizer.normalizer.normalize_str
    split = tokenizer.pre_tokenizer.pre_tokenize_str
    characters = collections.Counter()
    for character, count in collections.Counter(itertools.chain.from_iterable(read())).items():
        for normal in normalize(character).strip():
            characters[normal] += count
    # every character costs two tokens, "a" and "##a": rare ones would fill a small vocabulary
    by_count = sorted(characters, key=lambda character: (-characters[character], character))
    alphabet = by_count[:vocab_size // 16]
    inside = [f"##{c}" for c in sorted(alphabet) if len(split(normalize(f"a{c}"))) == 1]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*SPECIALS, *inside],
        initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False)
    lines = Progress(read(), desc=f"learning {vocab_size:,} WordPieces", total=size, unit=" lines")
    tokenizer.train_from_iterator(lines, trainer)
    return wordpiece_tokenizer(tokens_by_id(tokenizer))


class Source(NamedTuple):
    """A file of a corpus, or another source of documents."""
    read: Callable  # returns an iterator over the documents; is called several times
    split: int | None = None  # the official one; None where documents are to be held out
    drop_heldout: bool = False  # leave sentences of val and test out of train


def write_corpus(name, origin, sources, tokenizer, val_every=None, force=False):
    """Write data/<name>/, whole or not at all, and print its sizes.

    origin: where the text is from, in words. sources: a list of Source.
    tokenizer: a tokenizers.Tokenizer, or how many WordPieces to learn from the training documents.
    val_every: one document of this many is for val, one for test, and only the first of equal
    documents is kept. Sources with official splits keep these, and all documents.
    force: replace the corpus if it exists.
    """
    meta = {"name": name, "source": origin}
    with new_folder(f"data/{name}", force) as folder:
        meta |= write_files(folder, sources, tokenizer, val_every)
        write_text(folder / "meta.json", json.dumps(meta, indent=1) + "\n")
    for size in ("documents", "tokens", "unknown"):
        print(f"data/{name}: {size} {meta[size]}")


def write_files(folder, sources, tokenizer, val_every):
    """Write the token files and the vocabulary of a corpus; return their facts for meta.json."""
    hashes, splits, n_lines = hash_documents(sources)
    if sources[0].split is None:
        splits = hold_out(hashes, val_every)
    heldout = set()
    if any(source.drop_heldout for source in sources):
        for source, document, split in read_all(sources, splits):
            if source.drop_heldout and split in (VAL, TEST):
                heldout.update(document)
    if isinstance(tokenizer, int):
        def read_train():
            lines = read_kept(sources, splits, heldout)
            return (line for line, split in lines if split == TRAIN)
        tokenizer = train_tokenizer(read_train, n_lines, tokenizer)
    write_vocab(folder, tokenizer)
    lines = read_kept(sources, splits, heldout)
    counts = encode(folder, tokenizer, Progress(lines, total=n_lines, desc="encoding"))

    vocab = tokens_by_id(tokenizer)
    ids = special_ids(tokenizer)
    no_words = [ids.pad, ids.cls, ids.sep, ids.mask]
    return {
        "vocab_size": len(vocab),
        **{f"{use}_id": token_id for use, token_id in ids._asdict().items()},
        "tokenizer_hash": vocab_hash(vocab),
        "duplicates": int((splits == DUPLICATE).sum()),
        "unigram_perplexity": unigram_perplexity(counts[TRAIN], counts[VAL], no_words),
        "documents": dict(zip(SPLITS, counts[:, ids.sep].tolist())),
        "tokens": dict(zip(SPLITS, counts.sum(axis=1).tolist())),
        "unknown": dict(zip(SPLITS, counts[:, ids.unk].tolist())),
        "sha256": {split: file_sha256(folder / f"{split}.bin") for split in SPLITS}}


def hash_documents(sources):
    """Read the text once to hash its documents and count its lines.

    Returns the hashes, uint64 (documents,), the official splits (documents,), and the number of
    lines. Two of 10 million different documents have the same hash with probability 3e-6.
    """
    hashes, splits, n_lines = bytearray(), [], 0
    documents = read_all(sources, itertools.repeat(None))
    for source, document, _ in Progress(documents, desc="reading", unit=" documents"):
        text = "".join(document).encode()
        hashes += hashlib.blake2b(text, digest_size=8).digest()
        splits.append(source.split)
        n_lines += len(document)
    return np.frombuffer(hashes, "<u8"), np.array(splits), n_lines


def hold_out(hashes, val_every):
    """Assign documents to TRAIN, VAL and TEST; equal later ones are DUPLICATE: int8."""
    firsts = np.sort(np.unique(hashes, return_index=True)[1])  # the first of equal documents
    period = min(len(firsts), val_every)
    if period < 3:
        raise UserError(f"{len(firsts)} different documents, --val_every={val_every}: it takes 3, "
                        "for train, val and test (documents end at blank lines)")
    place = np.arange(len(firsts)) % period
    splits = np.full(len(hashes), DUPLICATE, np.int8)
    splits[firsts] = TRAIN
    splits[firsts[place == period - 2]] = VAL
    splits[firsts[place == period - 1]] = TEST
    return splits


def read_all(sources, splits):
    """Yield (source, document, split) for all documents of all sources."""
    splits = iter(splits)
    for source in sources:
        for document in source.read():
            yield source, document, next(splits)


def read_kept(sources, splits, heldout):
    """Yield (line, split) for the text that is kept; the line "" ends a document."""
    for source, document, split in read_all(sources, splits):
        if split != DUPLICATE:
            repeats = source.drop_heldout and split == TRAIN
            for line in document:
                if not (repeats and line in heldout):
                    yield line, split
            yield "", split


def encode(folder, tokenizer, lines):
    """Write the ids of (line, split) to train.bin, val.bin and test.bin in a folder.

    Returns how often each id occurs in each split: int64 (3, vocab_size).
    """
    tokenizer.encode_special_tokens = True  # a "[SEP]" in a text is text
    sep = special_ids(tokenizer).sep
    size = tokenizer.get_vocab_size()
    counts = np.zeros((len(SPLITS), size), np.int64)
    lines = iter(lines)
    while batch := list(itertools.islice(lines, BATCH)):
        texts = [line for line, _ in batch]
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [[], [], []]  # of train, val and test
        for (line, split), encoding in zip(batch, encodings):
            ids[split].extend(encoding.ids if line else [sep])
        for split, name in enumerate(SPLITS):
            counts[split] += np.bincount(ids[split], minlength=size)
            with open(folder / f"{name}.bin", "ab") as file:
                file.write(np.array(ids[split], "<u2").tobytes())
    return counts


def unigram_perplexity(train, heldout, special_ids):
    """Return the held-out perplexity of train's token frequencies, add-one smoothed.

    train, heldout: how often each id occurs, (vocab_size,). special_ids: ids to leave out. None
    without training text.
    """
    if not train.any():
        return None
    train = np.delete(train + 1, special_ids)
    heldout = np.delete(heldout, special_ids)
    return float(np.exp(-(heldout @ np.log(train / train.sum())) / heldout.sum()))
