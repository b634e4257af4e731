"""
A user's mistake is one line on stderr that says what is wrong, exit status 2, and nothing written,
whatever the script.
"""
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

import bench
import finetune
import measure
import prepare_data
import pretrain
from lib.corpus import Corpus
from lib.files import lock
from lib.settings import load_settings
from lib.tasks import find_task, read_split
from lib.tokenizer import GPT2_SPECIALS, SPECIALS
from tests.helpers import (
    PIECES,
    ROOT,
    Settings,
    assert_one_line,
    command,
    prepare_sample,
    squad_file,
    train,
    write_parquet,
)


def test_a_mistake_ends_the_process_with_status_2(place):
    result = subprocess.run(command("--max_step=4"), capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: command line: unknown key 'max_step'")


@pytest.mark.parametrize("script, out", [("pretrain.py", "out/tiny"), ("finetune.py", "out/new")])
def test_a_second_process_in_a_folder_is_a_mistake(tuned, capsys, script, out):
    config = "tiny.py" if script == "pretrain.py" else "tune.py"
    with lock(out, "trains there"):
        assert_one_line(capsys, config, f"--out={out}", "--max_steps=6", main=MAINS[script],
                        words=[f"{out}: process {os.getpid()} trains there"])


def test_a_mistake_is_one_line_and_status_2(workdir):
    command = [sys.executable, ROOT / "prepare_data.py", "text", "new", "missing.txt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: missing.txt: no such file or folder\n"


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def written(name, content):
    """Each of these makes the function that spoils something, to be called later."""
    def spoil():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return spoil


def halved(name):
    def spoil():
        path = Path(name)
        path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    return spoil


def foreign_id(name, at, number):
    def spoil():
        ids = np.fromfile(name, "<u2")
        ids[at] = number
        ids.tofile(name)
    return spoil


def changed(name, **settings):
    def spoil():
        Path(name).write_text(json.dumps({**json.loads(Path(name).read_text()), **settings}))
    return spoil


def same_ids():
    path = Path("data/squad/train-v1.1.json")
    path.write_text(path.read_text().replace('"q1"', '"q0"'))


def sample(change):
    """A corpus, data/sample, and change() to its folder."""
    def spoil():
        prepare_sample()
        change()
    return spoil


def meta(change):
    def spoil():
        path = Path("data/sample/meta.json")
        found = json.loads(path.read_text())
        change(found)
        path.write_text(json.dumps(found))
    return sample(spoil)


def parquet(change=bytes, column="text"):
    def spoil():
        write_parquet("wiki/a.parquet", ["cat", "sat", "mat"] * 5000, column)
        Path("wiki/a.parquet").write_bytes(change(Path("wiki/a.parquet").read_bytes()))
    return spoil


def tsv(split, content):
    """A task, own, with a good train.tsv, and this one of another or the same split."""
    def spoil():
        Path("own").mkdir()
        for name, text in {"train": "sentence\tlabel\na\tx\nb\ty\n", split: content}.items():
            if text is not None:
                Path("own", f"{name}.tsv").write_bytes(text.encode(errors="surrogateescape"))
    return spoil


BERT_SETTINGS = {"model_type": "bert", "num_hidden_layers": 1, "num_attention_heads": 1,
                 "hidden_size": 4, "intermediate_size": 4, "vocab_size": 40,
                 "max_position_embeddings": 8, "type_vocab_size": 2, "hidden_dropout_prob": 0.1,
                 "initializer_range": 0.02}


def weights(name, content):
    """A folder of weights, hf, in which this file has this content (config.json these settings)."""
    def spoil():
        vocab = "\n".join([*SPECIALS, *(f"w{n}" for n in range(35))]) + "\n"
        found = {"config.json": {}, "vocab.txt": vocab.encode(), "pytorch_model.bin": {}}
        if name == "model.safetensors":
            pytest.importorskip("safetensors")
            del found["pytorch_model.bin"]
        Path("hf").mkdir()
        for file, inside in (found | {name: content}).items():
            if file == "config.json" and isinstance(inside, dict):
                settings = {key: value for key, value in (BERT_SETTINGS | inside).items()
                            if value is not None}
                inside = json.dumps(settings).encode()
            if isinstance(inside, bytes):
                Path("hf", file).write_bytes(inside)
            else:
                torch.save(inside, Path("hf", file))
    return spoil


def read_task(args):
    task = find_task("own")
    for split in dict.fromkeys(["train", *args]):
        read_split(task, split)


MAINS = {  # the scripts, and what they call that is also for programs
    "pretrain.py": pretrain.main, "finetune.py": finetune.main, "measure.py": measure.main,
    "bench.py": lambda args: bench.main(), "prepare_data.py": lambda args: prepare_data.main(),
    "load": lambda args: load_settings(Settings, args), "find": lambda args: find_task(*args),
    "Corpus": lambda args: Corpus(*args).split("train"), "read": read_task,
}
MISTAKES = {  # (the fixture of the working directory, what runs): (args, what spoils it, *words)
    ("workdir", "load"): [
        ("--leyers=1", None, "command line", "'leyers'", "did you mean layers"),
        ("c.py", written("c.py", "step = 1"), "c.py", "'step'", "did you mean steps"),
        ("--steps=1.0", None, "steps", "expected int", "float"),
        ("--steps=True", None, "steps", "expected int", "bool"),
        ("--lr=True", None, "lr", "expected float", "bool"),
        ("--lr=fast", None, "lr", "'fast'", "expected float"),
        ("--flag=1", None, "flag", "expected bool", "int"),
        ("--layers=1,2.5", None, "layers", "tuple of ints"),
        ("c.py", written("c.py", "name = 5"), "c.py", "name", "expected str", "int"),
        ("--steps", None, "--steps", "expected one argument"),
        ("c.py steps=1", written("c.py", ""), "--steps=VALUE"),
        ("c.py d.py", written("c.py", ""), "d.py: a second config beside c.py: expected one"),
        ("d.py", written("c.py", ""), "d.py", "no such config"),
        ("c.py", written("c.py", "steps = 1\nlr = 1 / 0"), "c.py:2", "ZeroDivisionError"),
        ("c.py", written("c.py", "import sys\nsys.exit(0)"), "c.py:2", "SystemExit"),
        ("c.py", written("c.py", "steps = 1\n\nlr = = 2"), "c.py:3", "SyntaxError")],
    ("workdir", "prepare_data.py"): [
        ("text new missing.txt", None, "missing.txt"),
        ("text new sample.txt nothing", lambda: Path("nothing").mkdir(),
         "nothing: no *.txt among its 0 files"),
        ("text ../new sample.txt", None, "../new"), ("text .new sample.txt", None, ".new"),
        ("text new sample.txt --vocab_size 70000", None, "70000"),
        ("text new sample.txt --vocab_size 255", None, "255"),
        ("text new sample.txt --val_every 2", None, "--val_every", "at least 3"),
        ("pg19 --vocab_size 300", None, "pg19 has no training split"),
        ("text weights sample.txt", None, "data/weights is for other things"),
        ("text 'a\nb' sample.txt", None, "a corpus's name is a folder's name"),
        ("text new \udcff.txt", None, r"text new \udcff.txt", "must be UTF-8"),
        ("weights a/..", None, "a/..: no weights there"),
        ("glue rte", None, "rte: no task of GLUE", "RTE"),
        ("text new sample.txt --vocab missing", None, "missing"),
        ("wikitext2 --from nothing", lambda: Path("nothing").mkdir(), "wiki.train.tokens"),
        ("wikitext2 --from sample.txt", None, "sample.txt"),
        ("wikitext2 --from missing", None, "missing: no such file or folder"),
        ("text new sample.txt bad.txt --vocab vocab.txt", written("bad.txt", b""), "bad.txt"),
        ("text new sample.txt bad.txt --vocab vocab.txt", written("bad.txt", b" \n\n"), "bad.txt"),
        ("text new sample.txt bad.txt --vocab vocab.txt", written("bad.txt", b"cat\n\0\n"),
         "bad.txt: not utf-8 text (a NUL character)"),
        ("text new sample.txt bad.txt --vocab vocab.txt",
         written("bad.txt", "cat\n\ncafé".encode("latin-1")), "bad.txt: byte 8 is not utf-8"),
        ("text new bad.txt --vocab vocab.txt", written("bad.txt", b"cat\n\nmat\n"), "2 documents"),
        ("text new sample.txt --vocab vocab.txt",
         written("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\ncat\n"), "[MASK]"),
        ("text new sample.txt --vocab vocab.txt",
         written("vocab.txt", "\n".join([*PIECES, "cat"])), "'cat'"),
        ("text new sample.txt --vocab vocab.txt", written("vocab.txt", b""), "vocab.txt"),
        ("text new sample.txt --vocab vocab.txt",
         written("vocab.txt", "\n".join([*PIECES, *map(str, range(2**16))])), "65,536"),
        *[("text new sample.txt --vocab vocab.txt", written("vocab.txt", "\n".join(special)),
           "vocab.txt: not a vocabulary: no token but the special ones")
          for special in (SPECIALS, GPT2_SPECIALS)],
        *[("text new sample.txt --vocab vocab.txt",
           written("vocab.txt", "\n".join([*GPT2_SPECIALS, *more])), "the 256 bytes")
          for more in ("abc", [*pre_tokenizers.ByteLevel.alphabet(), "\u5317"])],
        ("squad --from .", lambda: [squad_file(Path(name)) and halved(name)()
                                    for name in prepare_data.SQUAD_FILES],
         "dev-v1.1.json: not readable"),
        ("wikipedia --from wiki --vocab vocab.txt", parquet(lambda whole: whole[:-100]),
         "wiki/a.parquet: damaged"),
        ("wikipedia --from wiki --vocab vocab.txt", parquet(lambda whole: b""),
         "wiki/a.parquet: damaged"),
        ("wikipedia --from wiki --vocab vocab.txt",
         parquet(lambda whole: whole[:4] + b"\xff" * 56 + whole[60:]), "wiki/a.parquet: damaged"),
        ("wikipedia --from wiki --vocab vocab.txt", parquet(column="body"), "no column 'text'"),
        ("wikipedia --from wiki --vocab vocab.txt",
         lambda: write_parquet("wiki/a.parquet", [1, 2, 3]), "no texts in the column 'text'"),
        ("wikipedia --from nowhere --vocab vocab.txt", None, "nowhere: no such file")],
    ("workdir", "Corpus"): [
        ("mine", None, "data/mine: no such corpus", "prepare_data.py text mine PATH...\n"),
        ("docs", None, "data/docs: no such corpus", "prepare_data.py docs\n"),
        ("wikitext2_raw", None, "no such corpus", "prepare_data.py wikitext2 --raw\n"),
        ("sample", sample(Path("data/sample/meta.json").unlink),
         "prepare_data.py text sample PATH"),
        ("sample", sample(written("data/sample/meta.json", '{"name":')), "meta.json: not readable"),
        ("sample", sample(written("data/sample/meta.json", "[]")), "meta.json: not readable"),
        ("sample", meta(lambda found: found.pop("tokens")), "meta.json: damaged"),
        ("sample", meta(lambda found: found.update(mask_id=5)), "meta.json: damaged"),
        ("sample", meta(lambda found: found.update(sha256=["0"])), "meta.json: damaged"),
        ("sample", meta(lambda found: found["tokens"].update(val="9")), "meta.json: damaged"),
        ("sample", meta(lambda found: found.update(unigram_perplexity=None)), "meta.json: damaged"),
        ("sample", sample(written("data/sample/meta.json", "[" * 100_000)), "not readable"),
        ("sample", sample(written("data/sample/vocab.txt", "\n".join([*PIECES[:-1], "!"]) + "\n")),
         "vocab.txt"),
        ("sample", sample(written("data/sample/train.bin", bytes(22))),
         "expected 24 bytes, found 22"),
        ("sample", sample(written("data/sample/train.bin", bytes(26))),
         "expected 24 bytes, found 26"),
        ("sample", sample(Path("data/sample/train.bin").unlink), "expected 24 bytes, found 0"),
        ("sample", sample(foreign_id("data/sample/train.bin", 3, 11)), "id 11 at position 3")],
    ("workdir", "find"): [
        ("rte", None, "python prepare_data.py glue RTE"),
        ("squad", None, "python prepare_data.py squad"),
        ("nowhere", None, "expected docs, squad, mnli,")],
    ("workdir", "read"): [
        ("train", tsv("train", "sentence\tlabel\na\tx\nb\tx\n"),
         "error: own/train.tsv: labels ['x']: expected two classes"),
        ("train", tsv("train", "sentence\tlabel\n"), "error: own/train.tsv: no row"),
        ("train", tsv("train", ""), "error: own/train.tsv: no row"),
        ("train", tsv("train", "text\tlabel\na\tx\nb\ty\n"),
         "error: own/train.tsv:1: columns ['text', 'label']"),
        ("train", tsv("train", "sentence\na\n"), "error: own/train.tsv:1: columns ['sentence']"),
        ("train", tsv("train", "sentence\tlabel\n" + "a\tx\nb\ty\n" * 70 + "a\n" * 3),
         "error: own/train.tsv:142: 1 fields, expected 2 (3 of 143 rows are malformed)"),
        ("train", tsv("train", "sentence\tlabel\na\t \nb\t\n"),
         "error: own/train.tsv: labels []: expected two classes"),
        ("train", tsv("train", "sentence\tlabel\na\tx\ncaf\udce9\ty\n"),
         "error: own/train.tsv:3: not UTF-8"),
        ("train", tsv("train", "sentence\tscore\na\t1\nb\tnan\nc\thigh\n"),
         "error: own/train.tsv:3: label 'nan': expected a number (2 of 3"),
        ("train", tsv("train", "sentence\tscore\na\t1e39\nb\t1\n"),
         "error: own/train.tsv:2: label '1e39': expected a number"),
        ("train", tsv("train", "sentence\tsentence\tlabel\na\tb\tx\na\tb\ty\n"),
         "error: own/train.tsv:1: there are 2 columns sentence"),
        ("dev", tsv("dev", "sentence\tlabel\na\tx\n\t\nb\tz\n"),
         "error: own/dev.tsv:3: label '': expected x, y (2 of 3"),
        ("dev", tsv("dev", "sentence\tlabel\na\tx\n\nb\ty\n"),
         "error: own/dev.tsv:3: 1 fields, expected 2"),
        ("train", tsv("train", "sentence\tlabel\na\tx\nb\ty\nc\n"),
         "error: own/train.tsv:4: 1 fields, expected 2 (1 of 3"),
        ("dev", tsv("dev", "sentence\tlabel\na\tx\nb\n"),
         "error: own/dev.tsv:3: 1 fields, expected 2"),
        ("dev", tsv("dev", "sentence\tlabel\na\tb\tx\n"),
         "error: own/dev.tsv:2: 3 fields, expected 2"),
        ("dev", tsv("dev", "sentence\na\n"), "error: own/dev.tsv:1: columns ['sentence']"),
        ("dev", tsv("dev", None), "error: own/dev.tsv: no such file"),
        ("test", tsv("test", "index\tsentence\n0\n"),
         "error: own/test.tsv:2: 1 fields, expected 2"),
        ("test", tsv("test", "index\ttext\n0\ta\n"),
         "error: own/test.tsv:1: columns ['index', 'text']")],
    ("workdir", "measure.py"): [
        ("fill bert-base-uncased [MASK]", None, "python prepare_data.py weights bert-base-uncased"),
        ("fill roberta-base [MASK]", None, "RoBERTa's weights"),
        ("fill out/demo [MASK]", None, "python pretrain.py configs/demo.py makes them"),
        ("fill demo [MASK]", written("out/demo/config.json", "{}"), "did you mean out/demo?"),
        ("fill out/none [MASK]", None, "out/none: no weights there: expected a run",
         "Hugging Face layout; python prepare_data.py weights NAME"),
        ("fill bert-bas [MASK]", None, "bert-base"),
        ("fill hf [MASK]", weights("pytorch_model.bin", Payload()), "nothing in it was run"),
        ("fill hf [MASK]", weights("pytorch_model.bin", [torch.ones(2)]), "no state dict"),
        ("fill hf [MASK]", weights("pytorch_model.bin", {"epoch": 3}), "no state dict"),
        ("fill hf [MASK]", weights("pytorch_model.bin", {"a": torch.ones(1)}), "it has no"),
        ("fill hf [MASK]", weights("pytorch_model.bin", b"half"), "truncated"),
        ("fill hf [MASK]", weights("model.safetensors", b"half"), "truncated"),
        ("fill hf [MASK]", weights("config.json", b"{"), "config.json: not readable"),
        ("fill hf [MASK]", weights("config.json", b"[]"), "config.json: not readable"),
        ("fill hf [MASK]", weights("config.json", {"hidden_size": None}),
         "config.json: it has no setting hidden_size"),
        ("fill hf [MASK]", weights("config.json", {"model_type": "gpt2"}), "'gpt2': expected bert"),
        ("fill hf [MASK]", weights("config.json", {"model_type": "roberta"}), "RoBERTa's weights"),
        ("fill hf [MASK]", weights("config.json", {"hidden_act": "gelu_new"}), "gelu_new"),
        ("fill hf [MASK]", weights("config.json", {"vocab_size": 41}),
         "40 tokens do not fit weights for 41"),
        ("fill hf [MASK]", weights("config.json", {"num_attention_heads": 3}),
         "config.json: num_attention_heads = 3: expected a divisor of the width 4"),
        ("fill hf [MASK]", weights("config.json", {"hidden_size": "wide"}),
         "hidden_size = 'wide': expected a"),
        ("fill hf [MASK]", weights("config.json", {"num_attention_heads": 0}),
         "a whole number, 1 to"),
        ("fill hf [MASK]", weights("config.json", {"hidden_size": 4.0}),
         "hidden_size = 4.0: expec"),
        ("fill hf [MASK]", weights("config.json", {"hidden_size": 2**30}), "this machine has"),
        ("fill hf [MASK]", weights("config.json", {"is_decoder": "no"}), "is_decoder = 'no'"),
        ("fill hf [MASK]", weights("config.json", {"model_type": "pkm-bert", "alpha": None}),
         "it has no setting alpha"),
        ("fill hf [MASK]", weights("vocab.txt", b"[PAD]\n"), "not a vocabulary")],
    ("two_runs", "measure.py"): [
        ("table out/none --data tiny", None, "out/none", "no weights"),
        ("table data --data tiny", None, "data: no weights"),
        ("table out/tiny --data tiny --repeats 0", None, "--repeats", "at least 1"),
        ("table out/tiny --data pg19", None, "data/pg19", "prepare_data.py"),
        ("table out/tiny --data tiny pg19", None, "data/pg19"),
        ("table out/tiny out/foreign --data tiny", None, "out/foreign", "vocabulary", "data/tiny",
         "--vocab"),
        ("curves out/tiny out/foreign", None, "out/foreign", "vocabulary", "out/tiny"),
        ("curves out/none", None, "out/none"), ("staleness data", None, "data/config.json"),
        ("staleness out/foreign", None, "out/foreign", "without memory"),
        ("staleness out/tiny", written("out/tiny/usage/step_000002.npz", "text"),
         "out/tiny/usage/step_000002.npz: damaged"),
        ("staleness out/tiny", halved("out/tiny/usage/step_000002.npz"), "npz: damaged"),
        ("staleness out/tiny", lambda: np.savez("out/tiny/usage/step_000002.npz", a=np.ones(2)),
         "step_000002.npz: damaged (KeyError)"),
        ("browse out/tiny --out page", halved("out/tiny/usage/step_000002.npz"), "npz: damaged"),
        ("slots out/foreign --layer 2", None, "out/foreign", "without memory"),
        ("predict out/tiny new.tsv", None, "out/tiny", "not a fine-tuned model"),
        ("browse out/foreign --out page", None, "out/foreign", "without memory"),
        ("browse out/tiny", None, "--out"),
        ("slots out/tiny --layer 1", None, "no memory in layer 1", "2, 3"),
        ("slots out/tiny --layer 2 --slot 3 64", None, "slot 64", "0 to 63"),
        ("slots out/tiny --layer 2 --data other", None, "data/other", "vocabulary"),
        ("fill out/tiny 'no mask'", None, "no [MASK]"), ("fill out/none [MASK]", None, "out/none"),
        ("fill out/tiny [MASK] --data nowhere", None, "data/nowhere"),
        ("sample out/tiny the", None, "out/tiny is a masked language model, expected a causal one"),
        ("sample out/tiny the --temperature nan", None, "--temperature nan: expected a number"),
        (f"sample out/tiny the --seed {10**23}", None, "--seed", "expected a whole number"),
        ("fill out/tiny '\udcff [MASK]'", None, "must be UTF-8"),
        ("table out/tiny --data tiny", changed("out/tiny/config.json", seq_len=1), "seq_len = 1"),
        ("curves out/tiny", changed("out/tiny/config.json", objective=None), "objective"),
        (f"fill out/tiny '{'[MASK] ' * 500}'", None, "positions")],
    ("place", "pretrain.py"): [
        ("tiny.py --batchsize=4", None, "'batchsize'", "did you mean batch_size"),
        ("tiny.py --batch_size=2.5", None, "batch_size", "expected int"),
        ("tiny.py --batch_size=0", None, "batch_size"),
        ("tiny.py --model=huge", None, "'huge'", "demo"),
        ("tiny.py --objective=next", None, "'next'", "masked, causal"),
        ("tiny.py --compile=maybe", None, "compile", "'maybe'"),
        ("tiny.py --dtype=float8", None, "dtype", "float8"),
        ("tiny.py --dtype=float16", None, "float16"),
        ("tiny.py --device=abacus", None, "device", "abacus"),
        ("tiny.py --topk=9", None, "topk", "9"), ("tiny.py --key_dim=15", None, "key_dim", "15"),
        ("tiny.py --memory_layers=5", None, "memory_layers = (5,)", "1 to 4"),
        ("tiny.py --seq_len=129", None, "seq_len", "129", "128"),
        ("tiny.py --dataset=nowhere", None, "data/nowhere"),
        ("tiny.py --dataset=data/tiny", None, "'data/tiny': expected a folder's name in data/"),
        ("tiny.py --dataset=", None, "dataset '': expected a folder's name in data/"),
        ("tiny.py --dataset=.", None, "dataset '.': expected a folder's name in data/"),
        ("tiny.py --dry_run=True --batch_size=100000000000", None, "lower batch_size"),
        ("tiny.py --d_ff=3000000000", None, "d_ff = 3000000000: expected", "to 2,147,483,647"),
        ("tiny.py --init_from=out/base", None, "out/base", "python pretrain.py configs/base.py"),
        ("tiny.py --seq_len=2", None, "seq_len"), ("tiny.py --dropout=1.5", None, "dropout"),
        ("tiny.py --seed=-1", None, "seed"), ("tiny.py --lr=-1", None, "lr"),
        ("tiny.py --keys_lr=-1", None, "keys_lr", "at least 0"),
        ("tiny.py --key_dim=0", None, "key_dim"),
        ("tiny.py --memory_heads=0", None, "memory_heads"),
        ("tiny.py --lr={[]}", None, "lr", "expected float")],
    ("two_runs", "pretrain.py"): [
        ("tiny.py --max_steps=4", halved("data/tiny/train.bin"), "train.bin", "bytes"),
        ("tiny.py --max_steps=4", foreign_id("data/tiny/train.bin", 100, 25), "train.bin", "25"),
        ("tiny.py --max_steps=4", halved("out/tiny/step_000002/model.pt"), "step_000002/model.pt"),
        ("tiny.py --max_steps=4", halved("out/tiny/step_000002/optimizer.pt"),
         "step_000002/optimizer.pt"),
        ("tiny.py --max_steps=4", halved("out/tiny/step_000002/state.pt"), "step_000002/state.pt"),
        ("tiny.py --max_steps=4", halved("out/tiny/config.json"), "out/tiny/config.json"),
        ("tiny.py --max_steps=4", lambda: torch.save([1], "out/tiny/step_000002/state.pt"),
         "step_000002/state.pt: truncated, damaged"),
        ("tiny.py --max_steps=4", lambda: torch.save({"a": 1}, "out/tiny/step_000002/model.pt"),
         "step_000002/model.pt: truncated, damaged"),
        ("tiny.py --max_steps=4", lambda: shutil.copy(
            "out/foreign/step_000002/optimizer.pt", "out/tiny/step_000002/optimizer.pt"),
         "step_000002/optimizer.pt does not belong to"),
        ("tiny.py --max_steps=4 --dataset=other", None, "out/tiny", "vocabulary"),
        ("tiny.py --max_steps=4 --lr=5e-3", None, "0.005", "add --lr=0.003 to go on"),
        ("tiny.py --max_steps=4 --memory_layers=2", None, "add --memory_layers=2,3 to go on"),
        ("tiny.py --max_steps=4", Path("out/tiny/step_000002/model.pt").unlink,
         "out/tiny/step_000002: no model.pt: remove the folder"),
        ("tiny.py --max_steps=4 --objective=causal", None, "objective", "'masked'", "'causal'"),
        ("tiny.py --out=out/new --init_from=out/tiny --objective=causal", None,
         "out/tiny/step_000002 is a masked language model, expected a causal one"),
        ("tiny.py --max_steps=4 --out=out/new --init_from=out/tiny --n_keys=9", None, "shape",
         "step_000002"),
        ("tiny.py --max_steps=4 --out=out/new --init_from=out/tiny --dataset=other", None,
         "vocabulary")],
    ("tuned", "finetune.py"): [
        ("tune.py --task=", None, "task is empty: expected docs"),
        ("tune.py --task=squad", same_ids, "train-v1.1.json: 2 questions have the id 'q0'"),
        ("tune.py --task=nothing", None, "nothing", "expected docs, squad"),
        ("tune.py --task=rte", None, "data/glue/RTE", "prepare_data.py glue RTE"),
        ("tune.py --init_from=", None, "init_from", "python finetune.py configs/demo_finetune.py"),
        ("tune.py --init_from=out/none", None, "out/none", "no weights"),
        ("tune.py --max_len=500", None, "max_len", "500", "128"),
        ("tune.py --epochs=0", None, "epochs"),
        ("tune.py --compile=maybe", None, "compile", "'maybe'"),
        ("tune.py --seeds=0", None, "seeds"),
        ("tune.py --learning_rate=1", None, "'learning_rate'")],
    ("workdir", "bench.py"): [
        ("speed", None, "invalid choice", "inference"), ("--sizes huge", None, "huge", "base"),
        ("layer --tokens 0", None, "--tokens", "at least 2"),
        ("causal --slots 9", None, "--slots", "at least 32"), ("--dtype int8", None, "int8"),
        ("--device moon", None, "moon"), ("train --systems +FFN", None, "+FFN", "+ResM")],
}


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """A copy of `prepared` with out/tiny, and out/foreign without memory and on other words."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    caught = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
    handlers = {number: signal.getsignal(number) for number in caught}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train("--max_steps=2")
        train("--max_steps=2", "--dataset=other", "--memory_layers=", "--out=out/foreign")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return folder


@pytest.fixture
def two_runs(place, trained):
    """The working directory: a copy of `trained`."""
    shutil.copytree(trained, place, dirs_exist_ok=True)


@pytest.mark.parametrize("folder, script, args, spoil, words", [
    pytest.param(folder, script, shlex.split(args), spoil, words, id=f"{script} {args}"[:60])
    for (folder, script), cases in MISTAKES.items() for args, spoil, *words in cases])
def test_a_mistake_is_one_line(request, monkeypatch, capsys, folder, script, args, spoil, words):
    request.getfixturevalue(folder)
    if spoil:
        spoil()
    monkeypatch.setattr(sys, "argv", [script, *args])
    assert_one_line(capsys, *args, words=words, main=MAINS[script])
