"""
A run's log.jsonl as TensorBoard's curves. Put tensorboard = True into a config, then:

$ tensorboard --logdir out
"""
import json
from pathlib import Path

from common import discard, need


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
