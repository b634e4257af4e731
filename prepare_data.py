"""
Text in, token files out: data/<name>/ with train.bin, val.bin, test.bin, vocab.txt, meta.json.

$ python prepare_data.py docs                              # offline: this Python's docstrings
$ python prepare_data.py text books novels/ more.txt --vocab_size 16384
$ python prepare_data.py wikitext2 --vocab bert-base-uncased   # --from PATH if it is on disk
$ python prepare_data.py wikibooks                         # the paper's: Wikipedia + BookCorpus
$ python prepare_data.py check wikibooks                   # are the files as they were written?
$ python prepare_data.py weights bert-base-uncased         # to data/weights/, for init_from
$ python prepare_data.py glue SST-2 RTE                    # to data/glue/; squad: to data/squad/

The .bin files are flat little-endian uint16 token ids. Every document ends with [SEP]; none starts
with [CLS]. vocab.txt is BERT's (WordPiece), a trained one, or GPT-2's (--tokenizer gpt2), which
comes with a tokenizer.json. lib.corpus.Corpus reads all of it. A command that was stopped
goes on where it was.
"""
from functools import partial
from pathlib import Path

from lib import download
from lib.corpus import SPLITS, Corpus
from lib.errors import Failure, UserError, run_main
from lib.files import atomic, discard, lock, write_text
from lib.settings import Parser, existing_path, whole_number
from lib.squad import read_squad
from lib.tasks import GLUE, SQUAD
from lib.text import Source, docstrings, find_codecs, find_files, stream, write_corpus
from lib.tokenizer import gpt2_vocab, read_vocab

PAPER = {  # the paper's corpora: (name, where documents end, official split)
    "wikipedia": [("wikipedia", "blank", None)],
    "bookcorpus": [("bookcorpus", "sentences", None)],
    "wikibooks": [("wikipedia", "blank", None), ("bookcorpus", "sentences", None)],
    "pg19": [("pg19", "file", "test")]}
NO_CORPUS = {"weights", "downloads", "glue", "squad", "docs_task"}  # other folders of data/
GLUE_ARCHIVES = {task.title: task.archives for task in GLUE.values()}
SQUAD_FILES = SQUAD.archives


def parse_arguments():
    force, source, corpus, named, once = (Parser(add_help=False) for _ in range(5))
    force.add_argument("--force", action="store_true", help="replace what exists")
    source.add_argument("--from", dest="path", type=existing_path, metavar="PATH",
                        help="a folder or file on disk, instead of a download")
    either = corpus.add_mutually_exclusive_group()
    either.add_argument("--vocab", metavar="PATH", help="a vocab.txt, another corpus's folder, or "
                        "bert-base-uncased: BERT's (the default of the paper's corpora)")
    either.add_argument("--vocab_size", type=partial(whole_number, least=256), metavar="N",
                        help="train a vocabulary of N tokens (4096 for docs, else 8192)")
    either.add_argument("--tokenizer", choices=["gpt2"], help="GPT-2's byte-level BPE (RoBERTa's)")
    named.add_argument("--name", help="the corpus is data/NAME, by default named as the command")
    once.add_argument("--if_missing", action="store_true",
                      help="do nothing if it is there, and wait if another process makes it")
    parser = Parser(description=__doc__)
    parser.set_defaults(name=None, raw=False, if_missing=False, val_every=0)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def add(name, function, what, *parents):
        command = commands.add_parser(name, help=what, parents=parents)
        command.set_defaults(prepare=function)
        return command

    add("docs", prepare_docs, "docstrings: Python, torch, numpy", force, corpus, named, once)
    add("docs_task", prepare_docs_task, "which package is a docstring of? for finetune.py",
        force, once)
    for name in ("wikitext2", "wikitext103"):
        wikitext = add(name, prepare_wikitext, "Wikipedia articles", force, corpus, named, source)
        wikitext.add_argument("--raw", action="store_true", help="the version without <unk>")
    text = add("text", prepare_text, "text of your own", force, corpus)
    heldout = {"type": partial(whole_number, least=3), "metavar": "N",
               "help": "of N documents one is for val, one for test (%(default)s)"}
    text.add_argument("--val_every", default=100, **heldout)
    text.add_argument("name", help="the corpus is data/NAME")
    text.add_argument("paths", nargs="+", metavar="PATH", help="a text file or a folder of *.txt")
    text.add_argument("--encoding", default="utf-8", metavar="NAME",
                      help="of the files: %(default)s, another, or auto: UTF-8, else Windows-1252")
    text.add_argument("--skip_unreadable", action="store_true",
                      help="leave out the files that are not text of this encoding")
    text.add_argument("--split", choices=("blank", "file"), default="blank",
                      help="documents end at blank lines (default) or with their file")
    for name, corpora in PAPER.items():
        paper = add(name, prepare_paper, "a corpus of the paper", force, corpus, named)
        if name != "pg19":
            paper.add_argument("--val_every", default=1000, **heldout)
        paper.add_argument("--from", dest="path", type=existing_path, nargs=len(corpora),
                           metavar=tuple(title.upper() for title, *_ in corpora),
                           help="files or folders on disk: parquet or text")
    glue = add("glue", prepare_glue, "the tasks of GLUE, for finetune.py", force, source)
    glue.add_argument("names", nargs="*", metavar="TASK",
                      help=f"of {', '.join(GLUE_ARCHIVES)} (all)")
    add("squad", prepare_squad, "SQuAD 1.1, for finetune.py", force, source)
    add("check", check, "is data/NAME as it was written?").add_argument("name", metavar="NAME")
    weights = add("weights", prepare_weights, "trained models, for init_from")
    weights.add_argument("names", nargs="+", metavar="NAME",
                         help=f"{', '.join(download.PRETRAINED)}, or ORG/NAME of the hub: any BERT")
    return parser.parse_args()


