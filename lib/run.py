"""
Read and write the folder of a run.

out/<run>/config.json               the settings, and where the run started
out/<run>/vocab.txt                 the vocabulary; with tokenizer.json if the corpus has one
out/<run>/log.jsonl                 one JSON object a line: losses and evaluations
out/<run>/step_000500/              a checkpoint: model.pt, optimizer.pt and state.pt
out/<run>/usage/step_000500.npz     how often each slot was read during an evaluation
out/<run>/seed0/                    fine-tuning: one such folder for each seed, which also has:
out/<run>/seed0/best_epoch_2/       model.pt of the best epoch; renamed best/ at the end
out/<run>/seed0/eval_results.json   the scores of best/
"""
import json
import math
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import torch

from lib.distributed import (
    barrier,
    first_rank_first,
    get_world_size,
    save_whole,
)
from lib.errors import ROOT, Failure, UserError, need
from lib.files import (
    CHECKPOINT,
    atomic,
    discard,
    first_rank,
    load_file,
    null_to_nan,
    read_json,
    to_json,
    write_text,
)
from lib.tokenizer import read_vocab, vocab_hash

EVALUATION = "perplexity", "accuracy", "masked_tokens"  # of a record that is an evaluation
# Settings that are no part of a recipe: they change no score, tell about the process, or are the
# seed. init_from may be another path to the same init_checkpoint.
NO_RECIPE = {"out", "log_interval", "checkpoint_interval", "checkpoint_minutes", "device",
             "compile", "tensorboard", "rank_timeout", "seed", "seeds", "init_from", "threads",
             "torch", "commit", "ranks"}
TYPES = {  # of what other programs read from config.json
    "max_steps": int, "seed": int, "first_step": int, "seq_len": int, "max_len": int, "task": str,
    "init_from": str, "doc_stride": int, "init_checkpoint": str, "dataset": str, "objective": str,
    "tokenizer_hash": str, "memory_layers": list, "n_rows": int, "pooler_trained": bool,
    "data": dict}


def save_files(folder, files):
    """Write {name: content} as <folder>/<name>.pt. The folder is written whole or not at all."""
    try:
        with atomic(folder) as temporary:
            temporary.mkdir()
            for name, content in files.items():
                save_whole(content, temporary / f"{name}.pt")
        barrier()  # all ranks wait until it is there
    except RuntimeError as error:  # torch.save raises it if a write fails
        reason = str(error).splitlines()[0]
        raise Failure(f"{folder}: not saved, is the disk full? ({reason})") from None


def numbered(folder, prefix, suffix=""):
    """Find <folder>/<prefix><number><suffix>. Returns {number: path}, the lowest number first."""
    paths = {}
    pattern = rf"{re.escape(prefix)}(\d+(\.\d+)?(e-\d+)?){re.escape(suffix)}"
    for path in folder.glob(f"{prefix}*{suffix}"):
        if match := re.fullmatch(pattern, path.name):
            paths[float(match[1])] = path
    return dict(sorted(paths.items()))


def drop(folder):
    """Delete a folder of weights. A link stays, and a folder that has files of other programs."""
    mine = first_rank() and not folder.is_symlink() and folder.is_dir()
    if mine and set(os.listdir(folder)) <= CHECKPOINT.keys():
        discard(folder)


def recipe_differences(settings, others):
    """Name the settings, sorted, in which other runs have another recipe. Settings that an older
    run does not have are left out."""
    return sorted(name for name in settings.keys() - NO_RECIPE
                  if any(other.get(name, settings[name]) != settings[name] for other in others))


def brief(fact):
    """Shorten a SHA-256, or a commit that may end in -dirty, to 12 digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28,}", r"\1", str(fact))


def usage_key(layer, counts):
    """Return the name of a layer's counts, "read" or "top1", in a usage snapshot."""
    return f"layer{layer}_{counts}"


def read_state(checkpoint):
    """Read a checkpoint's state.pt; UserError if its `step` is not the number of a step."""
    state = load_file(checkpoint / "state.pt")
    if type(state["step"]) is not int or state["step"] < 0:
        raise UserError(f"{checkpoint}/state.pt: step = {state['step']!r}: damaged, remove its "
                        "folder to use an older checkpoint")
    return state


