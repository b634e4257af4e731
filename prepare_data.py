"""
Prepare text: data/<name>/ with train.bin, val.bin, test.bin, vocab.txt and meta.json.

$ python prepare_data.py docs                              # offline: this Python's docstrings
$ python prepare_data.py text books novels/ more.txt --vocab_size 16384
$ python prepare_data.py wikitext2 --vocab bert-base-uncased   # --from PATH if it is on disk
$ python prepare_data.py wikibooks                         # the paper's: Wikipedia + BookCorpus
$ python prepare_data.py weights bert-base-uncased         # to data/weights/, for init_from
$ python prepare_data.py glue SST-2 RTE                    # to data/glue/; squad: to data/squad/

The .bin files are flat little-endian uint16 token ids. Every document ends with [SEP]; none starts
with [CLS]. vocab.txt is BERT's (WordPiece), a trained one, or GPT-2's (--tokenizer gpt2). With
unusual settings it comes with a tokenizer.json. lib.corpus.Corpus reads all files.

1. corpora and tasks   2. readers and vocabularies   3. downloads   then the command line
"""
import argparse
import ast
import contextlib
import hashlib
import inspect
import itertools
import json
import platform
import re
import shutil
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from lib.corpus import SPLITS
from lib.files import atomic, discard, file_sha256, lock, read_json, tsv_text, write_text
from lib.huggingface import PRETRAINED
from lib.settings import Failure, Parser, Progress, UserError, at_least, run_main
from lib.tasks import GLUE, SQUAD
from lib.tokenizer import (
    count_characters,
    load_tokenizer,
    special_ids,
    train_tokenizer,
    vocab_hash,
    write_vocab,
)
from lib.weights import find_weights

ENDS = {"wikipedia": "blank", "bookcorpus": "sentences", "pg19": "file"}  # of documents
GLUE_TASKS = {Path(task.folder).name: task for task in GLUE}
NO_CORPORA = ("glue", "squad", "docs_task", "weights", "downloads")  # other folders in data/


# ---- 1. corpora and tasks: a function for each command

def docs(args):
    """Prepare the docstrings; a source file is a document."""
    tokenizer = tokenizer_or_size(args, 4096)
    origin, files = docstrings()
    documents = [[f"{text}\n" for text in texts] for _, texts in files]
    write_corpus(args, origin, [(lambda: documents, None)], tokenizer, val_every=20)


def docs_task(args):
    """Prepare a task for finetune.py: which package is a docstring of?

    A row has the first paragraph of a docstring. The files of dev are those of val in the corpus
    docs; those of its test are left out. Rows of dev that are also in train are left out.
    """
    train, dev = [], []
    versions, files = docstrings()
    for number, (package, texts) in enumerate(files):
        rows = {18: dev, 19: []}.get(number % 20, train)
        for text in texts:
            paragraph = " ".join(text.split("\n\n")[0].split())
            rows.append({"sentence": paragraph, "label": package})
    known = {row["sentence"] for row in train}
    dev = [row for row in dev if row["sentence"] not in known]
    with new_folder("data/docs_task", args.force) as folder:
        for split, rows in (("train", train), ("dev", dev)):
            write_text(folder / f"{split}.tsv", tsv_text(rows))
        write_text(folder / "meta.json", json.dumps({"source": versions}))


def docstrings():
    """Read the docstrings of Python, torch and numpy as installed, from their source files.

    Returns their versions in words, and [(package, docstrings)], a pair for each file that has new
    ones. Each docstring comes once.
    """
    versions = (f"docstrings of Python {platform.python_version()}, torch {torch.__version__}, "
                f"numpy {np.__version__}")
    # other packages are left out, and tests, whose docstrings are mostly one-line labels
    skip = {"site-packages", "test", "tests", "idle_test"}
    documents, seen = [], {""}
    for name, package in (("Python", ast), ("torch", torch), ("numpy", np)):
        folder = Path(package.__file__).parent
        for file in Progress(sorted(folder.rglob("*.py")), desc=f"reading {name}", unit=" files"):
            if not skip.isdisjoint(file.relative_to(folder).parts):
                continue
            try:
                tree = ast.parse(file.read_bytes())
            except SyntaxError:
                continue  # meant for another Python
            new = [text for text in dict.fromkeys(find_docstrings(tree)) if text not in seen]
            seen.update(new)
            if new:
                documents.append((name, new))
    return versions, documents


