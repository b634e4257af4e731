"""
Share one run among several processes, which make what one makes, and survive kills.

$ PKM_TEST_KILLS=20 PKM_TEST_SEED=1 python -m pytest tests/test_ranks.py     # 20 kills, not 1
"""
import collections
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import tqdm

import finetune
import measure
import pretrain
from lib.ranks import Progress, any_signalled, barrier, get_rank, get_world_size
from lib.run import Run
from lib.sharding import ShardedValueTable, columns, cut_moments
from lib.weights import read_weights
from pkm import LazyAdam, ValueTable
from tests.helpers import ROOT, log, seeded_kills, steps_saved, write_tasks
from tests.on_ranks import finish, start

KILLS = int(os.environ.get("PKM_TEST_KILLS", "1"))
PRETRAIN = ["tiny.py", "--accumulation=4", "--max_steps=8", "--n_layer=2", "--d_model=16",
            "--d_ff=32", "--memory_layers=1,2", "--log_interval=2", "--usage_interval=8",
            "--eval_interval=8", "--keep_checkpoints=4", "--checkpoint_interval=2"]
SYSTEMS = {"base": ["--memory_layers="], "pkm": ["--alpha=0", "--objective=causal"], "resm": [],
           "resm_init": ["--init_from=out/base_0"]}
COMPARED = [("base", 2), ("pkm", 2), ("resm", 4), ("resm_init", 4), ("tuned", 4)]


def start_run(name, world):
    """Start a training of SYSTEMS, or a fine-tuning that starts from resm.

    It has 43 examples: the last batch of an epoch has 3 for 4 micro-batches.
    """
    out = f"--out=out/{name}_{world}"
    if name == "tuned":
        return start(world, finetune.main, [
            "tune.py", "--init_from=out/resm_0", "--accumulation=4", "--train_examples=43",
            "--epochs=2", out], float64=True)
    return start(world, pretrain.main, [*PRETRAIN, *SYSTEMS[name], out], float64=True)


