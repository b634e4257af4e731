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
import inspect
import platform
import re
import shutil
from functools import partial
from pathlib import Path

import numpy
import torch

from lib.device import Progress
from lib.download import DOWNLOADS, FILES, fetch, fetch_from_hub, gpt2_tokenizer, new_folder, unpack
from lib.errors import UserError, run_main
from lib.files import write_text
from lib.huggingface import PRETRAINED
from lib.settings import Parser
from lib.tasks import GLUE, SQUAD, tsv_text
from lib.text import TEST, find_files, read_documents, write_corpus
from lib.tokenizer import load_tokenizer

PG19 = "https://storage.googleapis.com/deepmind-gutenberg/"
ENDS = {"wikipedia": "blank", "bookcorpus": "sentences", "pg19": "file"}  # of documents
TASKS = {Path(task.folder).name: task for task in GLUE}


def docs(args):
    """Prepare the docstrings; a source file is a document."""
    tokenizer = find_tokenizer(args, 4096)
    origin, files = docstrings()
    documents = [[f"{text}\n" for text in texts] for _, texts in files]
    write_corpus(args.name or "docs", origin, [(lambda: documents, None)], tokenizer,
                 args.val_every or 20, args.force)


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
    known = dict(rows["train"])
    with new_folder("data/docs_task", args.force) as folder:
        for split, table in rows.items():
            header = ("sentence", "label")
            if split != "train":
                table = [row for row in table if row[0] not in known]
            if split == "test":
                header = ("index", "sentence")
                table = [(number, text) for number, (text, _) in enumerate(table)]
            write_text(folder / f"{split}.tsv", tsv_text([header, *table]))


def docstrings():
    """Read the docstrings of Python, torch and numpy as installed, from their source files.

    Returns their versions in words, and [(package, docstrings)], a pair for each file that has new
    ones. Each docstring comes once.
    """
    versions = (f"docstrings of Python {platform.python_version()}, torch {torch.__version__}, "
                f"numpy {numpy.__version__}")
    # other packages are left out, and tests, whose docstrings are mostly one-line labels
    skip = {"site-packages", "test", "tests", "idle_test"}
    documents, seen = [], {""}
    for name, package in (("Python", ast), ("torch", torch), ("numpy", numpy)):
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
    tokenizer = find_tokenizer(args, 8192)
    files = dict.fromkeys(file for path in args.paths for file in find_files(path, ".txt"))
    sources = [(partial(read_documents, file, args.split), None) for file in files]
    origin = f"{len(sources)} text files: {' '.join(map(str, args.paths))}"
    write_corpus(args.name, origin, sources, tokenizer, args.val_every or 100, args.force)


def wikitext(args):
    """Prepare WikiText-2 or WikiText-103 in its official splits."""
    tokenizer = find_tokenizer(args, 8192)
    size = args.command.removeprefix("wikitext")
    kind, ending = ("-raw", "raw") if args.raw else ("", "tokens")
    path = args.path[0] if args.path else fetch(*FILES[f"wikitext-{size}{kind}-v1.zip"])
    sources = []
    for split, stem in enumerate(("train", "valid", "test")):
        file = find_files(path, f"wiki.{stem}.{ending}", f"{stem}.txt")[0]
        sources.append((partial(read_documents, file, "wikitext"), split))
    name = args.name or args.command + "_raw" * args.raw
    write_corpus(name, str(path), sources, tokenizer, force=args.force)


def paper(args):
    """Prepare the paper's corpora, from .parquet and .txt files, or BookCorpus's tar."""
    names = ["wikipedia", "bookcorpus"] if args.command == "wikibooks" else [args.command]
    # uncased (our reading): the paper says only that the vocabulary is that of Devlin et al.
    tokenizer = find_tokenizer(args, "bert-base-uncased")
    split = TEST if args.command == "pg19" else None
    sources, origins = [], []
    for name, path in zip(names, args.path or map(fetch_text, names)):
        for file in find_files(path, ".parquet", ".txt"):
            sources.append((partial(read_documents, file, ENDS[name]), split))
        origins.append(f"{name}: {path}")
    write_corpus(args.name or args.command, "; ".join(origins), sources, tokenizer,
                 args.val_every or 1000, args.force)


def fetch_text(name):
    """Download a text of the paper; return its folder, or BookCorpus's tar."""
    folder = DOWNLOADS / name
    if name == "bookcorpus":  # no licence stated
        return fetch(*FILES["bookcorpus.tar.bz2"])
    if name == "wikipedia":  # 41 files, CC BY-SA 4.0
        fetch_from_hub("wikimedia/wikipedia", ["20231101.en/*.parquet"], folder, "dataset")
        return folder
    # PG-19 is 100 books (Apache-2.0), which a list on the hub names
    fetch_from_hub("deepmind/pg19", ["data/test_files.txt"], folder, "dataset")
    for book in (folder / "data/test_files.txt").read_text().split():
        fetch(PG19 + book, folder=folder / "test")
    return folder / "test"