def find_docstrings(node):
    """Yield the docstrings of a syntax tree, in its order.

    Calls of add_newdoc, _add_docstr and the like attach some.
    """
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield ast.get_docstring(node) or ""
    for child in ast.iter_child_nodes(node):
        call = getattr(child, "value", None)
        if isinstance(call, ast.Call):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if re.match("_?add_(docstr|newdoc)", name):
                for part in ast.walk(call):
                    if isinstance(part, ast.Constant) and "\n" in str(part.value):
                        yield inspect.cleandoc(part.value)
        elif not isinstance(child, ast.expr):
            yield from find_docstrings(child)


def text(args):
    """Prepare text of your own, from files and folders of *.txt."""
    tokenizer = tokenizer_or_size(args, 8192)
    files = dict.fromkeys(file for path in args.paths for file in find_files(path, ".txt"))
    sources = [(partial(read_documents, file, args.split), None) for file in files]
    origin = f"{len(sources)} text files: {' '.join(map(str, args.paths))}"
    write_corpus(args, origin, sources, tokenizer, val_every=100)


def wikitext(args):
    """Prepare WikiText-2 or WikiText-103 in its official splits."""
    tokenizer = tokenizer_or_size(args, 8192)
    size = args.command.removeprefix("wikitext")
    kind, ending = ("-raw", "raw") if args.raw else ("", "tokens")
    path = args.path[0] if args.path else fetch(*FILES[f"wikitext-{size}{kind}-v1.zip"])
    sources = []
    for split, stem in enumerate(("train", "valid", "test")):
        file = find_files(path, f"wiki.{stem}.{ending}", f"{stem}.txt")[0]
        if file == path:
            raise UserError(f"{path}: expected WikiText's .zip or a folder with its three splits")
        sources.append((partial(read_documents, file, "wikitext"), split))
    args.name = args.name or args.command + "_raw" * args.raw
    write_corpus(args, str(path), sources, tokenizer)


def articles_and_books(args):
    """Prepare Wikipedia, BookCorpus, both, or PG-19, from .parquet and .txt files or a tar."""
    names = ["wikipedia", "bookcorpus"] if args.command == "wikibooks" else [args.command]
    # uncased (our reading): the paper says only that the vocabulary is that of Devlin et al.
    tokenizer = tokenizer_or_size(args, "bert-base-uncased")
    split = TEST if args.command == "pg19" else None
    sources, origins = [], []
    for name, path in zip(names, args.path or map(fetch_text, names)):
        for file in find_files(path, ".parquet", ".txt"):
            sources.append((partial(read_documents, file, ENDS[name]), split))
        origins.append(f"{name}: {path}")
    write_corpus(args, "; ".join(origins), sources, tokenizer, val_every=1000)


def fetch_text(name):
    """Download a text of the paper; return its folder, or BookCorpus's tar."""
    if name == "bookcorpus":
        return fetch(*FILES["bookcorpus.tar.bz2"])
    folder = DOWNLOADS / name
    if name == "wikipedia":  # 41 files, CC BY-SA 4.0
        fetch_from_hub("wikimedia/wikipedia", folder, "20231101.en/.*", kind="dataset")
        return folder
    # PG-19 is 100 books (Apache-2.0), which a list on the hub names
    fetch_from_hub("deepmind/pg19", folder, "data/test_files.txt", kind="dataset")
    for book in (folder / "data/test_files.txt").read_text().split():
        fetch(f"https://storage.googleapis.com/deepmind-gutenberg/{book}", folder=folder / "test")
    return folder / "test"


