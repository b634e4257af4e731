"""
Read text as documents, and write documents as token files.

>>> list(read_documents(Path("novel.txt"), "blank"))         # [["a line\\n", "another\\n"], ...]
>>> read = partial(read_documents, Path("novel.txt"), "blank")
>>> write_corpus("novel", "a novel", [(read, None)], 8192, val_every=100)     # data/novel/
"""
import collections
import itertools
import json
import re
import zlib

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
    """Yield the lines of a text file, each with a line break at its end."""
    with open(path, encoding="utf-8") as file:
        try:
            for line in file:
                yield line.removesuffix("\n") + "\n"
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text ({error.reason}): convert it, for example "
                            f"with iconv -f WINDOWS-1252 -t UTF-8 {path} > new.txt") from None


def read_rows(path):
    """Yield the rows of a .parquet file's column `text`, each a list of lines."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
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


def write_corpus(name, origin, sources, tokenizer, val_every=None, force=False):
    """Write data/<name>/, whole or not at all, and print its sizes.

    origin: where the text is from, in words.
    sources: a list of (read, split). read() returns an iterator over documents and is called
    several times. split is the official one, or None where documents are to be held out.
    tokenizer: a tokenizers.Tokenizer, or how many WordPieces to learn from the training documents.
    val_every: one document of this many is for val, one for test, and only the first of equal
    documents is kept. Sources with official splits keep these, and all documents.
    force: replace the corpus if it exists.
    """
    with new_folder(f"data/{name}", force) as folder:
        splits, n_lines = assign_splits(sources, val_every)
        if isinstance(tokenizer, int):
            def read_train():
                lines = read_kept(sources, splits)
                return (line for line, split in lines if split == TRAIN)
            tokenizer = train_tokenizer(read_train, n_lines, tokenizer)
        write_vocab(folder, tokenizer)
        lines = read_kept(sources, splits)
        counts = encode(folder, tokenizer, Progress(lines, total=n_lines, desc="encoding"))

        vocab = tokens_by_id(tokenizer)
        ids = special_ids(tokenizer)
        no_words = [ids.pad, ids.cls, ids.sep, ids.mask]
        meta = {
            "name": name,
            "source": origin,
            "vocab_size": len(vocab),
            **{f"{use}_id": token_id for use, token_id in ids._asdict().items()},
            "tokenizer_hash": vocab_hash(vocab),
            "duplicates": int((splits == DUPLICATE).sum()),
            "unigram_perplexity": unigram_perplexity(counts[TRAIN], counts[VAL], no_words),
            "documents": dict(zip(SPLITS, counts[:, ids.sep].tolist())),
            "tokens": dict(zip(SPLITS, counts.sum(axis=1).tolist())),
            "unknown": dict(zip(SPLITS, counts[:, ids.unk].tolist())),
            "sha256": {split: file_sha256(folder / f"{split}.bin") for split in SPLITS}}
        write_text(folder / "meta.json", json.dumps(meta, indent=1) + "\n")
    for size in ("documents", "tokens", "unknown"):
        print(f"data/{name}: {size} {meta[size]}")


def assign_splits(sources, val_every):
    """Read the text once; return the split of each document, and the number of lines.

    A 64-bit hash tells documents apart. Two of 10 million collide with probability 3e-6.
    """
    splits, seen, n_lines = [], set(), 0
    for document, split in Progress(read_all(sources), desc="reading", unit=" documents"):
        n_lines += len(document)
        if split is None:
            key = hash("".join(document))
            split = DUPLICATE if key in seen else TRAIN
            seen.add(key)
        splits.append(split)
    splits = np.array(splits)
    if sources[0][1] is None:
        period = min(len(seen), val_every)
        if period < 3:
            raise UserError(f"{len(seen)} different documents, --val_every={val_every}: it takes "
                            "3, for train, val and test (documents end at blank lines)")
        kept = np.flatnonzero(splits == TRAIN)
        splits[kept[period - 2::period]] = VAL
        splits[kept[period - 1::period]] = TEST
    return splits, n_lines


def read_all(sources):
    """Yield (document, official split) for all documents of all sources."""
    for read, split in sources:
        for document in read():
            yield document, split


def read_kept(sources, splits):
    """Yield (line, split) for the text that is kept; the line "" ends a document."""
    for (document, _), split in zip(read_all(sources), splits):
        if split != DUPLICATE:
            for line in document:
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
