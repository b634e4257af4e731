"""
Load the splits of a task as token ids, and draw the batches of training.
"""
import math

import numpy as np

from lib.common.errors import UserError
from lib.common.random_streams import ORDER
from lib.tasks.examples import batches_by_length, encode_examples
from lib.tasks.glue import read_split
from lib.tasks.squad import make_windows, read_squad


def load_examples(task, split, tokenizer, max_len, stride):
    """Read and tokenize a split: Examples, or SQuAD's Windows with a line about its answers."""
    path = f"{task.folder}/{split}"
    if not task.reads_spans:
        return encode_examples(tokenizer, *read_split(task, split), max_len, path)
    questions = read_squad(f"{path}-v1.1.json")
    windows, statuses = make_windows(tokenizer, questions, max_len, stride, split == "train", path)
    answers = ", ".join(f"{len(ids):,} {status} (the first: {ids[0]})"
                        for status, ids in statuses.items())
    print(f"{path}: {len(questions):,} questions, {len(windows.ids):,} windows, {answers}")
    return windows


class TaskData:
    """The splits of a task: train, {suffix of metrics: dev}, {name of submission: test}."""

    def __init__(self, task, tokenizer, max_len, stride):
        def load(split):
            return load_examples(task, split, tokenizer, max_len, stride)

        self.task, self.train = task, load("train")
        if not self.train.ids:
            raise UserError(f"{task.folder}: nothing to train on")
        self.dev = {suffix: load(split) for suffix, split in task.dev.items()}
        self.test = {name: load(split) for name, split in task.test.items()
                     if task.file(split).exists()}

    def print_sizes(self):
        """Print the sizes and how often each label occurs, for a person to check."""
        task, dev_splits = self.task, [(self.task.dev[s], dev) for s, dev in self.dev.items()]
        for split, examples in [("train", self.train), *dev_splits]:
            shares = [f", {label} {(examples.labels == n).mean():.1%}"
                      for n, label in enumerate(task.labels)]
            print(f"{split}: {len(examples.ids):,} examples, "
                  f"{examples.lengths.mean():.1f} tokens each{''.join(shares)}")
        if task.labels:
            most = np.bincount(self.train.labels).argmax()
            shares = [f"{(dev.labels == most).mean():.1%} of {split}" for split, dev in dev_splits]
            print(f"always saying {task.labels[most]}, the most frequent class of train, "
                  f"would be right for {', '.join(shares)}")


class TrainingBatches:
    """The training batches of one seed, as a function of the step.

    config: has seed, batch_size, accumulation, train_examples and device.
    """

    unit = "examples"

    def __init__(self, examples, config):
        self.examples, self.seed = examples, config.seed
        self.size, self.accumulation = config.batch_size, config.accumulation
        self.device = config.device
        order = np.random.default_rng(0).permutation(len(examples.ids))  # the same for all seeds
        self.chosen = np.sort(order[:config.train_examples or None])
        self.steps_per_epoch = math.ceil(len(self.chosen) / self.size)
        self.epoch = None  # whose order epoch_batches has

    def epochs(self, steps):
        """Return how many epochs `steps` steps are."""
        return steps / self.steps_per_epoch

    def micro_batches(self, step):
        """Return the examples of a step by index, split as evenly as possible."""
        epoch, n = divmod(step, self.steps_per_epoch)
        if self.epoch != epoch:
            rng = np.random.default_rng([self.seed, ORDER, epoch])
            lengths = self.examples.lengths[self.chosen]
            self.epoch, self.epoch_batches = epoch, batches_by_length(lengths, self.size, rng)
        return np.array_split(self.chosen[self.epoch_batches[n]], self.accumulation)

    def loss_weight(self, step, micro):
        """Return a micro-batch's share of the examples of its step."""
        sizes = [len(index) for index in self.micro_batches(step)]
        return sizes[micro] / sum(sizes)

    def get(self, step, micro=0):
        """Return a micro-batch: the arguments of a model, as arrays."""
        batches = self.micro_batches(step)
        index = batches[micro] if len(batches[micro]) else batches[0][:1]  # its loss weighs 0
        return {**self.examples.pad(index, self.device), "labels": self.examples.labels[index]}