def tokenizer_or_size(args, default):
    """Return the tokenizer asked for, or how many WordPieces to learn."""
    vocab = args.vocab or default
    if vocab in PRETRAINED:
        folder = Path("data/weights", vocab)
        if not (folder / "vocab.txt").is_file():
            folder = DOWNLOADS / vocab
            fetch_from_hub(PRETRAINED[vocab], folder, "vocab.txt")
        vocab = folder
    if not isinstance(vocab, int):
        if args.cased:
            raise UserError(f"--cased: {vocab} has its own rule, --vocab_size learns one")
        vocab = gpt2_tokenizer() if vocab == "gpt2" else load_tokenizer(vocab)
    size = vocab if isinstance(vocab, int) else vocab.get_vocab_size()
    if size > 2**16:
        raise UserError(f"a vocabulary of {size:,} tokens: ids of 16 bits allow 65,536")
    return vocab


def glue(args):
    """Fetch GLUE's tasks to data/glue/TASK/."""
    for name in args.tasks or GLUE_TASKS:
        fetch_task(GLUE_TASKS[name], args.path and args.path[0] / name, args.force)


def squad(args):
    """Fetch SQuAD 1.1 to data/squad/."""
    fetch_task(SQUAD, args.path and args.path[0], args.force)


def fetch_task(task, source, force):
    """Copy a task's official files to its folder, from the folder `source` or downloaded."""
    with new_folder(task.folder, force) as folder:
        files = [source / name if source else fetch(*FILES[name]) for name in task.archives]
        if files[0].suffix == ".zip":
            source = source or next(unpack(files[0]).rglob("train.tsv")).parent
            files = find_files(source, ".tsv")
        for file in files:
            shutil.copy(file, folder)
        write_text(folder / "meta.json", json.dumps({"source": str(files[0].parent)}))
    print(f"{task.folder}: {', '.join(file.name for file in files)}")


def weights(args):
    """Fetch BERTs and DistilBERTs of the hub to data/weights/NAME/."""
    files = (r"config\.json|vocab\.txt|[^/]*token[^/]*\.json|"
             r"(pytorch_)?model[^/]*\.(safetensors|bin).*")
    for name in args.names:
        folder = Path("data/weights", name)
        fetch_from_hub(PRETRAINED.get(name, name), folder, files)
        find_weights(folder)  # a UserError if it has none
        print(f"{folder}: fetched")


# ---- 2. readers and vocabularies: files to documents, documents to token files

SENTENCES = 1000  # mean length of a BookCorpus document, in lines
BATCH = 4096  # lines that are encoded at once
TITLE = re.compile(r" = (?!= ).* = $")  # " = Title = ", but not " = = Section = = "
KINDS = {  # how files begin that are no text
    rb"\x1f\x8b": "gzip", rb"PK\x03\x04": "zip", rb"\(\xb5/\xfd": "zstd", b"%PDF": "PDF",
    rb"\xff\xfe|\xfe\xff": "UTF-16",
    rb"(?s).*\0": "UTF-16 or binary"}
TRAIN, VAL, TEST, DUPLICATE = 0, 1, 2, -1  # the first three are places in SPLITS


def find_files(path, *endings):
    """List the files of a folder or an archive that have one of the endings; or [path], a file.

    Hidden files and folders are left out.
    """
    if re.search(r"\.(zip|tgz|tbz2|txz|tar(\.\w+)?)$", path.name):
        try:
            path = unpack(path)
        except Exception as error:  # noqa: BLE001 - each kind of archive has its own
            raise UserError(f"{path}: cannot be unpacked: {error}") from None
    if path.is_file():
        return [path]
    files, folders, seen = [], [path], set()
    for folder in folders:  # it grows
        if folder.resolve() in seen:  # a link can lead back
            continue
        seen.add(folder.resolve())
        for entry in folder.iterdir():
            hidden = entry.name.startswith(".")
            if entry.is_dir() and not hidden:
                folders.append(entry)
            elif entry.name.lower().endswith(endings) and not hidden:
                files.append(entry)
    if not files:
        raise UserError(f"{path}: no *{' or *'.join(endings)} in it")
    return sorted(files)


