"""
Mistakes that people make: one line on stderr, status 2, nothing half-written, whatever the script.
"""
import json
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

import bench
import finetune
import measure
import prepare_data
import pretrain
from lib.errors import run_main
from lib.files import lock
from tests.helpers import train, write_tasks

MAINS = {
    "pretrain": lambda args: pretrain.main(args), "finetune": lambda args: finetune.main(args),
    "measure": lambda args: measure.main(args), "bench": lambda args: bench.main(args),
    "prepare_data": lambda args: prepare_data.main()}


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """A copy of `prepared` with three runs, tasks, and a folder in Hugging Face's layout."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        quick = "--max_steps=2", "--eval_interval=100"
        train(*quick)
        train(*quick, "--out=out/plain", "--memory_layers=", "--dataset=other")
        train(*quick, "--out=out/causal", "--objective=causal", "--memory_layers=")
        write_tasks(20)
        Path("hf").mkdir()
        settings = {
            "model_type": "bert", "num_hidden_layers": 1, "num_attention_heads": 1,
            "hidden_size": 4, "intermediate_size": 4, "vocab_size": 25, "type_vocab_size": 2,
            "max_position_embeddings": 8, "hidden_dropout_prob": 0.1, "initializer_range": 0.02}
        Path("hf/config.json").write_text(json.dumps(settings))
        torch.save({"a": torch.ones(1)}, "hf/pytorch_model.bin")
        shutil.copy("tiny.txt", "hf/vocab.txt")
        Path("tune.py").write_text("task = 'own'\ninit_from = 'out/tiny'\nmax_len = 32\n"
                                   "warmup = 0.1\ndevice = 'cpu'\n")
        Path("new.tsv").write_text("sentence\nthe cat\n")
        Path("short.txt").write_text("the cat\n")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return folder


def edit(name, old, new):
    """Replace a text in a file."""
    def spoil(patch):
        content = Path(name).read_text()
        assert old in content
        Path(name).write_text(content.replace(old, new))
    return spoil


def cut(name):
    """Keep the first half of a file."""
    def spoil(patch):
        content = Path(name).read_bytes()
        Path(name).write_bytes(content[:len(content) // 2])
    return spoil


def three_ranks(patch):
    patch.setattr("lib.distributed.get_world_size", lambda: 3)


MISTAKES = [  # (script, arguments, what else is wrong, words of the line)
    ("pretrain", "", None, "which config?"),
    ("pretrain", "tiny.py --batchsize=4", None, "'batchsize' (did you mean batch_size?)"),
    ("pretrain", "tiny.py", edit("tiny.py", "lr =", "lerning_rate ="), "tiny.py: unknown key"),
    ("pretrain", "configs/none.py", None, "configs/none.py: no such config file"),
    ("pretrain", "tiny.py --dataset=nowhere", None, "prepare_data.py"),
    ("pretrain", "tiny.py --out=out/new --warmup_steps=50", None, "warmup_steps = 50"),
    ("pretrain", "tiny.py --out=out/new --seq_len=129", None, "seq_len = 129"),
    ("pretrain", "tiny.py --model=huge", None, "'huge'"),
    ("pretrain", "tiny.py --out=out/new --device=abacus", None, "device = 'abacus'"),
    ("pretrain", "tiny.py --out=out/new --reinit_ffn=True", None, "needs init_from"),
    ("pretrain", "tiny.py --out=out/new", three_ranks, "accumulation = 2 is not a multiple"),
    ("pretrain", "tiny.py --out=out/new --init_from=out/tiny --dataset=other", None, "vocabulary"),
    ("pretrain", "tiny.py --out=out/new --init_from=out/tiny --n_keys=9", None, "size mismatch"),
    ("pretrain", "tiny.py --out=out/new --init_from=out/causal", None, "a causal language model"),
    ("pretrain", "tiny.py --out=out/new --init_from=hf", None, "it has no embeddings.word"),
    ("pretrain", "tiny.py --max_steps=4 --lr=5e-3", None, "add --lr=0.003 to go on"),
    ("pretrain", "tiny.py --max_steps=4", edit("out/tiny/config.json", '"train": "', '"train": "x'),
     "trained on other data: train"),
    ("finetune", "tune.py --init_from=", None, "init_from is empty"),
    ("finetune", "tune.py --task=nothing", None, "'nothing'"),
    ("finetune", "tune.py --max_len=500", None, "max_len = 500"),
    ("finetune", "tune.py --warmup=500", None, "warmup = 500"),
    ("finetune", "tune.py --init_from=out/causal", None, "a causal language model"),
    ("finetune", "tune.py", edit("own/train.tsv", "label", "class"), "own/train.tsv:1: columns"),
    ("finetune", "tune.py --task=squad", cut("data/squad/train-v1.1.json"), "train-v1.1.json"),
    ("measure", "tabel out/tiny", None, "invalid choice"),
    ("measure", "fill out/tiny 'no mask'", None, "no [MASK] in 'no mask'"),
    ("measure", "fill hf [MASK]", cut("hf/pytorch_model.bin"), "truncated, damaged"),
    ("measure", "sample out/tiny the", None, "is a masked language model, expected a causal one"),
    ("measure", "slots out/tiny --layer 1", None, "no memory in layer 1"),
    ("measure", "staleness out/plain", None, "out/plain"),
    ("measure", "predict out/tiny new.tsv", None, "not a fine-tuned model"),
    ("measure", "table out/tiny out/plain --data tiny", None, "vocabulary"),
    ("measure", "glue out/tiny", None, "out/tiny: no fine-tuned run"),
    ("prepare_data", "text new missing.txt", None, "missing.txt: no such file"),
    ("prepare_data", "text new short.txt --vocab tiny.txt", None, "different documents"),
    ("prepare_data", "text tiny text.txt --vocab tiny.txt", None, "exists already (--force"),
    ("prepare_data", "glue RTF", None, "RTF: no task of GLUE"),
    ("prepare_data", "squad --from own", lambda patch: shutil.rmtree("data/squad"),
     "own/train-v1.1.json"),
    ("bench", "inference --sizes huge", None, "huge"),
]

def content():
    """The files of the working folder, without locks."""
    return {path: path.read_bytes() for path in Path().rglob("*")
            if path.is_file() and not path.name.startswith(".lock_")}


def end(monkeypatch, capsys, script, args):
    """Run a script that should fail. Returns (exit status, stderr)."""
    monkeypatch.setattr(sys, "argv", [script, *args])
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: MAINS[script](args))
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return ended.value.code, said


@pytest.mark.parametrize("script, arguments, spoil, words", [
    pytest.param(*mistake, id=f"{mistake[0]} {mistake[1]}"[:60]) for mistake in MISTAKES])
def test_a_mistake_is_one_line(trained, tmp_path, monkeypatch, capsys, script, arguments, spoil,
                               words):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if spoil:
        spoil(monkeypatch)
    before = content()
    status, said = end(monkeypatch, capsys, script, shlex.split(arguments))
    assert words in said and status == 2
    assert content() == before


@pytest.mark.parametrize("script, arguments, folder", [
    ("pretrain", "tiny.py", "out/tiny"), ("finetune", "tune.py --out=out/new", "out/new/seed0")])
def test_a_second_process_in_a_folder_is_a_mistake(trained, monkeypatch, capsys, script, arguments,
                                                   folder):
    monkeypatch.chdir(trained)
    with lock(folder, "trains there"):
        status, said = end(monkeypatch, capsys, script, arguments.split())
    assert status == 2 and "another process trains there" in said
