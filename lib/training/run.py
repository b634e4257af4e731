"""
The folder of a run.
"""
import json
import shutil
import tempfile
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from lib.common.errors import UserError, need
from lib.common.files import atomic, discard, write_text
from lib.corpus.vocabulary import read_vocab, vocab_hash
from lib.distributed.processes import get_rank


def open_log(out, last_step, tensorboard=False):
    """<out>/log.jsonl, one JSON object a line, without records newer than the checkpoint and
    without the last line if a killed process left half of it; `tensorboard`: see scalars.py."""
    if get_rank():
        return tempfile.TemporaryFile("w")  # the first one keeps the log
    path, kept = Path(out) / "log.jsonl", ""
    for file in path.parent.rglob(".tmp_*"):
        discard(file)  # what a killed process left behind
    if path.exists() and last_step:
        for number, line in enumerate(path.read_text().split("\n")[:-1], 1):
            try:
                kept += f"{line}\n" if json.loads(line)["step"] <= last_step else ""
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{path}:{number}: not a record: remove the line") from None
    write_text(path, kept)
    log = path.open("a", buffering=1)
    return Scalars(log) if tensorboard else log


def write_settings(out, config, vocab, origin):
    """Begin a run's folder, or go on in it: config.json and the tokenizer's files. vocab: the
    vocab.txt of the corpus or initial model; origin: {"init_checkpoint": path or '', "first_step":
    steps that the initial model was trained for}."""
    for file in (vocab, vocab.with_name("tokenizer.json")):  # a run can be used without its corpus
        if file.exists():
            with atomic(out / file.name) as temporary:
                shutil.copyfile(file, temporary)
    settings = {**asdict(config), **origin, "tokenizer_hash": vocab_hash(read_vocab(vocab))}
    write_text(out / "config.json", json.dumps(settings, indent=1))


def read_settings(run, needed=()):
    """config.json of a run: its resolved settings, and where it started. UserError where it lacks
    one of the `needed`, as a fine-tuned run does those of pretraining."""
    try:
        settings = json.loads((Path(run) / "config.json").read_text())
        if not {"tokenizer_hash", "init_checkpoint", "first_step"} <= settings.keys():
            raise ValueError("not pretrain.py's")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{run}/config.json: not readable ({error}): is {run} a run?") from None
    if lacking := [key for key in needed if key not in settings]:
        raise UserError(f"{run}: a fine-tuned run has no {lacking[0]}: expected one of pretraining")
    return settings


# Settings that have no effect on results: a run that is resumed may have other values of these.
NO_EFFECT = {"out", "log_interval", "checkpoint_interval", "device", "compile", "tensorboard",
             "rank_timeout"}


def check_same_run(config, run):
    """Refuse to continue a run under settings (a dataclass) that make it another one; say which of
    those that may change did."""
    may_change = {f.name for f in fields(config) if f.metadata["may_change"]}
    before = {"objective": "masked", **read_settings(run)}  # older runs do not say it
    now = json.loads(json.dumps(asdict(config)))
    for key in sorted(key for key in now if key in before and now[key] != before[key]):
        if key not in may_change:
            raise UserError(f"{run} was trained with {key} = {before[key]!r}, not "
                            f"{now[key]!r}: give the changed run its own --out=out/NAME")
        if key not in ("dry_run", "eval_only"):
            note = ", where the learning rate reaches 0" if key == "max_steps" else ""
            note += ": it rises again now" if note and now[key] > before[key] else ""
            print(f"{key} was {before[key]!r}, is now {now[key]!r}{note}")


class Scalars:
    """A log.jsonl, open for writing, whose records also go into an event file beside it. That file
    is made anew from the records that are there, so a resumed run has no point twice and none of
    the steps that it lost; of these points the wall time is that of the resuming."""

    def __init__(self, log):
        self.log, path = log, Path(log.name)
        for old in path.parent.glob("events.out.tfevents.*"):
            discard(old)
        self.writer = need("torch.utils.tensorboard", "a curve").SummaryWriter(path.parent)
        for line in path.read_text().splitlines():
            self.add(json.loads(line))

    def write(self, text):
        """As a file's write(), of the two texts that print() writes: a record and a newline."""
        self.log.write(text)
        if text.strip():
            self.add(json.loads(text))

    def fileno(self):
        return self.log.fileno()

    def add(self, record):
        """Every number of a record: train/loss, eval/perplexity, layer 2/top1_mu and so on."""
        layers = {f"layer {n}": metrics for n, metrics in record.pop("layers", {}).items()}
        step, kind = record.pop("step"), "train" if "lr" in record else "eval"
        for group, numbers in {kind: record, **layers}.items():
            for name, number in numbers.items():
                self.writer.add_scalar(f"{group}/{name}", number, step)
        self.writer.flush()


def write_usage(run, step, counts):
    """Write <run>/usage/step_<step>.npz: layer<n>_read and layer<n>_top1, int32 (n_slots,)."""
    arrays = {f"layer{n}_{name}": sums[name].astype(np.int32)
              for n, sums in counts.items() for name in ("read", "top1")}
    with atomic(Path(run) / "usage" / f"step_{step:06d}.npz") as path, path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_usage(run):
    """A run's usage snapshots, oldest first: {step: {"layer2_top1": (n_slots,) counts, ...}}."""
    layers = read_settings(run, ["memory_layers"])["memory_layers"]
    if not layers:
        raise UserError(f"{run}: a run without memory has no usage snapshots")
    files = {int(path.stem[5:]): path for path in Path(run, "usage").glob("step_*.npz")}
    if not files:
        raise UserError(f"{run}/usage: no snapshot yet: there is one every usage_interval steps")
    snapshots = {}
    for step in sorted(files):
        try:
            snapshots[step] = dict(np.load(files[step]))
            for layer in layers:
                snapshots[step][f"layer{layer}_top1"]  # raises where it is not in the file
        except Exception as error:  # noqa: BLE001 - a damaged file can fail in any way
            raise UserError(f"{files[step]}: damaged ({type(error).__name__}): remove it") from None
    return snapshots


def read_evaluations(run):
    """The evaluations in a run's log.jsonl; `step` counts the steps of the initial model too."""
    first, log = read_settings(run)["first_step"], Path(run) / "log.jsonl"
    try:  # a running process may be in the middle of the last line
        records = [json.loads(line) for line in log.read_text().split("\n")[:-1]]
    except (OSError, ValueError) as error:
        raise UserError(f"{log}: not readable ({error})") from None
    evaluations = [{**r, "step": first + r["step"]} for r in records if "perplexity" in r]
    if not evaluations:
        raise UserError(f"{log}: no evaluation in it yet")
    return evaluations