def choose_vocab(args, default):
    """Return the vocabulary asked for, or `default`: the tokens by id, or how many to learn."""
    if args.tokenizer:
        return gpt2_vocab()
    if (args.vocab_size or 0) > 2**16:
        raise UserError(f"--vocab_size={args.vocab_size}: ids of 16 bits allow 65,536")
    vocab = args.vocab or args.vocab_size or default
    if isinstance(vocab, int):
        return vocab
    if vocab in download.PRETRAINED and not Path(vocab).exists():
        vocab = download.fetch_weights(vocab, [["vocab.txt"]])
    return read_vocab(vocab)


def prepare_text(args):
    """Prepare text files, and folders of *.txt."""
    vocab = choose_vocab(args, 8192)
    files = dict.fromkeys(file for path in args.paths for file in find_files(Path(path), ".txt"))
    codecs = find_codecs(files, args.encoding, args.skip_unreadable)
    sources = [Source(file, partial(stream, file, args.split, codec))
               for file, codec in codecs.items()]
    origin = f"{len(sources)} text files: {' '.join(args.paths)}"
    write_corpus(args.name, origin, sources, vocab, args.val_every)


def prepare_docs(args):
    """Prepare the docstrings of the standard library, torch and numpy as installed: about 9 MB.
    They are read from source files, and nothing is imported. A document is a source file."""
    vocab = choose_vocab(args, 4096)
    origin, files = docstrings()
    documents = [line for _, texts in files for line in [*(f"{text}\n" for text in texts), None]]
    write_corpus(args.name, origin, [Source(origin, lambda: documents)], vocab, val_every=20)


def prepare_docs_task(args):
    """Write data/docs_task/{train,dev,test}.tsv: which package is a docstring of? A row has the
    first paragraph of a docstring. The files of dev are those of val in the corpus docs. Rows that
    are also in train are left out of dev and test."""
    rows = {"train": [], "dev": [], "test": []}
    for number, (package, texts) in enumerate(docstrings()[1]):
        split = {18: "dev", 19: "test"}.get(number % 20, "train")
        rows[split] += [(" ".join(text.split("\n\n")[0].split()), package) for text in texts]
    train = {text for text, _ in rows["train"]}
    discard("data/docs_task")
    with atomic("data/docs_task") as temporary:
        temporary.mkdir()
        for split, pairs in rows.items():
            new = [pair for pair in pairs if split == "train" or pair[0] not in train]
            lines = ["sentence\tlabel", *map("\t".join, new)]
            if split == "test":
                lines = ["index\tsentence", *(f"{n}\t{text}" for n, (text, _) in enumerate(new))]
            write_text(temporary / f"{split}.tsv", "\n".join(lines) + "\n")


