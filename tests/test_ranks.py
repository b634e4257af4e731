"""
Share one run among several processes, which make what one makes, and survive kills.

$ PKM_TEST_KILLS=20 PKM_TEST_RANKS=2 python -m pytest tests/test_ranks.py     # not 1 of 3 ranks
"""
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import finetune
import measure
import pretrain
from lib.ranks import any_signalled, barrier, get_rank
from lib.weights import read_weights
from tests.helpers import ROOT, assert_equal_runs, differences, log, steps_saved, write_tasks
from tests.on_ranks import finish, start

KILLS = int(os.environ.get("PKM_TEST_KILLS", "1"))
RANKS = int(os.environ.get("PKM_TEST_RANKS", "3"))
SEED = int(os.environ.get("PKM_TEST_SEED", "0"))  # of the moments of kills
PRETRAIN = ["tiny.py", "--accumulation=12", "--batch_size=1", "--max_steps=8", "--n_layer=2",
            "--d_model=16", "--d_ff=32", "--memory_layers=1,2", "--log_interval=2",
            "--usage_interval=8", "--eval_interval=8", "--eval_sequences=3",
            "--keep_checkpoints=4", "--checkpoint_interval=2"]
SYSTEMS = {"base": ["--memory_layers="], "pkm": ["--alpha=0", "--objective=causal"], "resm": [],
           "resm_init": ["--init_from=out/base_0"]}
COMPARED = [("base", 2), ("pkm", 3), ("resm", 4), ("resm_init", 2), ("tuned", 4)]


def start_run(name, world):
    """Start a training of SYSTEMS, or a fine-tuning that starts from resm.

    It has 46 examples: the last step of an epoch has 6 for 4 micro-batches. Held-out text has 3
    batches.
    """
    out = f"--out=out/{name}_{world}"
    if name == "tuned":
        return start(world, finetune.main, [
            "tune.py", "--init_from=out/resm_0", "--accumulation=4", "--train_examples=46",
            "--epochs=2", out], float64=True)
    return start(world, pretrain.main, [*PRETRAIN, *SYSTEMS[name], out], float64=True)


