"""
Try this code on a card, and write a page of the outcome.

$ sh results/gpu.sh                # a CUDA card; 30 minutes at most
$ sh results/gpu.sh --small        # any machine: the same steps at tiny sizes, in minutes
$ sh results/gpu.sh --out FOLDER   # where the page goes; default: results/

The page, gpu_<card>.md, is written again after each step. A trial that is stopped leaves one too.
The trained models stay in out/gpu_trial until the next trial. The exit status is the number of
steps that failed.
"""
import importlib.util
import math
import os
import platform
import re
import shutil
import signal
import subprocess
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import torch

from lib.common.device import choose_device
from lib.common.errors import UserError, run_main
from lib.common.progress import markdown
from lib.common.provenance import git_commit
from lib.common.settings import Parser
from lib.common.timing import read_proc
from lib.weights.run import Run, read_state
from results.trial import ROOT, Step, run_steps, write_page

MINUTES, RUNS = 30, "out/gpu_trial"
README = "39.35", "29.80"  # test perplexity of the demo without and with memory, on a CPU
SHOWN = (r"^device |perplexity \d|^going on|^killed|^done|^skipped|warm-up|^copy bandwidth|^equal"
         r"|\d (passed|failed)|^\S.*Warning: ")
RUN_NAMES = "base", "float32", "bfloat16", "float16", "cpu", "resumed", "ranks"
MEMORY = f"pretrain.py configs/demo_resm_init.py --init_from={RUNS}/base --out={RUNS}/"
SHORT = " --dtype=float32 --max_steps=300 --warmup_steps=30 --lr=1e-3 --checkpoint_interval=100"
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node=2 "
SMALL = {  # options of --small, by the beginning of a command; they replace earlier ones
    "pretrain.py": "--max_steps=20 --warmup_steps=5 --eval_sequences=64 --log_interval=5 "
                   "--checkpoint_interval=10",
    "measure.py": "--sequences 20",
    "bench.py layer": "--tokens 128 --n_keys 64 --rounds 2",
    "bench.py train": "--systems +ResM --size demo --length 32 --batch_size 2 --rounds 2",
    "bench.py inference": "--sizes demo --lengths 32 --n_keys 64 --rounds 2",
    "bench.py causal": "--size demo --layers 2 --length 32 --lengths 32 --batch_size 2 --rounds 2",
    "bench.py causal --slots": "--slots 32 64 --size demo --layers 2 --lengths 32 --rounds 2",
    "bench.py against": "--size demo --length 32 --lengths 32 --batch_size 2 --rounds 2",
    "-m pytest": "test_pkm.py"}


def plan():
    """List the steps. The first ones tell most of a card."""
    def memory(name, options, **more):
        return Step(f"memory, {name}", 4, f"{MEMORY}{name}{options}", **more)

    return [
        Step("brute force", 3, "results/gpu_checks.py brute_force", "float64",
             "`test_pkm.py`, with the tensors of its tests on the device."),
        Step("no memory, float32", 5, "pretrain.py configs/demo.py --dtype=float32 "
             f"--out={RUNS}/base", check=partial(loss_falls, "base")),
        *[memory(dtype, f" --dtype={dtype}", check=partial(loss_falls, dtype),
                 needs="CUDA" * (dtype == "float16"))
          for dtype in ("float32", "bfloat16", "float16")],
        Step("test perplexity", 3, f"measure.py table {RUNS}/base {RUNS}/float32 --data docs",
             note=f"README has {' and '.join(README)}, on a CPU with other docstrings."),
        memory("cpu", " --device=cpu" + SHORT, note="For comparison with the next run."),
        memory("resumed", " --compile=off" + SHORT, kill_at=f"{RUNS}/resumed/step_*",
               check=partial(is_near_the_cpu, "resumed")),
        Step("one layer", 4, "bench.py layer", note="`bench.py` says what the last column is."),
        Step("one layer, by operation", 3, "bench.py layer --rounds 1 --tokens 8192", show="^ .*%"),
        Step("training, compiled", 5, "bench.py train --compile on"),
        Step("training, eager", 3, "bench.py train --compile off"),
        Step("inference, compiled", 5, "bench.py inference --compile on --sizes base "
             "--lengths 128"),
        Step("inference, eager", 3, "bench.py inference --compile off"),
        Step("causal", 4, "bench.py causal --compile off"),
        Step("causal, by slots", 3, "bench.py causal --slots"),
        Step("beside transformers", 3, "bench.py against_transformers", "transformers"),
        Step("2 ranks, cut tables", 4, f"{TORCHRUN}{MEMORY}ranks --batch_size=16 --accumulation=2"
             + SHORT, "2 cards", check=partial(is_near_the_cpu, "ranks")),
        Step("2 ranks, training", 3, TORCHRUN + "bench.py train --systems +ResM", "2 cards"),
        Step("2 ranks, whole tables", 2, TORCHRUN + "results/gpu_checks.py replicated", "2 cards",
             "`DistributedDataParallel`, beside one process."),
        Step("test suite", 10, "-m pytest -q -p no:cacheprovider", note="It runs on the CPU.")]


