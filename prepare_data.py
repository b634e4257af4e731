"""
Text in, token files out: data/<name>/ with train.bin, val.bin, test.bin, vocab.txt, meta.json.

$ python prepare_data.py docs                              # offline: this Python's docstrings
$ python prepare_data.py text books novels/ more.txt --vocab_size 16384
$ python prepare_data.py wikitext2 --vocab bert-base-uncased   # --from PATH if it is on disk
$ python prepare_data.py wikibooks                         # the paper's: Wikipedia + BookCorpus
$ python prepare_data.py weights bert-base-uncased         # to data/weights/, for init_from
$ python prepare_data.py glue SST-2 RTE                    # to data/glue/; squad: to data/squad/

The .bin files are flat little-endian uint16 token ids. Every document ends with [SEP]; none starts
with [CLS]. vocab.txt is BERT's (WordPiece), a trained one, or GPT-2's (--tokenizer gpt2). GPT-2's
comes with a tokenizer.json. lib.corpus.Corpus reads all files.
"""
import ast
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import sysconfig
from functools import partial
from pathlib import Path

from lib import download
from lib.device import Progress
from lib.errors import UserError, run_main
from lib.files import write_text
from lib.huggingface import PRETRAINED
from lib.settings import Parser
from lib.tasks import GLUE, SQUAD
from lib.text import TEST, Source, find_files, read_documents, write_corpus
from lib.tokenizer import load_tokenizer

PG19 = "https://storage.googleapis.com/deepmind-gutenberg/test/"
ENDS = {"wikipedia": "blank", "bookcorpus": "sentences", "pg19": "file"}  # of documents
TASKS = {Path(task.folder).name: task for task in GLUE}


def docs(args):
    """Prepare the docstrings; a source file is a document."""
    tokenizer = find_tokenizer(args, 4096)
    origin, files = docstrings()
    documents = [[f"{text}\n" for text in texts] for _, texts in files]
    sources = [Source(lambda: documents)]
    write_corpus(args.name or "docs", origin, sources, tokenizer, 20, args.force)


def docs_task(args):
    """Prepare a task for finetune.py: which package is a docstring of?

    A row has the first paragraph of a docstring. The files of dev are those of val in the corpus
    docs. Rows that are also in train are left out of dev and test.
    """
    rows = {"train": [], "dev": [], "test": []}
    for number, (package, texts) in enumerate(docstrings()[1]):
        split = {18: "dev", 19: "test"}.get(number % 20, "train")
        for text in texts:
            paragraph = " ".join(text.split("\n\n")[0].split())
            rows[split].append((paragraph, package))
    known = {paragraph for paragraph, _ in rows["train"]}
    for split in ("dev", "test"):
        rows[split] = [row for row in rows[split] if row[0] not in known]
    rows["test"] = [(str(number), text) for number, (text, _) in enumerate(rows["test"])]
    with download.new_folder("data/docs_task", args.force) as folder:
        for split, table in rows.items():
            header = ("index", "sentence") if split == "test" else ("sentence", "label")
            lines = ["\t".join(row) + "\n" for row in [header, *table]]
            write_text(folder / f"{split}.tsv", "".join(lines))


def docstrings():
    """Read the docstrings of Python, torch and numpy as installed. Nothing is imported.

    Returns their versions in words, and [(package, docstrings)], a pair for each file that has new
    ones. Each docstring comes once.
    """
    folders = {f"Python {sys.version.split()[0]}": Path(sysconfig.get_path("stdlib"))}
    for package in ("torch", "numpy"):
        version = importlib.metadata.version(package)
        folders[f"{package} {version}"] = Path(importlib.util.find_spec(package).origin).parent
    # other packages are left out, and tests, whose docstrings are mostly one-line labels
    skip = {"site-packages", "test", "tests", "idle_test"}
    documents, seen = [], {""}
    for name, folder in folders.items():
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
                documents.append((name.split()[0], new))
    return f"docstrings of {', '.join(folders)}", documents


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
    tokenizer = find_tokenizer(args, 8192)
    files = dict.fromkeys(file for path in args.paths for file in find_files(path, ".txt"))
    sources = [Source(partial(read_documents, file, args.split)) for file in files]
    origin = f"{len(sources)} text files: {' '.join(map(str, args.paths))}"
    write_corpus(args.name, origin, sources, tokenizer, args.val_every or 100, args.force)


def wikitext(args):
    """Prepare WikiText-2 or WikiText-103 in its official splits."""
    tokenizer = find_tokenizer(args, 8192)
    size = args.command.removeprefix("wikitext")
    raw = "raw" if args.raw else "tokens"
    url, sha256 = download.FILES[f"wikitext-{size}{'-raw' * args.raw}-v1.zip"]
    path = args.path[0] if args.path else download.fetch(url, sha256)
    sources = []
    for split, stem in enumerate(("train", "valid", "test")):
        file = find_files(path, f"wiki.{stem}.{raw}", f"{stem}.txt")[0]
        sources.append(Source(partial(read_documents, file, "wikitext"), split))
    name = args.name or args.command + "_raw" * args.raw
    origin = str(path) if args.path else url
    write_corpus(name, origin, sources, tokenizer, force=args.force)