@pytest.fixture(scope="module")
def compared(prepared, tmp_path_factory):
    """Make a folder with runs of one process, out/<name>_0, and of several ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_tasks(train_examples=50)
        Path("tune.py").write_text("task = 'own'\nmax_len = 32\nbatch_size = 2\nlr = 5e-3\n"
                                   "value_lr = 1e-2\nlog_interval = 5\ndevice = 'cpu'\n")
        for runs in (COMPARED[:3], COMPARED[3:]):  # the last ones start from the first
            finish(*(start_run(name, n) for name, world in runs for n in (0, world)))
    return folder


@pytest.mark.parametrize("name, world", COMPARED)
def test_any_number_of_ranks_makes_the_same_run(compared, monkeypatch, name, world):
    """Make 8 steps of 12 micro-batches, in float64, with dropout."""
    monkeypatch.chdir(compared)
    seed = "/seed0" if name == "tuned" else ""
    assert_equal_runs(f"out/{name}_{world}{seed}", f"out/{name}_0{seed}", 1e-12)


def compiled(argv):
    torch.compile = Mock(wraps=functools.partial(torch.compile, backend="aot_eager"))
    pretrain.main([*argv, "--compile=on"])
    torch.compile.assert_called_once()


def test_compiled_ranks_make_the_same_run(compared, monkeypatch):
    monkeypatch.chdir(compared)
    more = "--dropout=0", "--max_steps=4"
    finish(start(2, compiled, [*PRETRAIN, *more, "--out=out/compiled"], float64=True),
           start(0, pretrain.main, [*PRETRAIN, *more, "--out=out/eager"], float64=True))
    assert_equal_runs("out/compiled", "out/eager", 1e-7)


def overflow(out):
    """Fine-tune in float16. In the first step the second of four micro-batches overflows."""
    def get(batches, step, micro):
        batch, weight = get_batch(batches, step, micro)
        return batch, weight * (1e30 if (step, micro) == (0, 1) else 1)

    get_batch, finetune.TrainingBatches.get = finetune.TrainingBatches.get, get
    finetune.main(["tune.py", "--init_from=out/resm_0", "--accumulation=4", "--max_steps=2",
                   "--train_examples=16", "--log_interval=1", "--dropout=0", "--warmup=0",
                   "--dtype=float16", f"--out={out}"])


def test_an_overflow_on_one_rank_leaves_out_the_step_on_all(compared, monkeypatch):
    """The second step moves weights and values by as much as in one process."""
    monkeypatch.chdir(compared)
    finish(*(start(world, overflow, f"out/float16_{world}") for world in (2, 0)))
    runs = "resm_0", "float16_2/seed0", "float16_0/seed0"
    before, ours, theirs = (read_weights(f"out/{run}")["weights"] for run in runs)
    for name in ("bert.layers.0.memory.values.weight", "bert.layers.1.up.weight"):
        moved = theirs[name] - before[name]
        assert 0 < moved.norm() and (ours[name] - theirs[name]).norm() < 1e-3 * moved.norm(), name
    for run in runs[1:]:
        first, second = [r["grad_norm"] for r in log(f"out/{run}") if "lr" in r]
        assert first is None and 0 < second < 100


def test_checkpoints_know_nothing_of_the_number_of_ranks(compared, monkeypatch):
    """Make steps by 1, 4, 3 and 1 processes, and compare them with 8 steps of one."""
    monkeypatch.chdir(compared)
    shutil.copytree("out/resm_0", "out/mixed")
    for step, world in ((2, 4), (4, 3), (6, 0)):
        for folder in Path("out/mixed").glob("step_*"):
            if int(folder.name[5:]) > step:
                shutil.rmtree(folder)
        finish(start(world, pretrain.main, [*PRETRAIN, "--out=out/mixed"], float64=True))
    assert_equal_runs("out/mixed", "out/resm_0", 1e-12)
    sizes = [[path.stat().st_size for path in sorted(Path(run).glob("step_*/*.pt"))]
             for run in ("out/resm_4", "out/resm_0")]
    assert len(sizes[0]) == 12 and np.allclose(*sizes, rtol=0.05)


def test_the_table_of_perplexities(compared, monkeypatch):
    monkeypatch.chdir(compared)
    finish(*(start(world, measure.main, [
        "table", "out/resm_0", "--data", "tiny", "--device", "cpu", "--out", f"table_{world}"],
        float64=True) for world in (2, 0)))
    tables = [json.loads(Path(f"table_{world}.json").read_text()) for world in (2, 0)]
    for where, distance, norm in differences(*tables):
        assert distance <= 1e-12 * norm, where


def one_signalled():
    for rank in range(2):
        assert any_signalled([15] if get_rank() == rank else [])
    assert not any_signalled([])


def test_a_signal_of_one_rank_is_a_signal_of_all():
    finish(start(2, one_signalled))


def mistake():
    """Make a mistake. A rank that sleeps is ended, as torchrun does."""
    sys.stderr = Path(f"said_{get_rank()}").open("w")  # noqa: SIM115
    time.sleep = lambda seconds: os.kill(os.getpid(), signal.SIGTERM)
    barrier()  # the ranks are connected before the first one ends
    pretrain.main(["tiny.py", "--accumulation=1"])


def test_a_mistake_is_one_line_of_rank_0(place):
    ranks = start(2, mistake)
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [2, -signal.SIGTERM]
    assert Path("said_0").read_text().startswith("error: accumulation = 1 ")
    assert not Path("said_1").read_text() and not Path("out/tiny").exists()


def children(pid):
    """Find the processes that a torchrun has started: {rank: pid}."""
    pids = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
        pids |= dict.fromkeys(ranks, int(child))
    return pids


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads Linux's /proc")
def test_kills_change_nothing(place):
    """Kill random ranks, and compare the run with one without kills, bit for bit.

    Every other kill comes while a checkpoint is written. torchrun then starts all ranks again. At
    last SIGTERM to torchrun lets the run save and end.
    """
    def wait_for(condition):
        while not condition():
            assert process.poll() is None, Path("output").read_text()
            time.sleep(0.0005)

    command = [*PRETRAIN, f"--max_steps={20 + 6 * KILLS}", "--eval_interval=50", "--out=out/killed"]
    every = [*command, "--checkpoint_interval=1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc_per_node={RANKS}", f"--max-restarts={KILLS}", ROOT / "pretrain.py",
                *every]
    rng, run, seen = random.Random(SEED), Path("out/killed"), 0
    with Path("output").open("w") as file, subprocess.Popen(  # a pipe would fill up
            torchrun, stdout=file, stderr=subprocess.STDOUT) as process:
        for number in range(KILLS):
            wait_for(lambda seen=seen: steps_saved(run) > seen)
            time.sleep(rng.random() * 0.2)  # at any point of a step
            if (number + KILLS) % 2:
                wait_for(lambda: list(run.glob(".tmp_step_*")))
                time.sleep(rng.random() * 0.003)
            os.kill(children(process.pid)[rng.randrange(RANKS)], signal.SIGKILL)
            seen = steps_saved(run) + 1
        wait_for(lambda: steps_saved(run) > seen)
        process.send_signal(signal.SIGTERM)
    output, seen = Path("output").read_text(), steps_saved(run)
    assert 0 < seen < 20 + 6 * KILLS and f"saved {run}/step_{seen:06d}; go on with" in output
    finish(start(RANKS, pretrain.main, every),
           start(RANKS, pretrain.main, [*command, "--checkpoint_interval=99", "--out=out/whole"]))
    assert_equal_runs(run, "out/whole", 0.0)
    assert not list(run.rglob(".tmp_*"))
