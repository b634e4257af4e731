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
import re
from functools import partial
from pathlib import Path

from lib import download
from lib.errors import UserError, run_main
from lib.files import write_text
from lib.huggingface import PRETRAINED
from lib.settings import Parser
from lib.tasks import GLUE, SQUAD
from lib.text import TEST, Source, docstrings, find_files, read_documents, write_corpus
from lib.tokenizer import gpt2_tokenizer, load_tokenizer

PG19 = "https://storage.googleapis.com/deepmind-gutenberg/test/"
TASKS = {Path(task.folder).name: task for task in GLUE}


def docs(args):
    """Docstrings of this Python, torch and numpy; a source file is a document."""
    tokenizer = find_tokenizer(args, 4096)
    origin, files = docstrings()
    documents = [[f"{text}\n" for text in texts] for _, texts in files]
    sources = [Source(lambda: documents)]
    write_corpus(args.name or "docs", origin, sources, tokenizer, 20, args.force)


def text(args):
    """Text of your own, from files and folders of *.txt."""
    tokenizer = find_tokenizer(args, 8192)
    files = dict.fromkeys(file for path in args.paths for file in find_files(path, ".txt"))
    sources = [Source(partial(read_documents, file, args.split)) for file in files]
    origin = f"{len(sources)} text files: {' '.join(map(str, args.paths))}"
    write_corpus(args.name, origin, sources, tokenizer, args.val_every or 100, args.force)


def wikitext2(args):
    """WikiText-2 in its official splits."""
    write_wikitext(args, "2")


def wikitext103(args):
    """WikiText-103 in its official splits."""
    write_wikitext(args, "103")


def write_wikitext(args, size):
    """Prepare WikiText, downloaded or from a folder or a zip on disk."""
    tokenizer = find_tokenizer(args, 8192)
    raw = "raw" if args.raw else "tokens"
    url, sha256 = download.FILES[f"wikitext-{size}{'-raw' * args.raw}-v1.zip"]
    path = args.path[0] if args.path else download.fetch(url, sha256)
    sources = []
    for split, stem in enumerate(("train", "valid", "test")):
        file = find_files(path, f"wiki.{stem}.{raw}", f"{stem}.txt")[0]
        sources.append(Source(partial(read_documents, file, "wikitext"), split))
    name = args.name or f"wikitext{size}{'_raw' * args.raw}"
    origin = str(path) if args.path else url
    write_corpus(name, origin, sources, tokenizer, force=args.force)


def wikipedia(args):
    """English Wikipedia of November 2023; an article is a document."""
    write_paper(args, [("wikipedia", fetch_wikipedia, "blank")])


def bookcorpus(args):
    """BookCorpus; about 1,000 sentences are a document."""
    write_paper(args, [("bookcorpus", fetch_bookcorpus, "sentences")])


def wikibooks(args):
    """Both, the paper's training text; --from WIKIPEDIA BOOKCORPUS."""
    write_paper(args, [("wikipedia", fetch_wikipedia, "blank"),
                       ("bookcorpus", fetch_bookcorpus, "sentences")])


def pg19(args):
    """PG-19's test split, 100 books, only for measuring."""
    write_paper(args, [("pg19", fetch_pg19, "file")], split=TEST)


def fetch_wikipedia():
    """Fetch Wikipedia's 41 files (CC BY-SA 4.0); return their folder."""
    folder = download.DOWNLOADS / "wikipedia"
    download.fetch_from_hub("wikimedia/wikipedia", ["20231101.en/*.parquet"], folder, "dataset")
    return folder


def fetch_bookcorpus():
    """Fetch BookCorpus (no licence stated); return its tar."""
    return download.fetch(*download.FILES["bookcorpus.tar.bz2"])


def fetch_pg19():
    """Fetch the 100 books (Apache-2.0) that a list on the hub names; return their folder."""
    folder = download.DOWNLOADS / "pg19"
    download.fetch_from_hub("deepmind/pg19", ["data/test_files.txt"], folder, "dataset")
    listing = (folder / "data/test_files.txt").read_text()
    for book in re.findall(r"test/(\d+)\.txt", listing):
        download.fetch(f"{PG19}{book}.txt", folder=folder / "test")
    return folder / "test"


def write_paper(args, parts, split=None):
    """Prepare a corpus of the paper, downloaded or from .parquet and .txt files.

    parts: [(name, where it is from, where its documents end)]. BookCorpus may also be its tar.
    """
    if args.path and len(args.path) != len(parts):
        names = " and ".join(name for name, *_ in parts)
        raise UserError(f"--from: expected {len(parts)} PATH, of {names}")
    tokenizer = find_tokenizer(args, "bert-base-uncased")
    sources, origins = [], []
    for number, (name, fetch, ends) in enumerate(parts):
        path = args.path[number] if args.path else fetch()
        for file in find_files(path, ".parquet", ".txt"):
            read = partial(read_documents, file, ends)
            sources.append(Source(read, split, drop_heldout=name == "bookcorpus"))
        origins.append(f"{name}: {path}")
    name = args.name or args.recipe.__name__
    write_corpus(name, "; ".join(origins), sources, tokenizer, args.val_every or 1000, args.force)