def find_tokenizer(args, default):
    """Return the tokenizer asked for, or how many WordPieces to learn."""
    vocab = args.vocab or default
    if vocab in PRETRAINED:
        folder = Path("data/weights", vocab)
        if not (folder / "vocab.txt").exists():
            fetch_from_hub(PRETRAINED[vocab], ["vocab.txt"], folder)
        vocab = folder
    if isinstance(vocab, int):
        size = vocab
    else:
        vocab = gpt2_tokenizer() if vocab == "gpt2" else load_tokenizer(vocab)
        size = vocab.get_vocab_size()
    if size > 2**16:
        raise UserError(f"a vocabulary of {size:,} tokens: ids of 16 bits allow 65,536")
    return vocab


def glue(args):
    """Fetch GLUE's tasks to data/glue/TASK/."""
    for name in args.tasks or TASKS:
        if name not in TASKS:
            raise UserError(f"{name}: no task of GLUE: expected {', '.join(TASKS)}")
        fetch_task(TASKS[name], args.path and args.path[0] / name, args.force)


def squad(args):
    """Fetch SQuAD 1.1 to data/squad/."""
    fetch_task(SQUAD, args.path and args.path[0], args.force)


def fetch_task(task, source, force):
    """Copy a task's official files to its folder, from the folder `source` or downloaded."""
    with new_folder(task.folder, force) as folder:
        files = [source / name if source else fetch(*FILES[name]) for name in task.archives]
        if files[0].suffix == ".zip":
            source = source or next(unpack(files[0]).rglob("train.tsv")).parent
            files = sorted(source.glob("*.tsv"))
        if not files:
            raise UserError(f"{source}: no *.tsv in it")
        for file in files:
            shutil.copy(file, folder)
    print(f"{task.folder}: {', '.join(file.name for file in files)}")


def weights(args):
    """Fetch BERTs and DistilBERTs of the hub to data/weights/NAME/."""
    small = ["config.json", "vocab.txt", "tokenizer.json"]
    for name in args.names:
        repo, folder = PRETRAINED.get(name, name), Path("data/weights", name)
        fetch_from_hub(repo, [*small, "model.safetensors"], folder)
        if not (folder / "model.safetensors").exists():
            fetch_from_hub(repo, ["pytorch_model.bin"], folder)
        print(f"{folder}: fetched")


def main():
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    # options that several commands have
    force = Parser(add_help=False)
    force.add_argument("--force", action="store_true", help="replace what exists")
    disk = Parser(add_help=False)
    disk.add_argument("--from", dest="path", nargs=1, type=Path, help="on disk, not a download")
    vocab = Parser(add_help=False, parents=[force])
    vocab.add_argument("--vocab", help="a vocab.txt, another corpus's folder, or bert-base-uncased")
    vocab.add_argument("--vocab_size", dest="vocab", type=int, help="learn so many WordPieces")
    vocab.add_argument("--tokenizer", dest="vocab", choices=["gpt2"], help="GPT-2's byte-level BPE")
    vocab.add_argument("--val_every", type=int, help="one document of so many is for val and test")
    corpus = Parser(add_help=False, parents=[vocab])
    corpus.add_argument("--name", help="the corpus is data/NAME, by default named as the command")
    raw = Parser(add_help=False)
    raw.add_argument("--raw", action="store_true", help="the version without <unk>")

    def add(name, recipe, summary, *parents):
        command = commands.add_parser(name, help=summary, parents=parents)
        command.set_defaults(recipe=recipe)
        return command

    add("docs", docs, "docstrings of Python, torch and numpy", corpus)
    own = add("text", text, "text of your own", vocab)
    own.add_argument("name", help="the corpus is data/NAME")
    own.add_argument("paths", nargs="+", type=Path, help="text files and folders")
    own.add_argument("--split", choices=["blank", "file"], default="blank",
                     help="where documents end")
    add("wikitext2", wikitext, "WikiText-2", raw, disk, corpus)
    add("wikitext103", wikitext, "WikiText-103", raw, disk, corpus)
    add("wikipedia", paper, "English Wikipedia of November 2023", disk, corpus)
    add("bookcorpus", paper, "BookCorpus", disk, corpus)
    both = add("wikibooks", paper, "both, the paper's training text", corpus)
    both.add_argument("--from", dest="path", nargs=2, type=Path, help="of both, on disk")
    add("pg19", paper, "100 books, only for measuring", disk, corpus)
    add("docs_task", docs_task, "a task without a network", force)
    tasks = add("glue", glue, "GLUE's official files; all tasks by default", disk, force)
    tasks.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)}")
    add("squad", squad, "SQuAD 1.1's official files", disk, force)
    hub = add("weights", weights, "trained BERTs and DistilBERTs of the hub")
    hub.add_argument("names", nargs="+", help="bert-base-uncased, or ORG/NAME of the hub")
    args = parser.parse_args()
    args.recipe(args)


if __name__ == "__main__":
    run_main(main)