def prepare_wikitext(args):
    """Prepare WikiText in its official splits, from a folder or zip on disk, or downloaded."""
    vocab = choose_vocab(args, 8192)
    kind = args.command.removeprefix("wikitext") + "-raw" * args.raw
    source = download.FILES[f"wikitext-{kind}-v1.zip"]
    path = args.path or download.fetch(*source)
    folder = path if path.is_dir() else download.unpack_once(path)
    sources = []
    for split, stem in zip(SPLITS, ("train", "valid", "test")):
        names = (f"wiki.{stem}.{'raw' if args.raw else 'tokens'}", f"{stem}.txt")
        files = [file for name in names for where in (name, f"*/{name}")
                 for file in sorted(folder.glob(where)) if file.is_file()]
        if not files:
            raise UserError(f"{path}: no {' or '.join(names)} in it")
        sources.append(Source(files[0], partial(stream, files[0], "wikitext"), split))
    write_corpus(args.name, str(args.path or source[0]), sources, vocab)


def prepare_paper(args):
    """Prepare a corpus of the paper, downloaded or from disk. Files and folders may have
    .parquet or text; BookCorpus may also be the tar."""
    if args.command == "pg19" and args.vocab_size:
        raise UserError("pg19 has no training split to learn a vocabulary from: give --vocab")
    vocab = choose_vocab(args, "bert-base-uncased")
    sources, origins = [], []
    for (name, ends, split), path in zip(PAPER[args.command], args.path or [None, None]):
        path = path or download.fetch_corpus(name)
        if path.name.endswith(".tar.bz2"):
            path = download.unpack_once(path)
        sources += [Source(file, partial(stream, file, ends), split, ends == "sentences")
                    for file in find_files(path, ".parquet", ".txt")]
        origins.append(f"{name}: {path}")
    write_corpus(args.name, "; ".join(origins), sources, vocab, args.val_every)


def prepare_glue(args):
    """Fetch the official files of GLUE's tasks to data/glue/TASK/."""
    names, path = args.names or list(GLUE_ARCHIVES), args.path
    if unknown := sorted(set(names) - GLUE_ARCHIVES.keys()):
        raise UserError(f"{unknown[0]}: no task of GLUE: expected {', '.join(GLUE_ARCHIVES)}")
    if path and len(names) > 1 and (path.is_file() or (path / "train.tsv").exists()):
        raise UserError(f"{path} has the files of one task: give one TASK")
    for name in names:
        folder = Path("data/glue", name)
        with lock(folder, "fetches it"):
            download.fetch_task(folder, GLUE_ARCHIVES[name], path, args.force)


def prepare_squad(args):
    """Fetch SQuAD's official files to data/squad/."""
    for file in sorted(args.path.glob("*-v1.1.json")) if args.path else ():
        read_squad(file)  # a UserError if it is damaged
    with lock(Path("data/squad"), "fetches it"):
        download.fetch_task(Path("data/squad"), SQUAD_FILES, args.path, args.force)


def prepare_weights(args):
    """Fetch trained weights to data/weights/NAME/."""
    for name in args.names:
        print(f"{download.fetch_weights(name)}: there")


def check(args):
    """Compare the files of a corpus with the SHA-256 in its meta.json."""
    corpus, changed = Corpus(args.name), 0
    for split, written in corpus.meta["sha256"].items():
        file = corpus.folder / f"{split}.bin"
        found = download.file_sha256(file) if file.exists() else "no file"
        changed += found != written
        print(f"{file}: " + ("as it was written" if found == written else
                             f"DAMAGED: SHA-256 {found[:12]}, written was {written[:12]}"))
    if changed:
        raise Failure(f"{corpus.folder}: {changed} of {len(SPLITS)} files are not as they were "
                      "written: prepare the corpus again with --force")


def main():
    args = parse_arguments()
    if args.prepare in (check, prepare_glue, prepare_squad, prepare_weights):
        return args.prepare(args)
    name = args.command + "_raw" * args.raw if args.name is None else args.name
    if Path(name).name != name or name[:1] in ("", ".", "-") or not name.isprintable():
        raise UserError(f"{name!r}: a corpus's name is a folder's name, without / or a leading . "
                        "or -")
    if name in NO_CORPUS and name != args.command:
        raise UserError(f"{name}: data/{name} is for other things: give the corpus another name")
    args.name, folder = name, Path("data", name)
    with lock(folder, "prepares it"):
        if folder.exists() and args.if_missing:
            return 0
        if folder.exists() and not args.force:
            raise UserError(f"{folder} exists already (--force replaces it)")
        args.prepare(args)
    return 0


if __name__ == "__main__":
    run_main(main)
