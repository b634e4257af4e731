"""
Read and write the folder of a run.

out/<run>/config.json               the settings, and where the run started
out/<run>/vocab.txt                 the vocabulary; with tokenizer.json if its settings are unusual
out/<run>/log.jsonl                 one JSON object a line: losses and evaluations
out/<run>/step_000500/              a checkpoint: model.pt, optimizer.pt and state.pt
out/<run>/usage/step_000500.npz     how often each slot was read during an evaluation
out/<run>/seed0/                    fine-tuning: such a folder for each seed (see finetune.py)
"""
import json
import os
import shlex
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from lib.files import atomic, discard, load_file, named, null_to_nan, read_json, to_json, write_text
from lib.ranks import barrier, first_rank, get_world_size
from lib.settings import ROOT, UserError
from lib.tokenizer import load_tokenizer, vocab_hash, write_vocab

CHECKPOINT, SNAPSHOT = "step_{:06d}", "step_{:06d}.npz"
LAYOUT = 2  # of the files above and in them; raise it when they change


class Run:
    """Read and write a folder, which need not exist yet. open() comes before log()."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.log_file = None
        self.curves = None

    def settings(self):
        """Read config.json: a dict of the settings and the origin, or {}. UserError if not ours."""
        path = self.folder / "config.json"
        if not path.is_file():
            return {}
        settings = read_json(path)
        if settings.get("layout") != LAYOUT:
            raise UserError(f"{path} has layout {settings.get('layout')}, expected {LAYOUT}: it is "
                            "no run, or one of another version of this code")
        return settings

    def check_settings(self, settings, data):
        """Raise UserError if what must stay the same has changed. Say if max_steps has."""
        before = self.settings()
        now = json.loads(to_json(asdict(settings)))
        for key in sorted(now):
            old, new = before.get(key, getattr(type(settings), key)), now[key]
            if old != new and key not in settings.MAY_CHANGE:
                raise UserError(f"{self.folder} was trained with {key} = {old!r}, not {new!r}: "
                                f"add --{key}={shlex.quote(str(old))} to go on, or give the "
                                "changed run its own --out=out/NAME")
            if old != new and key == "max_steps":
                print(f"max_steps was {old}, is now {new}: the learning rate follows it")
        for name in before["data"] | data:
            if before["data"].get(name) != data.get(name):
                raise UserError(f"{self.folder} was trained on other data: {name} has changed: put "
                                "the old data back, or begin anew with --out=out/NAME")

    def open(self, settings, vocab, origin, data, step):
        """Open the run for training: a new one at step 0, or one that goes on after `step`.

        Newer files are removed. vocab: the path of a vocab.txt. origin: what a new run keeps of its
        start (see init_from). data: {name: SHA-256, or a list of labels}.
        """
        if not first_rank():
            return
        before = self.settings()
        if not before and any(self.folder.glob("[!.]*")):
            raise UserError(f"{self.folder} has files, but is not a run: --out=out/NAME")
        tokenizer = load_tokenizer(vocab)
        content = {"layout": LAYOUT, **(before if step else origin), **asdict(settings),
                   "tokenizer_hash": vocab_hash(tokenizer), "data": data,
                   "threads": torch.get_num_threads(), "torch": torch.__version__,
                   "commit": git_commit(), "ranks": get_world_size()}
        write_text(self.folder / "config.json", to_json(content, indent=1))
        write_vocab(self.folder, tokenizer)  # the run works without its corpus
        for number, snapshot in numbered(self.folder / "usage", SNAPSHOT).items():
            if number > step:
                discard(snapshot)
        if settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.curves = SummaryWriter(self.folder, purge_step=step and step + 1)
        kept = [record for record in self.records() if record["step"] <= step] if step else []
        path = self.folder / "log.jsonl"
        write_text(path, "".join(f"{to_json(record)}\n" for record in kept))
        self.log_file = path.open("a", buffering=1)

    def log(self, record):
        """Add a record to log.jsonl and to TensorBoard's curves.

        record: a dict with `step`, numbers and its `kind`: "train", "eval" of a language model, or
        "dev" of a task.
        """
        if self.log_file:  # only the first rank writes
            with named(self.log_file.name):
                print(to_json(record), file=self.log_file)
        if self.curves:
            layers = {f"layer {n}": usage for n, usage in record.get("layers", {}).items()}
            for group, numbers in {record["kind"]: record, **layers}.items():
                for name in numbers.keys() - {"kind", "step", "layers"}:
                    self.curves.add_scalar(f"{group}/{name}", numbers[name], record["step"])
            self.curves.flush()

    def records(self):
        """Read log.jsonl, a list of dicts. A last line that is half written does not count."""
        lines = (self.folder / "log.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line, object_hook=null_to_nan) for line in lines]

    def evaluations(self):
        """Read a language model's evaluations. Their steps include the initial model's."""
        records, first = self.records(), self.settings()["first_step"]
        return [{**record, "step": first + record["step"]} for record in records
                if record["kind"] == "eval"]

    def newest_checkpoint(self):
        """Return the path of the newest checkpoint, or None. It is whole."""
        checkpoints = numbered(self.folder, CHECKPOINT)
        return checkpoints[max(checkpoints)] if checkpoints else None

    def save_checkpoint(self, step, files, keep):
        """Write a checkpoint of {name: content}; only the `keep` newest stay. Returns its path."""
        if self.log_file:
            os.fsync(self.log_file.fileno())  # no checkpoint is newer than its log
        folder = self.folder / CHECKPOINT.format(step)
        with atomic(folder) as temporary:
            temporary.mkdir()
            for name, content in files.items():
                save_tensors(content, temporary / f"{name}.pt")
        barrier()  # the other ranks wait until it is there
        for old in list(numbered(self.folder, CHECKPOINT).values())[:-keep]:
            discard(old)
        return folder

    def save_best(self, model):
        """Write the weights of the best epoch so far, before the checkpoint that names it."""
        with atomic(self.folder / "best" / "model.pt") as temporary:
            save_tensors(model, temporary)
        barrier()

    def write_usage(self, step, counts):
        """Write a usage snapshot: layer<n>_read and layer<n>_top1, int32 (n_slots,)."""
        arrays = {f"layer{n}_{what}": sums[what].astype(np.int32)
                  for n, sums in counts.items() for what in ("read", "top1")}
        with atomic(self.folder / "usage" / SNAPSHOT.format(step)) as temporary:
            np.savez_compressed(temporary, **arrays)

    def usage_snapshots(self):
        """Read the usage snapshots, oldest first: {step: {"layer2_top1": (n_slots,) counts}}."""
        snapshots = {step: dict(np.load(path))
                     for step, path in numbered(self.folder / "usage", SNAPSHOT).items()}
        if not snapshots:
            raise UserError(f"{self.folder}/usage: no snapshot: usage_interval = 0, or no memory")
        return snapshots

    def seed_runs(self):
        """List a fine-tuned run's seeds, each a Run, in their order."""
        return list(map(Run, numbered(self.folder, "seed{}").values()))

    def results(self):
        """Read the scores of fine-tuning, a dict, or {} if it is not done."""
        path = self.folder / "eval_results.json"
        return read_json(path, null_to_nan) if path.is_file() else {}

    def write_results(self, results):
        write_text(self.folder / "eval_results.json", to_json(results, indent=1))


def numbered(folder, name):
    """Find the files and folders of an exact name, as "seed{}". Returns {number: path} in order."""
    found = {}
    for path in folder.glob("*"):
        digits = "".join(filter(str.isdecimal, path.name))
        if digits and path.name == name.format(int(digits)):  # not seed1.old, seed01
            found[int(digits)] = path
    return dict(sorted(found.items()))


def save_tensors(content, path):
    """Save as torch.save does. Under torchrun only the first rank writes."""
    if first_rank():
        with open(path, "wb") as file:  # given a path, torch does not say that the disk is full
            torch.save(content, file)


def read_state(checkpoint):
    """Read a checkpoint's state.pt, a dict with `step`."""
    return load_file(checkpoint / "state.pt")


def git_commit(root=ROOT):
    """Return the commit of a checkout, with "-dirty" if files differ; "unknown" without git."""
    command = ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