class Run:
    """Read and write the folder of a run. It need not exist yet. A new run is begun with begin().
    Then open() makes it ready for log() and save_checkpoint()."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.log_file = self.curves = None

    def begin(self, config, vocab, origin, data):
        """Write config.json and the tokenizer's files. `config` is a dataclass, `vocab` the path of
        a vocab.txt. `origin` is what init_from() returned, or a continued run's old settings().
        `data` identifies the text or task: {name: SHA-256, or a list of labels}."""
        for file in (vocab, vocab.with_name("tokenizer.json")):  # the run works without its corpus
            if file.exists():
                with atomic(self.folder / file.name) as temporary:
                    shutil.copyfile(file, temporary)
        settings = {**origin, **asdict(config), "tokenizer_hash": vocab_hash(read_vocab(vocab)),
                    "data": data, **process_facts(), "ranks": get_world_size()}
        write_text(self.folder / "config.json", to_json(settings, indent=1))

    def settings(self, needed=()):
        """Read config.json: a dict of the settings and the origin, {} if there is none. UserError
        if a key of `needed` is missing: a fine-tuned run has no settings of pretraining."""
        path = self.folder / "config.json"
        settings = read_json(path) if path.is_file() else {}
        for key, kind in TYPES.items():
            if type(settings.get(key, kind())) is not kind:
                raise UserError(f"{path}: {key} = {settings[key]!r}: expected {kind.__name__}, as "
                                "the run wrote it")
        if missing := [key for key in needed if key not in settings]:
            raise UserError(f"{path}: no {missing[0]}: expected a run of pretrain.py")
        return settings

    def check_settings(self, config, data, also=()):
        """Print what changed since the run began. UserError if `data` changed (see begin), or a
        setting that must not change. The settings named in `also` may change, too."""
        may_change = set(config.MAY_CHANGE)
        may_change |= set(also)
        # settings that did not exist when the run began had the effect of their defaults
        default = {field.name: field.default for field in fields(config)}
        default, now = json.loads(json.dumps([default, asdict(config)]))
        before, notes = default | self.settings(["first_step"]), []
        for key in sorted(key for key in now if now[key] != before[key]):
            if key not in may_change:
                kept = before[key]
                kept = ",".join(map(str, kept)) if isinstance(kept, list) else str(kept)
                raise UserError(f"{self.folder} was trained with {key} = {before[key]!r}, not "
                                f"{now[key]!r}: add --{key}={shlex.quote(kept)} to go on, or give "
                                "the changed run its own --out=out/NAME")
            note = ("; the learning rate now reaches 0 at the new max_steps"
                    if key == "max_steps" else "")
            note += " (it rises again first)" if note and now[key] > before[key] else ""
            notes.append(f"{key} was {before[key]!r}, is now {now[key]!r}{note}")
        old = before.get("data", data)  # runs of older versions do not say
        for name in sorted(old.keys() | data.keys()):
            if old.get(name) != data.get(name):
                raise UserError(f"{self.folder} was trained on other data: {name} was "
                                f"{brief(old.get(name))}, is now {brief(data.get(name))}: put the "
                                "old data back, or begin anew with --out=out/NAME")
        for note in notes:
            print(note)
        facts = {**process_facts(), "ranks": get_world_size()}
        changed = [f"{key} {brief(before.get(key))} -> {brief(value)}"
                   for key, value in facts.items() if before.get(key, value) != value]
        if changed:
            print(f"changed since the last start: {', '.join(changed)}; results may differ from "
                  "those of an uninterrupted run")

    def open(self, step, best_epoch=None, tensorboard=False):
        """Open the log. Remove what a killed process wrote after the checkpoint of `step`: half
        files, records, usage snapshots, and the weights of epochs other than `best_epoch`."""
        half = [*numbered(self.folder, ".tmp_step_").values(), self.folder / ".tmp_best",
                *numbered(self.folder, ".tmp_best_epoch_").values()]
        for folder in half:
            drop(folder)
        usage = self.folder / "usage"
        later = [snapshot for number, snapshot in numbered(usage, "step_", ".npz").items()
                 if number > step]
        for file in [*numbered(usage, ".tmp_step_", ".npz").values(), *later]:
            discard(file)
        self._drop_epochs_but(best_epoch)
        if first_rank():
            path = self.folder / "log.jsonl"
            records = self.records() if step and path.exists() else []
            kept = [to_json(record) for record in records if record["step"] <= step]
            write_text(path, "".join(f"{record}\n" for record in kept))
            self.log_file = path.open("a", buffering=1)
            if tensorboard:
                writer = need("torch.utils.tensorboard", "tensorboard = True").SummaryWriter
                self.curves = writer(self.folder, purge_step=step and step + 1)

    def log(self, record):
        """Add a record, a dict with `step`, to log.jsonl and to TensorBoard's curves."""
        if self.log_file:  # only the first rank writes
            print(to_json(record), file=self.log_file)
        if self.curves and "warning" not in record:
            groups = {f"layer {n}": usage for n, usage in record.get("layers", {}).items()}
            groups["train" if "lr" in record else "eval"] = record
            for group, numbers in groups.items():
                for name in numbers.keys() - {"step", "layers"}:
                    self.curves.add_scalar(f"{group}/{name}", numbers[name], record["step"])
            self.curves.flush()

    def last_step(self):
        """Return the last step in log.jsonl, 0 without one."""
        records = self.records() if (self.folder / "log.jsonl").exists() else []
        return max((record["step"] for record in records), default=0)

    def records(self):
        """Read log.jsonl, a list of dicts. A last line that is half written does not count."""
        path, records = self.folder / "log.jsonl", []
        try:
            for line in path.read_text(errors="replace").split("\n")[:-1]:
                record = json.loads(line, object_hook=null_to_nan)
                if type(record["step"]) is not int:
                    raise ValueError
                if "perplexity" in record:
                    usage = [metrics["top1_mu"] for metrics in record["layers"].values()]
                    sum([record[key] for key in EVALUATION] + usage)  # raises: no numbers
                records.append(record)
        except OSError as error:
            raise UserError(f"{path}: not readable ({error})") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            number = len(records) + 1
            raise UserError(f"{path}:{number}: not a record: remove the line") from None
        return records

    def evaluations(self, checkpoint=None):
        """Read the log's evaluations, up to a checkpoint. Steps include the initial model's."""
        last = read_state(checkpoint)["step"] if checkpoint else math.inf
        first = self.settings(["first_step"])["first_step"]
        evaluations = [{**record, "step": first + record["step"]} for record in self.records()
                       if "perplexity" in record and record["step"] <= last]
        if not evaluations:
            raise UserError(f"{self.folder}/log.jsonl: no evaluation in it yet")
        return evaluations

    def checkpoints(self):
        """List the paths of the checkpoints, oldest first. Each checkpoint is whole."""
        return list(numbered(self.folder, "step_").values())

    def newest_checkpoint(self):
        """Return the path of the newest checkpoint, or None."""
        newest = next(reversed(self.checkpoints()), None)
        if newest and not (newest / "model.pt").is_file():
            raise UserError(f"{newest}: no model.pt: remove the folder to use an older checkpoint")
        return newest

    def weights_folder(self):
        """Return the path of the weights that the folder stands for (see find_weights), or None."""
        for folder in (self.folder, *numbered(self.folder, "seed").values()):
            epochs = [folder, folder / "best", *numbered(folder, "best_epoch_").values()]
            whole = [epoch for epoch in epochs if (epoch / "model.pt").is_file()]
            if weights := whole or Run(folder).checkpoints():
                return weights[-1]
        return None

    def save_checkpoint(self, step, files, keep, best_epoch=None):
        """Write a checkpoint of {name: content}, whole or not at all. Returns its path. Then it
        deletes all checkpoints but the `keep` newest, and the weights of all epochs but
        `best_epoch` (see drop)."""
        if self.log_file:
            os.fsync(self.log_file.fileno())  # no checkpoint is newer than its log
        folder = self.folder / f"step_{step:06d}"
        save_files(folder, files)
        for old in self.checkpoints()[:-keep]:
            drop(old)
        self._drop_epochs_but(best_epoch)
        return folder

    def steps_and_seed(self, checkpoint):
        """Return how a checkpoint was trained: {"steps": "1,000 + 3,000", "seed": 1}, the steps of
        the initial model and its own. An unfinished run has "100 of 3,000". A "?" stands for what
        weights in Hugging Face layout do not tell."""
        if not (checkpoint / "state.pt").is_file():
            return {"steps": "?", "seed": "?"}
        settings = self.settings(["max_steps", "seed", "init_checkpoint", "first_step"])
        step, last = read_state(checkpoint)["step"], settings["max_steps"]
        steps = f"{step:,} of {last:,}" if step < last else f"{step:,}"
        if settings["init_checkpoint"]:
            first = settings["first_step"]  # 0 for an initial model in Hugging Face layout
            steps = f"{first:,} + {steps}" if first else f"? + {steps}"
        return {"steps": steps, "seed": settings["seed"]}

    def write_usage(self, step, counts):
        """Write a usage snapshot of count_reads()'s counts, {layer: {"read": ..., "top1": ...}}.
        The file has layer<n>_read and layer<n>_top1, int32 (n_slots,)."""
        arrays = {usage_key(n, name): sums[name].astype(np.int32)
                  for n, sums in counts.items() for name in ("read", "top1")}
        with atomic(self.folder / "usage" / f"step_{step:06d}.npz") as temporary:
            np.savez_compressed(temporary, **arrays)

    def usage_snapshots(self):
        """Read the usage snapshots, oldest first: {step: {"layer2_top1": (n_slots,) counts}}."""
        layers, snapshots = self.settings(["memory_layers"])["memory_layers"], {}
        for step, path in numbered(self.folder / "usage", "step_", ".npz").items():
            try:
                file = np.load(path)
                found = {key: file[key] for key in (usage_key(n, "top1") for n in layers)}
                first = next(iter(snapshots.values()), found)
                for name, counts in found.items():
                    [n_slots] = first[name].shape
                    if counts.shape != (n_slots,) or counts.dtype.kind != "i" or counts.min() < 0:
                        raise ValueError  # not what write_usage() writes
                snapshots[int(step)] = found
            except Exception as error:  # noqa: BLE001 - a damaged file can fail in any way
                raise UserError(f"{path}: damaged ({type(error).__name__}): remove it") from None
        if not snapshots:
            raise UserError(f"{self.folder}/usage: no snapshot: a run with memory writes one every "
                            "usage_interval steps, a run without memory none")
        return snapshots

    def seeds(self):
        """List a fine-tuned run's seeds, each a Run. If this is a seed, it is the only one."""
        folders = [self.folder, *numbered(self.folder, "seed").values()]
        return [run for run in map(Run, folders) if "task" in run.settings()]

    def save_best(self, epoch, model):
        """Write the weights of the best epoch so far; `model` is what model_file() returned."""
        save_files(self.folder / f"best_epoch_{epoch:g}", {"model": model})

    def finish_best(self, epoch):
        """Rename the folder of the best epoch to best/. Returns its path."""
        named, best = self.folder / f"best_epoch_{epoch:g}", self.folder / "best"
        with first_rank_first():
            if named.exists():  # else a killed process has renamed it
                drop(best)
                named.rename(best)
        return best

    def _drop_epochs_but(self, epoch):
        for folder in numbered(self.folder, "best_epoch_").values():
            if epoch is None or folder.name != f"best_epoch_{epoch:g}":
                drop(folder)

    def results(self):
        """Read the scores of fine-tuning, a dict, or {} if it is not done."""
        path = self.folder / "eval_results.json"
        return read_json(path, null_to_nan) if path.is_file() else {}

    def write_results(self, results):
        write_text(self.folder / "eval_results.json", to_json(results, indent=1))


def process_facts():
    """Return the number of threads, torch's version and the git commit of this code."""
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, "commit": git_commit()}


def git_commit(root=ROOT):
    """Return the commit of a checkout. It ends in "-dirty" if tracked files differ from it. Without
    git, or outside a checkout, return "unknown"."""
    # with --git-dir git looks for no other checkout around this folder
    command = ["git", f"--git-dir={root / '.git'}", f"--work-tree={root}", "describe", "--always",
               "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True,
                              env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"})
    except (OSError, ValueError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