@pytest.fixture(scope="module")
def compared(prepared, tmp_path_factory):
    """Make a folder with runs of one process, out/<name>_0, and of 2 and 4 ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_tasks(train_examples=50)
        Path("tune.py").write_text("task = 'own'\nmax_len = 32\nbatch_size = 8\nlr = 5e-3\n"
                                   "value_lr = 1e-2\nlog_interval = 5\ndevice = 'cpu'\n")
        for runs in (COMPARED[:3], COMPARED[3:]):  # the last ones start from the first
            finish(*(start_run(name, n) for name, world in runs for n in (0, world)))
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

    ends = [Run(run).newest_checkpoint() or Path(run, "best") for run in (ours, reference)]
    assert ends[0].name == ends[1].name
    pairs = {name: [torch.load(end / f"{name}.pt", weights_only=True) for end in ends]
             for name in ("model", "optimizer") if (ends[0] / f"{name}.pt").exists()}
    for model in pairs["model"]:
        del model["sha256"]  # of weights that are rounded otherwise
    pairs["log"] = timeless(ours), timeless(reference)
    sums = collections.defaultdict(lambda: np.zeros(2))
    for name, pair in pairs.items():
        for where, *squares in differences(*pair):
            _, first, *_, last = where.split("/")
            kind = {"model": "running" in last, "optimizer": (first, last), "log": where}[name]
            sums[name, kind] += np.square(squares)
    for kind, (distance, norm) in sums.items():
        assert distance <= tolerance**2 * norm, f"{kind}: {(distance / norm)**0.5:.1e}"
    assert ("optimizer", ("values", "exp_avg_sq")) in sums or str(ours).startswith(
        ("out/base", "out/tuned"))
    for file in Path(reference).glob("usage/*.npz"):
        counts, expected = np.load(Path(ours, *file.parts[-2:])), np.load(file)
        for name in expected:
            assert (counts[name] == expected[name]).all() and counts[name].sum() > 0


@pytest.mark.parametrize("name, world", COMPARED)
def test_any_number_of_ranks_makes_the_same_run(compared, monkeypatch, name, world):
    """Make 8 steps of 4 micro-batches, in float64, with dropout."""
    monkeypatch.chdir(compared)
    seed = "/seed0" if name == "tuned" else ""
    assert_equal_runs(f"out/{name}_{world}{seed}", f"out/{name}_0{seed}", 1e-12)


def overflow(out):
    """Fine-tune in float16. The first step overflows at a scale of 2^30, the second has 2^15."""
    torch.amp.GradScaler = functools.partial(
        torch.amp.GradScaler, init_scale=2.0**30, backoff_factor=2.0**-15)
    finetune.main(["tune.py", "--init_from=out/resm_0", "--accumulation=4", "--max_steps=2",
                   "--train_examples=16", "--log_interval=1", "--dropout=0", "--warmup=0",
                   "--dtype=float16", f"--out={out}"])


def test_float16_leaves_out_the_same_step_on_all_ranks(compared, monkeypatch):
    """After it the second step is the first one, and moves the values, too."""
    monkeypatch.chdir(compared)
    finish(*(start(world, overflow, f"out/float16_{world}") for world in (2, 0)))
    runs = "resm_0", "float16_2", "float16_0"
    before, ours, theirs = (read_weights(f"out/{run}")["weights"] for run in runs)
    for name in ("bert.layers.0.memory.values.weight", "bert.layers.1.up.weight"):
        moved = theirs[name] - before[name]
        assert 0 < (ours[name] - theirs[name]).norm() < 0.05 * moved.norm(), name
    for run in runs[1:]:
        first, second = [r["grad_norm"] for r in log(f"out/{run}/seed0") if "lr" in r]
        assert first is None and 0 < second < 100


def test_checkpoints_know_nothing_of_the_number_of_ranks(compared, monkeypatch):
    """Make steps by 1, 4, 2 and 1 processes, and compare them with 8 steps of one."""
    monkeypatch.chdir(compared)
    shutil.copytree("out/resm_0", "out/mixed")
    for step, world in ((2, 4), (4, 2), (6, 0)):
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


def sharded_table(kinds):
    """Compare a lookup and an update with a whole table's, and count the bytes sent.

    kinds: 'even' gives each rank 3 tokens, otherwise they have 5, 0, 7 and 5. 'bfloat16' is the
    dtype that travels. 'frozen' freezes the table.
    """
    world, rank, reads, dim = get_world_size(), get_rank(), 6, 16
    tokens = [3] * world if "even" in kinds else [5, 0, 7, 5][:world]
    dtype = torch.bfloat16 if "bfloat16" in kinds else torch.float32
    torch.manual_seed(0)
    whole = ValueTable(100, dim)
    whole.learns = "frozen" not in kinds
    before, state = whole.weight.clone(), torch.get_rng_state()
    ours = ShardedValueTable(whole)
    assert torch.equal(ours.weight, columns(before)) and torch.equal(state, torch.get_rng_state())
    first, last = sum(tokens[:rank]), sum(tokens[:rank + 1])
    slots = torch.randint(100, (sum(tokens), 2, 3), dtype=torch.int32)
    weights = torch.rand(sum(tokens), 2, 3).requires_grad_()
    grad = torch.randn(sum(tokens), dim).to(dtype)
    expected = whole(slots, weights.to(dtype).float(), dtype)  # as they travel
    expected.backward(grad)

    sent, send = [], dist.all_to_all_single

    def counted(out, x, received=None, sizes=None, **more):
        if sizes:
            others = len(x) - sizes[rank]
            sent.append(others * x[0].nbytes if len(x) else 0)
        return send(out, x, received, sizes, **more)

    dist.all_to_all_single = counted
    own = weights.detach()[first:last].requires_grad_()
    sums = ours(slots[first:last], own, dtype)
    forward = sum(sent)
    sums.backward(grad[first:last])
    backward, size = sum(sent) - forward, torch.empty(0, dtype=dtype).element_size()
    if "even" in kinds:  # the formula of ShardedValueTable's docstring
        assert forward == (world - 1) * 3 * ((4 + size) * reads + size * dim // world)
        assert backward == (world - 1) * 3 * (size * reads + size * dim // world)
    assert sums.dtype == dtype and torch.equal(sums, expected[first:last])
    near = 1e-5 if dtype == torch.float32 else 2**-6  # each rank's part was rounded
    torch.testing.assert_close(own.grad, weights.grad[first:last], rtol=near, atol=near)
    whole.replicated = False  # every rank has all reads of the whole table already
    adams = [LazyAdam([table], lr=0.1) for table in (ours, whole)]
    for adam in adams:
        adam.step(grad_scale=2.0**16)
    torch.testing.assert_close(ours.weight, columns(whole.weight), rtol=1e-6, atol=1e-6)
    assert ("frozen" in kinds) == torch.equal(whole.weight, before)
    cut = cut_moments(adams[1].state_dict())["state"]
    for state, expected in zip(adams[0].state.values(), cut.values(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):  # a rank has 1 / world of the moments
            assert state[key].shape == (100, dim // world)
            torch.testing.assert_close(state[key], expected[key], rtol=1e-5, atol=0)


@pytest.mark.parametrize("world, kinds", [(2, []), (2, ["even"]), (2, ["frozen"]), (4, []),
                                          (4, ["even", "bfloat16"])])
def test_a_table_on_several_ranks_is_the_whole_one(world, kinds):
    finish(start(world, sharded_table, kinds))


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
    assert not Path("said_1").read_text() and not Path("out").exists()


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
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                f"--max-restarts={KILLS}", ROOT / "pretrain.py", *every]
    rng, run, seen = seeded_kills(), Path("out/killed"), 0
    with Path("output").open("w") as file, subprocess.Popen(  # a pipe would fill up
            torchrun, stdout=file, stderr=subprocess.STDOUT) as process:
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
    output, seen = Path("output").read_text(), steps_saved(run)
    assert 0 < seen < 20 + 6 * KILLS and f"saved {run}/step_{seen:06d}; go on with" in output
    finish(start(2, pretrain.main, every),
           start(2, pretrain.main, [*command, "--checkpoint_interval=99", "--out=out/whole"]))
    assert_equal_runs(run, "out/whole", 0.0)
    assert not list(run.rglob(".tmp_*"))


def test_progress_on_a_pipe_is_shown_now_and_then(capsys, monkeypatch):
    """Show it on a terminal again and again."""
    clock = itertools.count(step=4)
    monkeypatch.setattr(tqdm.std, "time", lambda: float(next(clock)))
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    assert list(Progress(range(10), "reading")) == list(range(10))
    assert 2 <= capsys.readouterr().err.count("\rreading: ") <= 5
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    list(Progress(range(10), "reading"))
    assert capsys.readouterr().err.count("\rreading: ") > 5