def paper(args):
    """Prepare the paper's corpora, from .parquet and .txt files, or BookCorpus's tar."""
    names = ["wikipedia", "bookcorpus"] if args.command == "wikibooks" else [args.command]
    if args.path and len(args.path) != len(names):
        raise UserError(f"--from: expected {len(names)} PATH, of {' and '.join(names)}")
    tokenizer = find_tokenizer(args, "bert-base-uncased")
    split = TEST if args.command == "pg19" else None
    sources, origins = [], []
    for number, name in enumerate(names):
        path = args.path[number] if args.path else fetch_text(name)
        for file in find_files(path, ".parquet", ".txt"):
            read = partial(read_documents, file, ENDS[name])
            sources.append(Source(read, split, drop_heldout=name == "bookcorpus"))
        origins.append(f"{name}: {path}")
    name, origin = args.name or args.command, "; ".join(origins)
    write_corpus(name, origin, sources, tokenizer, args.val_every or 1000, args.force)


def fetch_text(name):
    """Download a text of the paper; return its folder, or BookCorpus's tar."""
    folder = download.DOWNLOADS / name
    if name == "bookcorpus":  # no licence stated
        return download.fetch(*download.FILES["bookcorpus.tar.bz2"])
    if name == "wikipedia":  # 41 files, CC BY-SA 4.0
        files = ["20231101.en/*.parquet"]
        download.fetch_from_hub("wikimedia/wikipedia", files, folder, "dataset")
        return folder
    # PG-19 is 100 books (Apache-2.0), which a list on the hub names
    download.fetch_from_hub("deepmind/pg19", ["data/test_files.txt"], folder, "dataset")
    listing = (folder / "data/test_files.txt").read_text()
    for book in re.findall(r"test/(\d+)\.txt", listing):
        download.fetch(f"{PG19}{book}.txt", folder=folder / "test")
    return folder / "test"


def find_tokenizer(args, default):
    """Return the tokenizer asked for, or how many WordPieces to learn."""
    vocab = args.vocab or default
    if vocab == "gpt2":
        vocab = download.gpt2_tokenizer()
    elif vocab in PRETRAINED:
        folder = Path("data/weights", vocab)
        if not (folder / "vocab.txt").exists():
            download.fetch_from_hub(PRETRAINED[vocab], ["vocab.txt"], folder)
        vocab = load_tokenizer(folder)
    elif not isinstance(vocab, int):
        vocab = load_tokenizer(vocab)
    size = vocab if isinstance(vocab, int) else vocab.get_vocab_size()
    if size > 2**16:
        raise UserError(f"a vocabulary of {size:,} tokens: ids of 16 bits allow 65,536")
    return vocab


def glue(args):
    """Fetch GLUE's tasks to data/glue/TASK/."""
    for name in args.tasks or TASKS:
        if name not in TASKS:
            raise UserError(f"{name}: no task of GLUE: expected {', '.join(TASKS)}")
        download.fetch_task(TASKS[name], args.path, args.force)


def squad(args):
    """Fetch SQuAD 1.1 to data/squad/."""
    download.fetch_task(SQUAD, args.path, args.force)


def weights(args):
    """Fetch BERTs and DistilBERTs of the hub to data/weights/NAME/."""
    for name in args.names:
        download.fetch_weights(PRETRAINED.get(name, name), Path("data/weights", name))


OPTIONS = {
    "name": {"help": "the corpus is data/NAME"},
    "paths": {"nargs": "+", "type": Path, "help": "text files and folders"},
    "tasks": {"nargs": "*", "help": f"of {', '.join(TASKS)}"},
    "names": {"nargs": "+", "help": f"{', '.join(PRETRAINED)}, or ORG/NAME of the hub"},
    "--name": {"help": "the corpus is data/NAME, by default named as the command"},
    "--force": {"action": "store_true", "help": "replace what exists"},
    "--from": {"dest": "path", "nargs": "+", "type": Path, "help": "on disk, not a download"},
    "--raw": {"action": "store_true", "help": "the version without <unk>"},
    "--split": {"choices": ("blank", "file"), "default": "blank", "help": "where documents end"},
    "--val_every": {"type": int, "help": "one document of so many is for val, one for test"},
    "--vocab": {"help": "a vocab.txt, another corpus's folder, or bert-base-uncased"},
    "--vocab_size": {"dest": "vocab", "type": int, "help": "learn so many WordPieces"},
    "--tokenizer": {"dest": "vocab", "choices": ["gpt2"], "help": "GPT-2's byte-level BPE"},
}
VOCAB = "--vocab --vocab_size --tokenizer --force"
PAPER = f"--from --val_every --name {VOCAB}"
COMMANDS = {  # {name: (function, options, help)}
    "docs": (docs, f"--name {VOCAB}", "docstrings of Python, torch and numpy"),
    "text": (text, f"name paths --split --val_every {VOCAB}", "text of your own"),
    "wikitext2": (wikitext, f"--raw --from --name {VOCAB}", "WikiText-2"),
    "wikitext103": (wikitext, f"--raw --from --name {VOCAB}", "WikiText-103"),
    "wikipedia": (paper, PAPER, "English Wikipedia of November 2023"),
    "bookcorpus": (paper, PAPER, "BookCorpus"),
    "wikibooks": (paper, PAPER, "both, the paper's training text"),
    "pg19": (paper, f"--from --name {VOCAB}", "100 books, only for measuring"),
    "docs_task": (docs_task, "--force", "a task without a network"),
    "glue": (glue, "tasks --from --force", "GLUE's official files; all tasks by default"),
    "squad": (squad, "--from --force", "SQuAD 1.1's official files"),
    "weights": (weights, "names", "trained BERTs and DistilBERTs of the hub"),
}


def main():
    parser = Parser(description=__doc__)
    parser.set_defaults(name=None, val_every=None)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (recipe, options, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        command.set_defaults(recipe=recipe)
        for option in options.split():
            command.add_argument(option, **OPTIONS[option])
    args = parser.parse_args()
    args.recipe(args)


if __name__ == "__main__":
    run_main(main)
