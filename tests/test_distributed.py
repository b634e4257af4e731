"""
Several processes make the run that one makes, write the same files, and survive kills.

$ PKM_TEST_KILLS=20 python -m pytest tests/test_distributed.py     # 20 kills, not 1
"""
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lib.run import Run
from tests.helpers import ROOT, log, steps_saved

KILLS = int(os.environ.get("PKM_TEST_KILLS", "1"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PRETRAIN = ["pretrain.py", "tiny.py", "--accumulation=4", "--max_steps=12", "--n_layer=2",
            "--d_model=16", "--d_ff=32", "--memory_layers=1,2", "--log_interval=4",
            "--usage_interval=12", "--eval_interval=6", "--keep_checkpoints=4",
            "--checkpoint_interval=3"]
SYSTEMS = {"base": ["--memory_layers="], "pkm": ["--alpha=0"], "resm": [],
           "causal": ["--objective=causal"], "resm_init": ["--init_from=out/base_0"]}
COMPARED = [("base", 2), ("pkm", 2), ("causal", 2), ("resm", 4), ("resm_init", 4), ("tuned", 4)]


def on_ranks(*commands):
    """Start commands, (ranks, dtype, *words), that run one after the other: see on_ranks.py."""
    words = [str(word) for command in commands for word in (*command, ",")]
    return subprocess.Popen([sys.executable, "-m", "tests.on_ranks", *words], env=ENVIRONMENT,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(*processes):
    """Wait for processes, which must succeed. Returns what they printed."""
    outputs = [process.communicate() for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return "".join(output for output, _ in outputs)


def pretrain(name, world, dtype="float64"):
    return world, dtype, *PRETRAIN, *SYSTEMS[name], f"--out=out/{name}_{world}"


def finetune(world):
    """Fine-tune with 43 examples: the last batch of an epoch has 3 for 4 micro-batches."""
    return (world, "float64", "finetune.py", "tune.py", "--init_from=out/resm_0",
            "--accumulation=4", "--train_examples=43", "--epochs=2", f"--out=out/tuned_{world}")


def table(world):
    return (world, "float64", "measure.py", "table", "out/resm_0", "--data", "tiny",
            "--device", "cpu", "--out", f"table_{world}")


def write_task(words):
    """Write own/train.tsv and own/dev.tsv, sentences of two classes."""
    rng = random.Random(1)
    Path("own").mkdir()
    for split, n in (("train", 50), ("dev", 11)):
        lines = ["sentence\tlabel"]
        for _ in range(n):
            row = rng.choices(words, k=rng.randrange(2, 6))
            lines.append(" ".join(row) + "\t" + ("x" if set(row) & set(words[9:14]) else "y"))
        Path("own", f"{split}.tsv").write_text("\n".join(lines) + "\n")
    Path("tune.py").write_text("task = 'own'\nmax_len = 32\nbatch_size = 8\nlr = 5e-3\n"
                               "value_lr = 1e-2\nlog_interval = 5\ndevice = 'cpu'\n")


@pytest.fixture(scope="module")
def compared(prepared, tmp_path_factory):
    """Make a folder with runs of one process, out/<name>_0, and of 2 and 4 ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    values = [(world, "float32", "values", *words) for world, words in (
        (2, []), (2, ["even"]), (2, ["frozen"]), (4, []), (4, ["even", "bfloat16"]))]
    signals = [(2, "float32", "one_signalled", rank) for rank in range(2)]
    resume = [*PRETRAIN, "--out=out/mixed"]
    mixed = []
    for step, world in ((3, 4), (6, 2), (9, 1)):
        mixed += [(0, "float64", "rewind", "out/mixed", step), (world, "float64", *resume)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_task(Path("tiny.txt").read_text().split()[6:])
        Path("one.txt").write_text(finish(on_ranks(*(pretrain(name, 0) for name in SYSTEMS),
                                                   finetune(0), table(0))))
        shutil.copytree("out/resm_0", "out/mixed")
        wider = {world: [finetune(world) if name == "tuned" else pretrain(name, world)
                         for name, n in COMPARED if n == world] for world in (2, 4)}
        Path("ranks.txt").write_text(finish(on_ranks(*wider[2], *values, *signals, table(2)),
                                            on_ranks(*wider[4], *mixed)))
    return folder


def differences(a, b, where=""):
    """Yield (name, distance, norm) for each pair of tensors or floats; the rest must be equal."""
    if isinstance(a, dict | list | tuple):
        assert len(a) == len(b), where
        for key in a if isinstance(a, dict) else range(len(a)):
            yield from differences(a[key], b[key], f"{where}/{key}")
    elif torch.is_tensor(a) or isinstance(a, float):
        a, b = (torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in (a, b))
        assert a.shape == b.shape, where
        yield where, (a - b).norm().item(), b.norm().item()
    else:
        assert a == b, where


def assert_equal_runs(ours, reference, tolerance):
    """Compare log, last weights, moments and usage.

    All weights are compared by one norm, and so is each kind of moment. A gradient that is 0 except
    for rounding, as of a bias before a batch norm, has no meaningful norm.
    """
    speed = "tokens_per_s", "examples_per_s", "elapsed"

    def timeless(run):
        return [{k: v for k, v in r.items() if k not in speed} for r in log(run)]

    ends = [Run(run).newest_checkpoint() for run in (ours, reference)]
    assert ends[0].name == ends[1].name
    pairs = {name: [torch.load(end / f"{name}.pt", weights_only=True) for end in ends]
             for name in ("model", "optimizer")}
    pairs["log"] = timeless(ours), timeless(reference)
    sums = collections.defaultdict(lambda: np.zeros(2))
    for name, pair in pairs.items():
        for where, *squares in differences(*pair):
            _, first, *_, last = where.split("/")
            kind = {"model": "running" in last, "optimizer": (first, last), "log": where}[name]
            sums[name, kind] += np.square(squares)
    for kind, (distance, norm) in sums.items():
        assert distance <= tolerance**2 * norm, f"{kind}: {(distance / norm)**0.5:.1e}"
    assert ("optimizer", ("values", "exp_avg_sq")) in sums or "base" in str(ours)
    for file in Path(reference).glob("usage/*.npz"):
        counts, expected = np.load(Path(ours, *file.parts[-2:])), np.load(file)
        for name in expected:
            assert (counts[name] == expected[name]).all() and counts[name].sum() > 0


@pytest.mark.parametrize("name, world", COMPARED)
def test_any_number_of_ranks_makes_the_same_run(compared, monkeypatch, name, world):
    """In float64, with dropout, 12 steps of 4 micro-batches."""
    monkeypatch.chdir(compared)
    seed = "/seed0" if name == "tuned" else ""
    assert_equal_runs(f"out/{name}_{world}{seed}", f"out/{name}_0{seed}", 1e-12)


def test_parameters_are_counted_as_of_one_process(compared):
    counts = [{line for line in (compared / name).read_text().splitlines() if "parameters" in line}
              for name in ("one.txt", "ranks.txt")]
    assert len(counts[1]) > 2 and counts[1] <= counts[0]


def test_checkpoints_know_nothing_of_the_number_of_ranks(compared, monkeypatch):
    """Steps of 1, 4, 2 and 1 processes equal 12 steps of one; file names and sizes are equal."""
    monkeypatch.chdir(compared)
    assert_equal_runs("out/mixed", "out/resm_0", 1e-12)
    sizes = [[path.stat().st_size for path in sorted(Path(run).glob("step_*/*.pt"))]
             for run in ("out/resm_4", "out/resm_0")]
    assert len(sizes[0]) == 12 and np.allclose(*sizes, rtol=0.05)


def test_the_table_of_perplexities(compared, monkeypatch):
    monkeypatch.chdir(compared)
    tables = [json.loads(Path(f"table_{world}.json").read_text()) for world in (2, 0)]
    for where, distance, norm in differences(*tables):
        assert distance <= 1e-12 * norm, where


def torchrun(world, *args):
    """Start torchrun, as a person does."""
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone",
                             f"--nproc_per_node={world}", *args], env=ENVIRONMENT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_a_mistake_is_one_line_of_rank_0(place):
    before = set(Path().rglob("*"))
    with torchrun(2, ROOT / "pretrain.py", "tiny.py", "--accumulation=1") as process:
        output, _ = process.communicate()
    assert process.returncode == 1
    assert output.count("error: accumulation = 1 is not a multiple of the 2 ranks") == 1
    assert set(Path().rglob("*")) == before


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
    """After kills the run is bit for bit the same as without kills.

    SIGKILL hits a random rank, every other time while a checkpoint is written. torchrun then starts
    all ranks again. At last SIGTERM to torchrun lets the run save and end.
    """
    def wait_for(condition):
        while not condition():
            assert process.poll() is None, process.communicate()
            time.sleep(0.0005)

    command = [*PRETRAIN, f"--max_steps={20 + 6 * KILLS}", "--eval_interval=50", "--out=out/killed"]
    every = [*command, "--checkpoint_interval=1"]
    rng, run, seen = random.Random(), Path("out/killed"), 0
    with torchrun(2, f"--max-restarts={KILLS}", ROOT / every[0], *every[1:]) as process:
        for number in range(KILLS):
            wait_for(lambda seen=seen: steps_saved(run) > seen)
            time.sleep(rng.random() * 0.2)  # at any point of a step
            if (number + KILLS) % 2:
                wait_for(lambda: list(run.glob(".tmp_step_*")))
                time.sleep(rng.random() * 0.003)
            os.kill(children(process.pid)[rng.randrange(2)], signal.SIGKILL)
            seen = steps_saved(run) + 1
        wait_for(lambda: steps_saved(run) > seen)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
    seen = steps_saved(run)
    assert 0 < seen < 20 + 6 * KILLS and f"saved {run}/step_{seen:06d}; go on with" in output
    finish(on_ranks((2, "float32", *every),
                    (2, "float32", *command, "--checkpoint_interval=99", "--out=out/whole")))
    assert_equal_runs(run, "out/whole", 0.0)
    assert not list(run.rglob(".tmp_*"))
