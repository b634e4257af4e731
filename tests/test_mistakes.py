"""
Make mistakes that people make: one line on stderr, status 2, nothing written, whatever the script.
"""
import json
import shlex
import shutil
import signal
from pathlib import Path

import pytest

import bench
import finetune
import measure
import pretrain
from lib.files import lock, write_text
from tests.helpers import assert_one_line, prepare, train, write_tasks

MAINS = {"pretrain": pretrain.main, "finetune": finetune.main, "measure": measure.main,
         "bench": bench.main, "prepare_data": lambda args: prepare(*args)}


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """Copy `prepared`, and add three runs and tasks. No test may change it."""
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
        shutil.rmtree("data/squad")
        for name, size in (("cut", -2), ("empty", 0)):
            shutil.copytree("data/tiny", f"data/{name}")
            path, meta = Path(f"data/{name}/train.bin"), Path(f"data/{name}/meta.json")
            path.write_bytes(path.read_bytes()[:size])
            if not size:
                facts = json.loads(meta.read_text())
                meta.write_text(json.dumps({**facts, "tokens": {**facts["tokens"], "train": 0}}))
        shutil.copytree("out/tiny", "out/half")
        path = Path("out/half/step_000002/optimizer.pt")
        path.write_bytes(path.read_bytes()[:999])
        Path("tune.py").write_text("task = 'own'\ninit_from = 'out/tiny'\nmax_len = 32\n"
                                   "warmup = 0.1\ndevice = 'cpu'\n")
        finetune.main(["tune.py", "--task=pairs", "--max_steps=1"])
        Path("causal.py").write_text(Path("tiny.py").read_text() + "objective = 'causal'\n")
        Path("new.tsv").write_text("sentence\nthe cat\n")
        Path("short.txt").write_text("the cat\n")
        write_text(Path("data/own/notes.txt"), "mine")
        write_text(Path("japanese/config.json"), '{"tokenizer_class": "BertJapaneseTokenizer"}')
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return folder


MISTAKES = [  # (script, arguments, words of the line)
    ("pretrain", "", "which config?"),
    ("pretrain", "tiny.py --dataset=nowhere", "nowhere"),
    ("pretrain", "tiny.py --out=out/new --warmup_steps=50", "warmup_steps = 50"),
    ("pretrain", "tiny.py --out=out/new --seq_len=129", "seq_len = 129"),
    ("pretrain", "tiny.py --out=out/new --dataset=cut", "data/cut/train.bin"),
    ("pretrain", "tiny.py --out=out/new --dataset=empty", "data/empty/train.bin"),
    ("pretrain", "tiny.py --out=out/half", "out/half/step_000002/optimizer.pt"),
    ("pretrain", "tiny.py --out=data/tiny", "data/tiny has files"),
    ("pretrain", "tiny.py --out=out/new --reinit_ffn=True", "reinit_ffn"),
    ("pretrain", "tiny.py --out=out/new --init_from=out/tiny --dataset=other", "vocabulary"),
    ("bench", "train --max_steps 9 tiny.py", "--max_steps=1000"),
    ("bench", "train tiny.py --seq_len=5000", "seq_len = 5000"),
    ("bench", "train tiny.py --n_head=5", "n_head = 5"),
    ("bench", "train tiny.py --model= --init_from=out/causal", "causal"),
    ("bench", "train tiny.py --model= --init_from=out/tiny --topk=3", "topk = 4, not 3"),
    ("bench", "causal tiny.py --lengths 5000", "seq_len = 5000"),
    ("bench", "causal tiny.py --objective=masked", "--objective=masked"),
    ("bench", "causal causal.py --slots 2 --lengths 8", "topk = 4: expected 1 to n_keys = 2"),
    ("bench", "layer --keys 4", "--keys: 4: expected 32"),
    ("finetune", "tune.py --init_from=", "init_from"),
    ("finetune", "tune.py --task=nothing", "'nothing'"),
    ("finetune", "tune.py --max_len=500", "max_len = 500"),
    ("finetune", "tune.py --init_from=out/causal", "causal"),
    ("measure", "sample out/causal the --temperature nan", "--temperature: nan"),
    ("measure", "predict out/tiny_pairs new.tsv --out new", "new.tsv exists"),
    ("measure", "fill out/tiny 'no mask'", "[MASK]"),
    ("measure", f"fill out/tiny '{130 * 'the '}[MASK]'", "out/tiny"),
    ("measure", "slots out/tiny --layer 1", "layer 1"),
    ("measure", "predict out/tiny new.tsv", "out/tiny"),
    ("measure", "curves out/tiny_pairs/seed0", "out/tiny_pairs/seed0"),
    ("measure", "curves out/tiny --out japanese/config", "japanese/config.json exists"),
    ("measure", "table out/tiny out/plain --data tiny", "out/plain"),
    ("measure", "glue out/tiny", "out/tiny"),
    ("prepare_data", "text new short.txt --vocab tiny.txt", "documents"),
    ("prepare_data", "text tiny text.txt --vocab tiny.txt", "data/tiny"),
    ("prepare_data", "text own text.txt --vocab tiny.txt --force", "meta.json"),
    ("prepare_data", "text '' text.txt --vocab tiny.txt --force", "''"),
    ("prepare_data", "text ../out text.txt --vocab tiny.txt --force", "'../out'"),
    ("prepare_data", "docs --name GLUE --force", "'GLUE'"),
    ("prepare_data", "text new text.txt --vocab_size -5", "--vocab_size: -5"),
    ("prepare_data", "text new text.txt --vocab_size=70000", "70,000"),
    ("prepare_data", "text new text.txt --cased --vocab tiny.txt", "--cased"),
    ("prepare_data", "text new text.txt --vocab japanese", "BertJapaneseTokenizer"),
    ("bench", "layer --rounds 0", "--rounds: 0"),
]


@pytest.mark.parametrize("script, arguments, words", [
    pytest.param(*mistake, id=" ".join(mistake[:2])[:60]) for mistake in MISTAKES])
def test_a_mistake_is_one_line(trained, monkeypatch, capsys, script, arguments, words):
    monkeypatch.chdir(trained)
    assert_one_line(capsys, *shlex.split(arguments), words=[words], main=MAINS[script])


@pytest.mark.parametrize("script, arguments, folder", [
    ("pretrain", "tiny.py", "out/tiny"), ("finetune", "tune.py --out=out/new", "out/new/seed0")])
def test_a_second_process_in_a_folder_is_a_mistake(trained, monkeypatch, capsys, script, arguments,
                                                   folder):
    monkeypatch.chdir(trained)
    with lock(folder, "trains there"):
        assert_one_line(capsys, *arguments.split(), words=[folder], main=MAINS[script])