def adapt(step, machine, small):
    """Leave a step out if the machine lacks what it needs. Add options to its command: sizes, and
    the dtype of an old card, as bench.py does not train in float16."""
    if step.needs and step.needs not in machine["has"]:
        step.result = f"left out: needs {step.needs}"
    command = step.command.removeprefix(TORCHRUN)
    if re.match("bench.py (train|causal|against)", command) and "bfloat16" not in machine["has"]:
        step.command += " --dtype float32"
    if begins := [begin for begin in SMALL if small and command.startswith(begin)]:
        step.command += " " + SMALL[max(begins, key=len)]


def describe_machine():
    """Describe a machine: its device, what it "has" of the steps' needs, "facts" for the page. It
    is called in a process of its own, which does not keep the card's memory."""
    device, *_ = choose_device()
    cpu = read_proc("cpuinfo", "model name") or platform.machine()
    has = {"transformers"} if importlib.util.find_spec("transformers") else set()
    if device.type == "cuda":
        card, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
        has |= {"CUDA", "float64", "bfloat16" * (card.major >= 8), "2 cards" * (count > 1)}
        driver = shutil.which("nvidia-smi") and subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=False).stdout.partition("\n")[0]
        gigabytes = f"{card.total_memory / 2**30:.1f} GiB"
        facts = {"card": card.name, "cards": count, "memory": gigabytes,
                 "compute capability": f"{card.major}.{card.minor}", "driver": driver or "unknown",
                 "CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version(), "CPU": cpu}
    else:
        has |= {"bfloat16"} | ({"float64", "2 cards"} if device.type == "cpu" else set())  # gloo
        facts = {"card": cpu if device.type == "cpu" else "Apple GPU"}
    facts |= {"cores": os.cpu_count(), "torch": torch.__version__,
              "Python": platform.python_version(), "system": platform.platform(),
              "commit": git_commit()}
    return {"device": device.type, "has": has, "facts": facts}


def read_log(run):
    """Read a run's log. Returns its records of training steps, and its evaluations."""
    records = Run(ROOT / RUNS / run).records()
    return ([record for record in records if "lr" in record],
            [record for record in records if "perplexity" in record])


def loss_falls(run):
    first, *_, last = (record["loss"] for record in read_log(run)[0])
    return "" if last < first else f"loss goes from {first:.3f} to {last:.3f}"


def is_near_the_cpu(run):
    ours, cpu = (read_log(name)[1][-1]["perplexity"] for name in (run, "cpu"))
    return "" if abs(ours / cpu - 1) < 0.05 else f"perplexity is {ours:.2f}, on the CPU {cpu:.2f}"


def table_of_runs():
    """Make a table of the training runs so far. float16's scaler halves its scale, at first 65,536,
    when it skips a step. It would double it after 2,000 steps."""
    rows = []
    for name in RUN_NAMES:
        checkpoint = (run := Run(ROOT / RUNS / name)).newest_checkpoint()
        steps, evaluations = read_log(name) if checkpoint else ([], [])
        if steps:  # none if it was stopped before its first record
            settings, scaler = run.settings(), read_state(checkpoint)["scaler"]
            skipped = f"{16 - math.log2(scaler['scale'] or 2**-149):.0f}" if scaler else "-"
            rows.append([name, *(settings[key] for key in ("device", "dtype", "ranks")),
                         f"{steps[-1]['step']:,}",
                         f"{median(step['tokens_per_s'] for step in steps):,.0f}",
                         *(f"{step['loss']:.3f}" for step in (steps[0], steps[-1])),
                         evaluations[-1]["perplexity"], skipped])
    header = ["run", "device", "dtype", "ranks", "steps", "tokens/s", "first loss", "last loss",
              "perplexity", "skipped"]
    return rows and ("Training runs. Perplexity: of validation text. Skipped: steps, by float16's "
                     f"scaler.\n\n{markdown(header, rows)}")


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes, any machine")
    parser.add_argument("--out", type=Path, default=ROOT / "results", metavar="FOLDER")
    args = parser.parse_args()
    with ProcessPoolExecutor(1) as pool:
        machine = pool.submit(describe_machine).result()
    if machine["device"] != "cuda" and not args.small:
        raise UserError("torch finds no CUDA card; --small tries all steps without one")
    shutil.rmtree(ROOT / RUNS, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(ROOT / RUNS / "inductor")  # nothing is compiled yet
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    card, steps = machine["facts"]["card"], plan()
    for step in steps:
        adapt(step, machine, args.small)
    path = args.out / f"gpu_{re.sub('[^a-z0-9]+', '_', card.lower()).strip('_')}.md"
    about = f"`sh results/gpu.sh{' --small' * args.small}` on {date.today()}."

    def show():
        try:
            runs = table_of_runs()
        except Exception as error:  # noqa: BLE001 - a damaged log must not end the trial
            runs = f"Training runs: {type(error).__name__}: {error}"
        write_page(path, card, about, machine["facts"], steps, SHOWN, runs)

    try:
        run_steps(steps, MINUTES, show)
    finally:
        show()
        print(f"wrote {path}: send it in a pull request")
    return sum(step.result.startswith("failed") for step in steps)


if __name__ == "__main__":
    run_main(main)
