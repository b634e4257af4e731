"""
Load the splits of a task as token ids, and draw the batches of training.
"""
import math

import numpy as np

from lib.common.random_streams import ORDER
from lib.tasks.examples import batches_by_length, encode_examples
from lib.tasks.glue import read_split
from lib.tasks.squad import make_windows, read_squad


def load_examples(task, split, tokenizer, max_len, stride):
    """Read and tokenize a split as Examples, SQuAD as Windows. Print its size and classes."""
    path = str(task.file(split))
    if task.reads_spans:
        examples = make_windows(tokenizer, read_squad(path), max_len, stride, path)
    else:
        texts, labels = read_split(task, split)
        examples = encode_examples(tokenizer, texts, labels, max_len, path)
    classes = [] if examples.labels is None else task.labels
    shares = [f", {label} {np.mean(examples.labels == n):.1%}"
              for n, label in enumerate(classes)]
    print(f"{path}: {len(examples.ids):,} examples, "
          f"{examples.lengths.mean():.1f} tokens each{''.join(shares)}")
    return examples


class TaskData:
    """The splits of a task: train, {suffix of metrics: dev}, {name of submission: test}."""

    def __init__(self, task, tokenizer, max_len, stride):
        how = tokenizer, max_len, stride
        self.task = task
        self.train = load_examples(task, "train", *how)
        self.dev = {suffix: load_examples(task, split, *how) for suffix, split in task.dev.items()}
        self.test = {name: load_examples(task, split, *how) for name, split in task.test.items()
                     if task.file(split).exists()}


class TrainingBatches:
    """The training batches of one seed, as a function of the step."""

    unit = "examples"

    def __init__(self, examples, config):
        self.examples, self.seed = examples, config.seed
        self.size, self.accumulation = config.batch_size, config.accumulation
        self.device = config.device
        order = np.random.default_rng(0).permutation(len(examples.ids))  # for all seeds
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