def read_documents(path, ends):
    """Yield the documents of a file, each a list of lines. Blank lines are left out.

    A row of a .parquet file is a document. `ends` says where a document of a text file ends:
    'blank'      At a blank line.
    'file'       With the file.
    'wikitext'   Before the title of the next article.
    'sentences'  At a blank line, or after about 1,000 lines. A row of .parquet is a line here.

    WikiText-2 then has 600, 60 and 60 articles, as published. BookCorpus has a sentence a line and
    no ends of books. A third of its books are in it more than once (Bandy and Vincent, 2021).
    'sentences' cuts where a hash of two lines is 0 mod 1,000: copies of a book are cut alike and
    can be recognized.
    """
    lines = read_lines(path)
    if path.suffix == ".parquet":
        rows = read_rows(path)
        if ends != "sentences":
            yield from filter(None, rows)
            return
        lines = itertools.chain.from_iterable(rows)
    document, before, cut = [], "", False
    for line, after in itertools.pairwise(itertools.chain(lines, [""])):
        blank = not line.strip()
        if ends == "wikitext":  # lines of tables look like titles, but have no blank lines around
            cut = TITLE.match(line) and not before.strip() and not after.strip()
        elif ends != "file":
            cut = cut or blank
        if cut and document:
            yield document
            document = []
        if not blank:
            document.append(line)
        cut = ends == "sentences" and zlib.crc32((before + line).encode()) % SENTENCES == 0
        before = line
    if document:
        yield document


def read_lines(path):
    """Yield the lines of a text file, each with a line break at its end."""
    with open(path, encoding="utf-8") as file:
        begin = file.buffer.peek()
        for mark, kind in KINDS.items():
            if re.match(mark, begin):
                raise UserError(f"{path}: this is {kind}, not UTF-8 text: unpack or convert it")
        try:
            for line in file:
                yield line.removesuffix("\n") + "\n"
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text ({error.reason}): convert it, for example "
                            f"with iconv -f WINDOWS-1252 -t UTF-8 {path} > new.txt") from None


def read_rows(path):
    """Yield the rows of a .parquet file's column `text`, each a list of lines."""
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1000, columns=["text"]):
                for text in batch["text"].to_pylist():
                    lines = (text or "").replace("\r\n", "\n").split("\n")
                    yield [f"{line}\n" for line in lines if line.strip()]
    except Exception as error:  # noqa: BLE001 - the file is damaged, or `text` is no column of str
        raise UserError(f"{path}: expected Parquet with strings in `text`: {error}") from None


def write_corpus(args, origin, sources, tokenizer, val_every=None):
    """Write data/<name>/, whole or not at all, and print its sizes.

    origin: where the text is from, in words.
    sources: a list of (read, split). read() returns an iterator over documents and is called
    several times. split is the official one, or None where documents are to be held out.
    tokenizer: a tokenizers.Tokenizer, or how many WordPieces to learn from the training documents.
    val_every: one document of this many is for val and one for test, if args has no other number.
    Only the first of equal documents is kept. Sources with official splits keep these, and all
    documents.
    """
    name = args.name or args.command
    with new_folder(f"data/{name}", args.force) as folder:
        splits, n_lines, documents = assign_splits(sources, args.val_every or val_every)
        read = partial(read_kept, sources, splits, documents)
        if isinstance(tokenizer, int):
            def read_train():
                return (line for line, split in read() if split == TRAIN)
            tokenizer = train_tokenizer(read_train, n_lines, tokenizer, args.cased)
        write_vocab(folder, tokenizer)
        sample = "".join(line for line, _ in itertools.islice(read(), 1000))
        counts = encode(folder, tokenizer, Progress(read(), total=n_lines, desc="encoding"))

        ids = special_ids(tokenizer)
        sizes = {"documents": counts[:, ids.sep], "tokens": counts.sum(axis=1),
                 "unknown": counts[:, ids.unk]}
        no_words = [ids.pad, ids.cls, ids.sep, ids.mask]
        meta = {
            "name": name,
            "source": origin,
            "vocab_size": counts.shape[1],
            **{f"{use}_id": token_id for use, token_id in ids._asdict().items()},
            "tokenizer_hash": vocab_hash(tokenizer),
            "duplicates": int((splits == DUPLICATE).sum()),
            "unigram_perplexity": unigram_perplexity(counts[TRAIN], counts[VAL], no_words),
            **{what: dict(zip(SPLITS, n.tolist())) for what, n in sizes.items()},
            "sha256": {split: file_sha256(folder / f"{split}.bin") for split in SPLITS},
            "documents_sha256": f"{documents:064x}"}
        write_text(folder / "meta.json", json.dumps(meta, indent=1) + "\n")
    for what in sizes:
        print(f"data/{name}: {what} {meta[what]}")
    held = meta["documents"]["val"]
    if sources[0][1] is None and held < 10:
        print(f"documents for val: only {held} (blank lines end documents, or files with --split "
              "file); --val_every=N takes one of N, and one for test")
    unknown = sizes["unknown"].sum() / counts.sum()
    normalize = getattr(tokenizer.normalizer, "normalize_str", str)  # GPT-2's is None
    before, after = (count_characters(text, "LM") for text in (sample, normalize(sample)))
    if after < 0.99 * before:
        print(f"WARNING: the tokenizer removes {1 - after / before:.1%} of the letters and marks "
              "(accents, vowel signs, tones): --vocab_size learns one that keeps them")
    if unknown > 0.01:
        print(f"WARNING: {unknown:.1%} of the tokens are unknown: give a larger --vocab_size, or "
              "the --vocab of a model of this language")