def find_tokenizer(args, default):
    """Return the tokenizer asked for, or how many WordPieces to learn."""
    vocab = args.vocab or default
    if vocab == "gpt2":
        vocab = gpt2_tokenizer()
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


def docs_task(args):
    """A task for finetune.py without a network: which package is a docstring of?

    A row has the first paragraph of a docstring. The files of dev are those of val in the corpus
    docs. Rows that are also in train are left out of dev and test.
    """
    _, files = docstrings()
    known = set()
    with download.new_folder("data/docs_task", args.force) as folder:
        for split, places in (("train", range(18)), ("dev", [18]), ("test", [19])):
            rows = []
            for number, (package, texts) in enumerate(files):
                for text in texts if number % 20 in places else ():
                    paragraph = " ".join(text.split("\n\n")[0].split())
                    if paragraph not in known:
                        rows.append((paragraph, package))
            lines = ["sentence\tlabel", *map("\t".join, rows)]
            if split == "train":
                known = {paragraph for paragraph, _ in rows}
            if split == "test":
                lines = ["index\tsentence", *(f"{n}\t{row[0]}" for n, row in enumerate(rows))]
            write_text(folder / f"{split}.tsv", "\n".join(lines) + "\n")


def glue(args):
    """GLUE's official files, to data/glue/TASK/; all tasks by default."""
    for name in args.tasks or TASKS:
        if name not in TASKS:
            raise UserError(f"{name}: no task of GLUE: expected {', '.join(TASKS)}")
        download.fetch_task(TASKS[name], args.path, args.force)


def squad(args):
    """SQuAD 1.1's official files, to data/squad/."""
    download.fetch_task(SQUAD, args.path, args.force)


def weights(args):
    """Trained BERTs and DistilBERTs of the hub, to data/weights/NAME/."""
    for name in args.names:
        download.fetch_weights(PRETRAINED.get(name, name), Path("data/weights", name))


OPTIONS = {
    "name": {"help": "the corpus is data/NAME"},
    "paths": {"nargs": "+", "type": Path, "help": "text files and folders"},
    "tasks": {"nargs": "*", "help": f"of {', '.join(TASKS)}"},
    "names": {"nargs": "+", "help": f"{', '.join(PRETRAINED)}, or ORG/NAME of the hub"},
    "--name": {"help": "the corpus is data/NAME, by default named as the command"},
    "--force": {"action": "store_true", "help": "replace what exists"},
    "--from": {"dest": "path", "nargs": "+", "type": Path,
               "help": "on disk, instead of a download: a file, or a folder with the files"},
    "--raw": {"action": "store_true", "help": "the version without <unk>"},
    "--split": {"choices": ("blank", "file"), "default": "blank",
                "help": "documents end at blank lines (default) or with their file"},
    "--val_every": {"type": int, "help": "of so many documents one is for val, one for test "
                    "(100 for text, or 1000)"},
    "--vocab": {"help": "a vocab.txt, another corpus's folder, or bert-base-uncased (the default "
                "of the paper's corpora)"},
    "--vocab_size": {"dest": "vocab", "type": int, "help": "learn so many WordPieces (default: "
                     "4096 for docs, 8192)"},
    "--tokenizer": {"dest": "vocab", "choices": ["gpt2"], "help": "GPT-2's byte-level BPE"},
}
VOCAB = "--vocab --vocab_size --tokenizer --force"
COMMANDS = {
    docs: f"--name {VOCAB}",
    text: f"name paths --split --val_every {VOCAB}",
    wikitext2: f"--raw --from --name {VOCAB}",
    wikitext103: f"--raw --from --name {VOCAB}",
    wikipedia: f"--from --val_every --name {VOCAB}",
    bookcorpus: f"--from --val_every --name {VOCAB}",
    wikibooks: f"--from --val_every --name {VOCAB}",
    pg19: f"--from --name {VOCAB}",
    docs_task: "--force",
    glue: "tasks --from --force",
    squad: "--from --force",
    weights: "names",
}


def main():
    parser = Parser(description=__doc__)
    parser.set_defaults(name=None, val_every=None)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for recipe, options in COMMANDS.items():
        command = commands.add_parser(recipe.__name__, help=recipe.__doc__.split("\n")[0])
        command.set_defaults(recipe=recipe)
        for option in options.split():
            command.add_argument(option, **OPTIONS[option])
    args = parser.parse_args()
    args.recipe(args)


if __name__ == "__main__":
    run_main(main)
