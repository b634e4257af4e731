"""
More than one process: the same run as of one, files that know nothing of their number, and kills.

$ PKM_TEST_KILLS=20 python -m pytest tests/test_ranks.py -k kill     # for 2 and 4 ranks, not 2 for 2
"""
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

import checkpoint
from tests.helpers import KILLS, ROOT, assert_same, log, steps_saved

SIZES = ["--accumulation=4", "--max_steps=20", "--n_layer=2", "--d_model=16", "--d_ff=32",
         "--memory_layers=1,2", "--eval_interval=10", "--usage_interval=20", "--log_interval=10",
         "--checkpoint_interval=5", "--keep_checkpoints=4"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def on_ranks(world, dtype, *commands):
    """Start the commands, each a list of words, one after the other in so many processes."""
    words = [word for command in commands for word in (*command, ",")]
    return subprocess.Popen([sys.executable, "-m", "tests.on_ranks", str(world), dtype, *words],
                            env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)


def finish(*processes):
    """Wait for them; what they wrote, (stdout, stderr) of each. All must have succeeded."""
    written = [process.communicate() for process in processes]
    assert not any(process.returncode for process in processes), written
    return written


def differences(a, b, where=""):
    """(name, distance, norm) of each pair of tensors and numbers; the rest must be equal."""
    if isinstance(a, dict | list | tuple):
        assert len(a) == len(b), where
        for key in a if isinstance(a, dict) else range(len(a)):
            yield from differences(a[key], b[key], f"{where}/{key}")
    elif torch.is_tensor(a) or isinstance(a, float):
        a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
        assert a.shape == b.shape, where
        yield where, (a - b).norm().item(), b.norm().item()
    else:
        assert a == b, where


def assert_equal_runs(ours, reference, tolerance):
    """The same log, last weights, optimizers and usage. A part whose gradient is 0 but for rounding
    (a bias before the batch norm, the keys' of attention) is measured against 1e-4."""
    def timeless(run):
        return [{k: v for k, v in r.items() if k not in ("tokens_per_s", "examples_per_s",
                                                        "elapsed")} for r in log(run)]

    pairs = [(timeless(ours), timeless(reference))]
    ends = [checkpoint.find_checkpoint(run) for run in (ours, reference)]
    assert ends[0].name == ends[1].name
    pairs += [[torch.load(end / name, weights_only=True) for end in ends]
              for name in ("model.pt", "optimizer.pt")]
    for part in pairs:
        for where, distance, norm in differences(*part):
            assert distance <= tolerance * max(norm, 1e-4), f"{where}: {distance / norm:.1e}"
    for file in Path(reference).glob("usage/*.npz"):
        counts, expected = np.load(Path(ours, *file.parts[-2:])), np.load(file)
        for name in expected:
            assert (counts[name] == expected[name]).all() and counts[name].sum() > 0


def runs(world):
    """The command lines of the runs that are compared, in folders that end with `world`."""
    def pretrain(name, *args):
        return ["pretrain.py", "tiny.py", *SIZES, f"--out=out/{name}_{world}", *args]

    return [pretrain("base", "--memory_layers="), pretrain("pkm", "--alpha=0"), pretrain("resm"),
            pretrain("pkm_init", "--alpha=0", "--init_from=out/base_0"),
            pretrain("resm_init", "--init_from=out/base_0"),
            ["finetune.py", "tune.py", f"--out=out/tuned_{world}", "--init_from=out/resm_0",
             "--accumulation=4", "--train_examples=43", "--epochs=2"],
            ["measure.py", "table", "out/resm_0", "--data", "tiny", "--batch_size", "2",
             "--device", "cpu", "--out", f"table_{world}"]]


@pytest.fixture(scope="module")
def compared(prepared, tmp_path_factory):
    """A folder with the runs in float64, of one process alone and of 1, 2 and 4 ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    (folder / "own").mkdir()
    words, rng = (folder / "tiny.txt").read_text().split()[6:], random.Random(1)
    for split, n in (("train", 50), ("dev", 11), ("test", 5)):
        rows = [rng.choices(words, k=rng.randrange(2, 6)) for _ in range(n)]
        rows = ["\t".join([" ".join(row), "animal" if set(row) & set(words[9:14]) else "none"]
                          [:1 if split == "test" else 2]) for row in rows]
        header = "sentence" if split == "test" else "sentence\tlabel"
        (folder / "own" / f"{split}.tsv").write_text("\n".join([header, *rows]) + "\n")
    (folder / "tune.py").write_text("task = 'own'\nmax_len = 32\nbatch_size = 8\nlr = 5e-3\n"
                                    "value_lr = 1e-2\nlog_interval = 5\ndevice = 'cpu'\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        finish(on_ranks(0, "float64", *runs(0)))
        finish(*(on_ranks(world, "float64", *runs(world)[world == 1:]) for world in (2, 4)))
    return folder


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["base", "pkm", "resm", "pkm_init", "resm_init", "tuned"])
def test_any_number_of_ranks_makes_the_same_run(compared, monkeypatch, name, world):
    """In float64, with dropout, 20 steps of 4 micro-batches; fine-tuning's last batch of an epoch
    has 3 examples for 4 ranks."""
    monkeypatch.chdir(compared)
    seed = "/seed0" if name == "tuned" else ""
    assert_equal_runs(f"out/{name}_{world}{seed}", f"out/{name}_0{seed}", 1e-12)
    if name == "tuned":
        for file in ("predictions.tsv", "submission/own.tsv"):
            assert (Path(f"out/tuned_{world}/seed0") / file).read_bytes() == (
                Path("out/tuned_0/seed0") / file).read_bytes()
        ours, one = (json.loads(Path(f"table_{n}.json").read_text()) for n in (world, 0))
        for where, distance, norm in differences(ours, one):
            assert distance <= 1e-12 * norm, where


def test_float32(compared, monkeypatch):
    monkeypatch.chdir(compared)
    for world in (0, 4):
        command = [*runs(world)[2][:-1], f"--out=out/single_{world}"]
        finish(on_ranks(world, "float32", [*command, "--memory_layers=1,2"]))
    assert_equal_runs("out/single_4", "out/single_0", 1e-5)


def test_checkpoints_know_nothing_of_the_number_of_ranks(compared, monkeypatch):
    """5 steps in one process, 5 more on 4 ranks, 5 on 2, 5 on 1: as 20 in one process."""
    monkeypatch.chdir(compared)
    mixed = Path("out/mixed")
    shutil.copytree("out/resm_0", mixed)
    for steps, world in ((5, 4), (10, 2), (15, 1)):
        for folder in mixed.glob("step_*"):
            if int(folder.name[5:]) > steps:
                shutil.rmtree(folder)
        finish(on_ranks(world, "float64", ["pretrain.py", "tiny.py", *SIZES, f"--out={mixed}"]))
    assert_equal_runs(mixed, "out/resm_0", 1e-12)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_value_table(compared, monkeypatch, world):
    """Sums, gradients, the update and its moments are columns of those of one process, and a rank
    sends as many bytes as the docstring says (see on_ranks.values)."""
    monkeypatch.chdir(compared)
    finish(on_ranks(world, "float32", ["values"], ["values", "even"], ["values", "frozen"],
                    ["values", "even", "bfloat16"]))


def test_a_mistake_is_one_line(compared, monkeypatch):
    """Of all ranks, or of one while the others wait; all end with status 2."""
    monkeypatch.chdir(compared)
    start, before = ["pretrain.py", "tiny.py", "--out=out/new"], set(Path().rglob("*"))
    mistakes = {("--accumulation=5",): "no multiple of the 2 ranks that torchrun started: 4 or 6",
                ("--accumulation=1",): "no multiple of the 2 ranks that torchrun started: 2 is",
                ("--d_model=21", "--n_head=3", "--accumulation=2"): "d_model = 21 cannot be cut",
                ("--acumulation=4",): "did you mean accumulation"}
    process = on_ranks(2, "float32", *([*start, *args] for args in mistakes),
                       ["one_mistaken", "0"], ["one_mistaken", "1"],
                       ["measure.py", "fill", "out/resm_0", "[MASK]"])
    output, errors = process.communicate()
    ended = [line for line in output.splitlines() if line.startswith("ended")]
    assert len(ended) == 7 and all(line.startswith("ended [2, 2]") for line in ended), output
    words = [*mistakes.values(), "of rank 0", "of rank 1", "one process does it"]
    lines = errors.splitlines()
    assert len(lines) == len(words), errors
    for line, part in zip(lines, words, strict=True):
        assert line.startswith("error: ") and part in line
    assert set(Path().rglob("*")) == before


def torchrun(world, *args):
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc_per_node={world}", "--max-restarts=100", str(ROOT / "pretrain.py"), "tiny.py",
         *SIZES[:6], "--eval_interval=50", "--checkpoint_interval=1", *args],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def children(pid):
    """{rank: pid} of the processes that a torchrun has started."""
    found = {}
    for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            environment = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
        found |= dict.fromkeys(ranks, int(number))
    return found


def wait_for_step(run, step, process):
    while steps_saved(run) < step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("world", [2, 4] if "PKM_TEST_KILLS" in os.environ else [2])
def test_kills_change_nothing(place, world):
    """SIGKILL of a random rank, every other time during the writing of a checkpoint; SIGSTOP, which
    the time-out ends; SIGTERM to torchrun, which saves. The end is bit for bit that of a run of as
    many ranks that nothing happened to."""
    kills = KILLS if "PKM_TEST_KILLS" in os.environ else 2
    steps = f"--max_steps={20 + 5 * kills}"
    rng, run, seen = random.Random(), Path("out/killed"), 0
    timeout = "--rank_timeout=5"
    with torchrun(world, steps, "--out=out/killed", timeout) as process:
        for number in range(kills):
            wait_for_step(run, seen + 1, process)
            time.sleep(rng.random() * 0.2)
            if number % 2:
                while not list(run.glob(".tmp_step_*")):
                    time.sleep(0.0005)
            victim = children(process.pid)[rng.randrange(world)]
            seen = steps_saved(run)
            os.kill(victim, signal.SIGKILL if number or kills > 2 else signal.SIGKILL)
        wait_for_step(run, seen + 2, process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    seen = steps_saved(run)
    assert 0 < seen < 20 + 5 * kills, output
    assert f"saved {run}/step_{seen:06d}" in output
    finish(on_ranks(world, "float32", [
        "pretrain.py", "tiny.py", *SIZES[:6], "--eval_interval=50", "--checkpoint_interval=1",
        steps, "--out=out/killed"]), on_ranks(world, "float32", [
            "pretrain.py", "tiny.py", *SIZES[:6], "--eval_interval=50", "--checkpoint_interval=100",
            steps, "--out=out/whole"]))
    assert_equal_runs(run, "out/whole", 0.0)
    assert not list(run.rglob(".tmp_*"))


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads Linux's /proc")
def test_a_rank_that_hangs_is_ended(place):
    """After rank_timeout seconds; torchrun, told to, starts all anew."""