def assign_splits(sources, val_every):
    """Read the text once; return the split of each document, the number of lines, and a hash.

    The hash is the sum of the documents' SHA-256, whatever their order and split. 64 bits tell
    documents apart. Two of 10 million collide with probability 3e-6.
    """
    splits, seen, n_lines, total = [], set(), 0, 0
    documents = Progress(read_all(sources), desc="reading", unit=" documents")
    for document, number, split in documents:
        n_lines += len(document)
        if split is None:
            key = number % 2**64
            split = DUPLICATE if key in seen else TRAIN
            seen.add(key)
        if split != DUPLICATE:
            total += number
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
    return splits, n_lines, total % 2**256


def read_all(sources):
    """Yield (document, its SHA-256 as a number, official split) for all documents."""
    for read, split in sources:
        for document in read():
            digest = hashlib.sha256("".join(document).encode()).digest()
            yield document, int.from_bytes(digest), split


def read_kept(sources, splits, expected):
    """Yield (line, split) for the text that is kept; the line "" ends a document.

    expected: the hash of its documents (see assign_splits). Failure at the end if it has another.
    """
    total = 0
    for (document, number, _), split in zip(read_all(sources), splits):
        if split != DUPLICATE:
            total += number
            for line in document:
                yield line, split
            yield "", split
    if total % 2**256 != expected:
        raise Failure("the text changed while it was read: run this again")


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


# ---- 3. downloads: a file is there only when it is whole, and read only when it is checked

FILES_BY_SERVER = """
https://wikitext.smerity.com/  CC BY-SA 3.0
wikitext-2-v1.zip        92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c
wikitext-2-raw-v1.zip    ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11
wikitext-103-v1.zip      242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590
wikitext-103-raw-v1.zip  91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794
https://storage.googleapis.com/huggingface-nlp/datasets/bookcorpus/  no licence stated
bookcorpus.tar.bz2       03a29333b2b35e98a375b6ad7d2f1651835655cd348fb89c864136bce69a964c
https://rajpurkar.github.io/SQuAD-explorer/dataset/  CC BY-SA 4.0
train-v1.1.json          3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955
dev-v1.1.json            95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9
https://dl.fbaipublicfiles.com/glue/data/  licences are the tasks' authors': gluebenchmark.com
CoLA.zip                 f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff
SST-2.zip                d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa
STS-B.zip                e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85
QQP-clean.zip            40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0
MNLI.zip                 e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633
QNLIv2.zip               e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5
RTE.zip                  6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee
mrpc_dev_ids.tsv         971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7
https://dl.fbaipublicfiles.com/senteval/senteval_data/  the same
msr_paraphrase_train.txt 60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89
msr_paraphrase_test.txt  a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784
https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/  MIT licence
encoder.json             196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783
vocab.bpe                1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5
"""
FILES = {}  # {file name: (URL, SHA-256)}
for name, fact, *_ in map(str.split, FILES_BY_SERVER.strip().splitlines()):
    if name.startswith("https:"):
        server = name
    else:
        FILES[name] = (server + name, fact)
