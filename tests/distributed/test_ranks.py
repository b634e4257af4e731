"""
Several processes make the run that one makes, write the same files, and survive kills.

$ PKM_TEST_KILLS=20 python -m pytest tests/distributed     # 20 kills, not 1, and more systems
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
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

from lib.distributed import run_ranks
from lib.run import Run
from tests.helpers import ROOT, log, steps_saved

KILLS = int(os.environ.get("PKM_TEST_KILLS", "1"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PRETRAIN = ["pretrain.py", "tiny.py", "--accumulation=4", "--max_steps=20", "--n_layer=2",
            "--d_model=16", "--d_ff=32", "--memory_layers=1,2", "--log_interval=10",
            "--usage_interval=20", "--eval_interval=10", "--keep_checkpoints=4",
            "--checkpoint_interval=5"]
SYSTEMS = {"base": ["--memory_layers="], "pkm": ["--alpha=0"], "resm": [],
           "pkm_init": ["--alpha=0", "--init_from=out/base_0"],
           "causal": ["--objective=causal"], "resm_init": ["--init_from=out/base_0"]}
COMPARED = [("base", 4), ("pkm", 2), ("causal", 2), ("resm", 4), ("pkm_init", 4), ("resm_init", 2),
            ("tuned", 2), ("tuned", 4)]
if "PKM_TEST_KILLS" in os.environ:
    COMPARED = [(name, world) for world in (2, 4) for name in (*SYSTEMS, "tuned")]


def on_ranks(*commands):
    """Start commands, (ranks, dtype, *words), that run one after the other: see on_ranks.py."""
    words = [str(word) for command in commands for word in (*command, ",")]
    return subprocess.Popen([sys.executable, "-m", "tests.distributed.on_ranks", *words],
                            env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)


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


def table(world, run="resm"):
    return (world, "float64", "measure.py", "table", f"out/{run}_0", "--data", "tiny",
            "--batch_size", "2", "--device", "cpu", "--out", f"table_{run}_{world}")


@pytest.fixture(scope="module")
def compared(prepared, tmp_path_factory):
    """Make a folder with runs of one process, out/<name>_0, and of 2 and 4 ranks."""
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
    resume = [*PRETRAIN, "--out=out/mixed"]
    mixed = [command for steps, world in ((5, 4), (10, 2), (15, 1)) for command in (
        (0, "float64", "rewind", "out/mixed", steps), (world, "float64", *resume))]
    values = [(world, "float32", "values", *words) for world, words in (
        (1, ["even"]), (2, []), (2, ["even"]), (2, ["frozen"]), (4, []), (4, ["even"]),
        (4, ["even", "bfloat16"]), (2, ["float16"]))]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("one.txt").write_text(finish(on_ranks(
            *(pretrain(name, 0) for name in SYSTEMS), finetune(0), table(0), table(0, "causal"))))
        shutil.copytree("out/resm_0", "out/mixed")
        wider = {world: [finetune(world) if name == "tuned" else pretrain(name, world)
                         for name, n in COMPARED if n == world] for world in (2, 4)}
        single = [(world, "float32", *PRETRAIN, f"--out=out/single_{world}") for world in (0, 4)]
        signals = [(2, "float32", "one_signalled", rank) for rank in range(2)]
        Path("ranks.txt").write_text(finish(
            on_ranks(*wider[2], *values, *signals, *single, table(2), table(2, "causal")),
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
    def timeless(run):
        return [{k: v for k, v in r.items() if k not in ("tokens_per_s", "examples_per_s",
                                                        "elapsed")} for r in log(run)]

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
    """In float64, with dropout, 20 steps of 4 micro-batches."""
    monkeypatch.chdir(compared)
    seed = "/seed0" if name == "tuned" else ""
    assert_equal_runs(f"out/{name}_{world}{seed}", f"out/{name}_0{seed}", 1e-12)
    if name == "tuned":
        for file in ("predictions_dev.tsv", "submission/own.tsv"):
            ours, one = (Path(f"out/tuned_{n}/seed0", file).read_bytes() for n in (world, 0))
            assert ours == one


def test_parameters_are_counted_as_of_one_process(compared):
    counts = [{line for line in (compared / name).read_text().splitlines() if "parameters" in line}
              for name in ("one.txt", "ranks.txt")]
    assert len(counts[1]) > len(SYSTEMS) and counts[1] <= counts[0]


def test_float32(compared, monkeypatch):
    monkeypatch.chdir(compared)
    assert_equal_runs("out/single_4", "out/single_0", 1e-5)


def test_checkpoints_know_nothing_of_the_number_of_ranks(compared, monkeypatch):
    """Steps of 1, 4, 2 and 1 processes equal 20 steps of one; file names and sizes are equal."""
    monkeypatch.chdir(compared)
    assert_equal_runs("out/mixed", "out/resm_0", 1e-12)
    sizes = [[path.stat().st_size for path in sorted(Path(run).glob("step_*/*.pt"))]
             for run in ("out/resm_4", "out/resm_0")]
    assert len(sizes[0]) == 12 and np.allclose(*sizes, rtol=0.01)


@pytest.mark.parametrize("run", ["resm", "causal"])
def test_the_table_of_perplexities(compared, monkeypatch, run):
    monkeypatch.chdir(compared)
    for where, distance, norm in differences(*(
            json.loads(Path(f"table_{run}_{world}.json").read_text()) for world in (2, 0))):
        assert distance <= 1e-12 * norm, where


def test_a_mistake_is_one_line(compared, monkeypatch):
    """All ranks end with status 2, even if one met the mistake and the others waited.

    A rank that hangs is a failure of the ranks that wait for it.
    """
    monkeypatch.chdir(compared)
    before = set(Path().rglob("*"))
    new = "pretrain.py", "tiny.py", "--out=out/new"
    mistakes = {(*new, "--accumulation=5"): "2 ranks that torchrun started: use --batch_size=1 "
                                            "--accumulation=10, which keep 10 sequences a step",
                (*new, "--accumulation=2", "--d_model=21", "--n_head=3"): "21 cannot be cut",
                (*new, "--acumulation=4"): "did you mean accumulation",
                ("finetune.py", "tune.py", "--init_from=out/resm_0"): "use --accumulation=2"}
    process = on_ranks(*((2, "float32", *words) for words in mistakes),
                       (2, "float32", "one_mistaken", 0), (2, "float32", "one_mistaken", 1),
                       (2, "float32", "measure.py", "fill", "out/resm_0", "[MASK]"),
                       (2, "float32", "hang"))
    output, errors = process.communicate()
    ended = [line for line in output.splitlines() if line.startswith("ended")]
    assert [line.split(":")[0] for line in ended] == ["ended [2, 2]"] * 7 + ["ended [1, 0]"]
    words = [*mistakes.values(), "of rank 0", "of rank 1", "one process does it", "1000ms"]
    lines = errors.splitlines()
    assert len(lines) == len(words), errors
    for line, word in zip(lines, words, strict=True):
        assert line.startswith("error: ") and word in line
    assert set(Path().rglob("*")) == before


def test_a_fault_of_the_code_keeps_its_cause(place):
    _, errors = on_ranks((1, "float32", "broken")).communicate()
    assert "ValueError: no compiler\n\nThe above exception was the direct cause" in errors
    assert errors.rstrip().endswith("RuntimeError: the compiler failed")


@pytest.mark.parametrize("late", [0, 1])
def test_all_ranks_save_when_the_clock_of_one_says_so(place, late):
    finish(on_ranks((2, "float32", "one_late", late, *PRETRAIN[1:], "--max_steps=6",
                     "--out=out/late", "--checkpoint_minutes=1", "--checkpoint_interval=99",
                     "--rank_timeout=60", "--eval_interval=99", "--log_interval=99")))
    saved = [int(path.name[5:]) for path in Run("out/late").checkpoints()]
    assert len(saved) == 4 and saved[-1] == 6


def torchrun(*args, **settings):
    """Start torchrun with two ranks, as a person does."""
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone",
                             "--nproc_per_node=2", *args], env=ENVIRONMENT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **settings)


def test_torchruns_report_ends_with_our_line(place):
    with torchrun(ROOT / "pretrain.py", "tiny.py", "--accumulation=1", "--batch_size=4") as process:
        output, _ = process.communicate()
    assert process.returncode == 1
    *_, line, rule = output.splitlines()
    assert "error: accumulation = 1 is not a multiple" in line and set(rule) == {"="}
    assert line.endswith("use --batch_size=2 --accumulation=2, which keep 4 sequences a step")


def test_torchruns_report_ends_with_the_line_of_a_rank_that_crashed(place):
    """A rank may abort while the ranks agree on who prints. Its line is written before."""
    Path("crash.py").write_text("import os\nfrom lib.errors import UserError\n"
                                "from lib import distributed as processes\n"
                                "processes._all_reduce_max = lambda *code: os.abort()\n"
                                "def main(argv=None): raise UserError('a wrong word')\n"
                                "processes.run_ranks(main)\n")
    with torchrun("crash.py") as process:
        output, _ = process.communicate()
    assert process.returncode == 1
    assert output.splitlines()[-2].endswith("error: a wrong word")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads Linux's /proc")
def test_sigusr1_lets_the_ranks_save_and_end(place):
    """The signal reaches torchrun, which was started with SIGUSR1 ignored, and one rank. torchrun
    neither dies nor starts the ranks again: status 0."""
    command = [ROOT / PRETRAIN[0], *PRETRAIN[1:], "--max_steps=99999", "--checkpoint_interval=1",
               "--eval_interval=99999", "--out=out/run"]
    with torchrun("--max-restarts=3", *command, preexec_fn=lambda: signal.signal(
            signal.SIGUSR1, signal.SIG_IGN)) as process:
        while not steps_saved("out/run"):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGUSR1)
        os.kill(children(process.pid)[1], signal.SIGUSR1)
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert output.count(f"saved out/run/step_{steps_saved('out/run'):06d}; go on with: python") == 1
    assert "going on from" not in output


@pytest.mark.parametrize("cards, gpu", [(0, "gloo"), (2, "nccl")])
def test_ranks_with_cards_also_exchange_tensors_on_the_cpu(monkeypatch, cards, gpu):
    """Signals, sizes and counts are on the CPU. A rank needs a backend for both."""
    class Asked(Exception):
        pass

    def ask(backend="undefined", **more):
        raise Asked(backend)

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.cuda, "set_device", lambda card: None)
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", ask)
    with pytest.raises(Asked) as asked:
        run_ranks(None)
    backends = BackendConfig(Backend(str(asked.value))).get_device_backend_map()
    assert (backends["cpu"], backends["cuda"]) == ("gloo", gpu)


def children(pid):
    """Find the processes that a torchrun has started: {rank: pid}."""
    pids = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
        pids |= dict.fromkeys(ranks, int(child))
    return pids


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("world", [2, 4] if KILLS > 1 else [2])
def test_kills_change_nothing(place, world):
    """After kills the run is bit for bit the same as without kills.

    SIGKILL hits a random rank, every other time while a checkpoint is written. torchrun then starts
    all ranks again. At last SIGTERM to torchrun lets the run save and end.
    """
    def wait_for(condition):
        while not condition():
            assert process.poll() is None, process.communicate()
            time.sleep(0.0005)

    def saving():
        return list(run.glob(".tmp_step_*"))

    command = [*PRETRAIN, f"--max_steps={20 + 6 * KILLS}", "--eval_interval=50", "--out=out/killed"]
    every = [*command, "--checkpoint_interval=1"]
    rng, run, seen = random.Random(), Path("out/killed"), 0
    with subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone",
                           f"--nproc_per_node={world}", f"--max-restarts={KILLS}",
                           ROOT / every[0], *every[1:]], env=ENVIRONMENT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        for number in range(KILLS):
            wait_for(lambda seen=seen: steps_saved(run) > seen)
            time.sleep(rng.random() * 0.2)  # at any point of a step
            if (number + KILLS) % 2:
                wait_for(saving)
                time.sleep(rng.random() * 0.003)
            os.kill(children(process.pid)[rng.randrange(world)], signal.SIGKILL)
            seen = steps_saved(run) + 1
        wait_for(lambda: steps_saved(run) > seen)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
    seen = steps_saved(run)
    assert 0 < seen < 20 + 6 * KILLS and f"saved {run}/step_{seen:06d}; go on with" in output
    finish(on_ranks((world, "float32", *every),
                    (world, "float32", *command, "--checkpoint_interval=99", "--out=out/whole")))
    assert_equal_runs(run, "out/whole", 0.0)
    assert not list(run.rglob(".tmp_*"))