DOWNLOADS = Path("data/downloads")
OFFLINE = "without a network give --vocab FILE or --from PATH"


def fetch(url, sha256="", folder=DOWNLOADS):
    """Download a file to `folder`, unless it is there; return its path.

    After an error it tries once more. Failure if the file cannot be had or has another SHA-256.
    """
    path = folder / Path(url).name
    if path.exists():
        if sha256 not in ("", file_sha256(path)):
            raise UserError(f"{path}: its SHA-256 is not {sha256[:12]}...: move it away")
        return path
    with lock(path, "downloads it"), atomic(path) as temporary:
        try:
            try:
                download(url, temporary)
            except OSError:
                download(url, temporary)
        except OSError as error:
            raise Failure(f"{url}: {error}: {OFFLINE}") from None
        if sha256 not in ("", file_sha256(temporary)):
            raise Failure(f"{url}: its SHA-256 is not {sha256[:12]}...: it was replaced, or "
                          "damaged on its way")
    return path


def download(url, path):
    """Download a file in one attempt."""
    import requests

    headers = {"User-Agent": "Mozilla/5.0"}  # wikitext.smerity.com wants a browser
    with requests.get(url, headers=headers, stream=True, timeout=30) as reply:
        reply.raise_for_status()
        size = int(reply.headers.get("Content-Length", 0))
        chunks = Progress(reply.iter_content(2**20), url, size / 2**20, unit=" MB")
        with open(path, "wb") as file:
            file.writelines(chunks)


def fetch_from_hub(repo, folder, pattern, kind="model"):
    """Download a hub repository's files that fit a regular expression, unless they are there.

    A pytorch_model.bin is left out beside safetensors. The folder has its name only when it is
    whole; an interrupted download goes on in another. files.json has the sizes of its files.
    """
    import huggingface_hub as hub

    part = folder.with_name(f".part_{folder.name}")
    with lock(folder, "downloads it"):
        if not folder.exists():
            try:
                info = hub.HfApi().repo_info(repo, repo_type=kind, files_metadata=True)
                sizes = {file.rfilename: file.size for file in info.siblings
                         if re.fullmatch(pattern, file.rfilename)}
                if any("safetensors" in name for name in sizes):
                    sizes = {name: size for name, size in sizes.items() if ".bin" not in name}
                for name in sizes:
                    hub.hf_hub_download(repo, name, repo_type=kind, revision=info.sha,
                                        local_dir=part)
            except Exception as error:  # noqa: BLE001 - of the hub, its HTTP library or the disk
                reason = (str(error) or repr(error)).splitlines()[0]
                raise Failure(f"{repo} on the hub: {reason}: {OFFLINE}") from None
            write_text(part / "files.json", json.dumps(sizes))
            part.rename(folder)
    for name, size in read_json(folder / "files.json").items():
        if (folder / name).stat().st_size != size:
            raise UserError(f"{folder / name}: not whole: move {folder} away and fetch it anew")


def unpack(path):
    """Unpack a zip or tar to data/downloads/, unless that was done; return the folder.

    The folder's name has the SHA-256 of the archive, because archives of one name can differ.
    """
    folder = DOWNLOADS / f"{path.stem}_{file_sha256(path)[:12]}"
    if not folder.exists():
        print(f"{path}: unpacking", flush=True)
        inside = {} if path.suffix == ".zip" else {"filter": "data"}  # nothing outside the folder
        with lock(folder, "unpacks it"), atomic(folder) as temporary:
            shutil.unpack_archive(path, temporary, **inside)
    return folder


@contextlib.contextmanager
def new_folder(folder, force):
    """Make a folder that is there only when it is whole.

    The block writes a meta.json that names the text's `source`. With `force` the folder replaces
    an older one that has such a file: nothing else is ours to delete.
    """
    folder = Path(folder)
    old = folder.with_name(f".old_{folder.name}")
    with lock(folder, "prepares it"):
        replaces = folder.exists()
        if replaces and not force:
            raise UserError(f"{folder} exists already (--force replaces it)")
        if replaces and "source" not in read_json(folder / "meta.json"):
            raise UserError(f"{folder}/meta.json is not of prepare_data.py: move it away")
        with atomic(folder) as temporary:
            temporary.mkdir()
            yield temporary
            if replaces:  # a kill must not leave half of it under its name
                discard(old)
                folder.rename(old)
        discard(old)


def gpt2_tokenizer():
    """Make GPT-2's tokenizers.Tokenizer, with RoBERTa's special tokens.

    tiktoken downloads its two files, or finds them in TIKTOKEN_CACHE_DIR.
    """
    from tiktoken.load import read_file_cached as read

    try:
        ids, lines = (read(*FILES[name]) for name in ("encoder.json", "vocab.bpe"))
    except OSError as error:
        raise Failure(f"GPT-2's vocabulary: {error}: without a network copy another machine's, and "
                      "name the folder in TIKTOKEN_CACHE_DIR") from None
    ids, lines = json.loads(ids), lines.decode().splitlines()
    merges = [tuple(line.split()) for line in lines[1:]]
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in ("<|endoftext|>", "<s>", "</s>", "<pad>", "<mask>"):  # the first has an id
        # <mask> is a word with the space before it, as in RoBERTa
        added = tokenizers.AddedToken(token, lstrip=token == "<mask>", normalized=False)
        tokenizer.add_special_tokens([added])
    return tokenizer


# ---- the command line

def corpus_name(text):
    """Return the name of a corpus, which becomes a folder's."""
    if re.fullmatch(r"\w[\w.-]*", text) and text.lower() not in NO_CORPORA:
        return text
    raise argparse.ArgumentTypeError(f"{text!r}: expected letters, digits and ._-, but none of "
                                     f"{', '.join(NO_CORPORA)}")


def main():
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    # options that several commands have
    force, disk, vocab, name = (Parser(add_help=False) for _ in range(4))
    force.add_argument("--force", action="store_true", help="replace what exists")
    disk.add_argument("--from", dest="path", nargs=1, type=Path, help="on disk, not a download")
    one = vocab.add_mutually_exclusive_group()
    one.add_argument("--vocab", help="a vocab.txt, another corpus's folder, or bert-base-uncased")
    one.add_argument("--vocab_size", dest="vocab", type=at_least(1),
                     help="learn so many WordPieces")
    vocab.add_argument("--cased", action="store_true", help="a learned vocabulary keeps capitals")
    one.add_argument("--tokenizer", dest="vocab", choices=["gpt2"], help="GPT-2's byte-level BPE")
    vocab.add_argument("--val_every", type=at_least(1),
                       help="one document of so many is for val and test")
    name.add_argument("--name", type=corpus_name, help="of data/NAME, or it is the command's")
    corpus = force, vocab, name

    def add(name, recipe, *parents):
        summary = recipe.__doc__.splitlines()[0]
        command = commands.add_parser(name, help=summary, parents=parents)
        command.set_defaults(recipe=recipe)
        return command.add_argument

    add("docs", docs, *corpus)
    option = add("text", text, force, vocab)
    option("name", type=corpus_name, help="the corpus is data/NAME")
    option("paths", nargs="+", type=Path, help="text files and folders")
    option("--split", choices=["blank", "file"], default="blank", help="ends a document")
    for size in (2, 103):
        option = add(f"wikitext{size}", wikitext, disk, *corpus)
        option("--raw", action="store_true", help="the version without <unk>")
    for name in ("wikipedia", "bookcorpus", "pg19"):
        add(name, articles_and_books, disk, *corpus)
    option = add("wikibooks", articles_and_books, *corpus)
    option("--from", dest="path", nargs=2, type=Path, help="of both, on disk")
    add("docs_task", docs_task, force)
    option = add("glue", glue, disk, force)
    option("tasks", nargs="*", choices=GLUE_TASKS, help="all by default")
    add("squad", squad, disk, force)
    option = add("weights", weights)
    option("names", nargs="+", help="bert-base-uncased, or ORG/NAME of the hub")
    args = parser.parse_args()
    args.recipe(args)


if __name__ == "__main__":
    run_main(main)
