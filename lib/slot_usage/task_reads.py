"""
Count what the examples of a task read: Table 6, and Figure 4 for two classes.
"""
import itertools
import math

import numpy as np
import torch

from lib.common.errors import UserError
from lib.common.progress import Progress
from lib.corpus.vocabulary import load_tokenizer, special_ids
from lib.distributed.processes import deal_batches, first_rank_first
from lib.slot_usage.counts import count_reads
from lib.tasks.glue import batches_by_length, find_task, read_split
from lib.tasks.squad import load_examples
from lib.training.trainer import to_device
from lib.weights.checkpoint import find_weights, load_model
from lib.weights.run import Run


class TaskSample:
    """Encode examples of a task for the model of a run, and count what they read.

    path: the run. task: another than it was fine-tuned on. split: 'train' or 'dev'. sequences: at
    most this number of examples, evenly spread. Attributes: settings (the fine-tuned run's, else
    {}), checkpoint (its weights), task, examples, chosen (their indices).
    """

    def __init__(self, path, task=None, split="train", sequences=None):
        seeds = Run(path).seeds()
        if not (task or seeds):
            raise UserError(f"{path}: not a fine-tuned run: it takes --data TASK")
        self.settings = seeds[0].settings() if seeds else {}
        self.checkpoint, vocab = find_weights(path)
        print(f"{path}: weights of {self.checkpoint}")
        tokenizer = load_tokenizer(vocab)
        with first_rank_first():
            self.task = find_task(task or self.settings["task"])
        name = "train" if split == "train" else next(iter(self.task.dev.values()))
        if name != "train" and self.task.labels is None and self.task.name != "squad":
            read_split(self.task, "train")  # finds the labels
        lengths = [self.settings.get(key, 128) for key in ("max_len", "doc_stride")]
        self.examples = load_examples(self.task, name, tokenizer, *lengths)
        self.pad_id = special_ids(tokenizer)[0]
        total = len(self.examples.ids)
        self.chosen = np.linspace(0, total - 1, min(sequences or total, total)).astype(int)

    @torch.no_grad()
    def count(self, weights, device, title, chosen=None):
        """Count what the model at `weights` reads in the examples, or in those `chosen`. Returns
        the counts of count_reads; title: of the progress bar."""
        model = load_model(weights).to(device).eval()
        chosen = self.chosen if chosen is None else chosen
        batches = batches_by_length(self.examples.lengths[chosen], 32)
        with count_reads(model) as counts:
            for batch in deal_batches(Progress(batches, title)):
                model.bert(**to_device(self.examples.pad(chosen[batch], self.pad_id), device))
        return counts

    def halves(self):
        """Draw two halves of each of two classes, all of one size: [class 0's, class 1's]."""
        if (classes := len(self.task.labels or [])) != 2:
            raise UserError(f"{self.task.name} has {classes} classes, expected two")
        rng, labels = np.random.default_rng(0), self.examples.labels[self.chosen]
        size = min(np.bincount(labels, minlength=2)) // 2
        if not size:
            raise UserError(f"{self.task.folder}: a class has fewer than two of the "
                            f"{len(self.chosen):,} examples: too few to compare classes")
        return [rng.permutation(self.chosen[labels == label])[:2 * size].reshape(2, size)
                for label in (0, 1)]

    def compare_classes(self, weights, device, title):
        """Compare the top-1 slots that the two classes read: one record for each memory layer."""
        halves = self.halves()
        counts = [[self.count(weights, device, f"{title}, class {label}, half {n}", half)
                   for n, half in enumerate(halves[label], 1)] for label in (1, 0)]
        records = []
        for layer in counts[0][0]:
            top1 = np.array([[half[layer]["top1"] for half in of_class] for of_class in counts])
            records.append({"layer": layer, **class_distances(*top1),
                            "accesses": int(top1.sum()) // 4})
        return records


def class_distances(positive, negative):
    """Measure how much the slots that two classes read differ (Figure 4).

    positive, negative: top-1 counts of two random halves of each class, (2, n_slots). Let p and q
    be the slots' shares in a half of the positive and in one of the negative class.
    kl_between is KL(p || 0.9 q + 0.1 p) in nats. The 0.1 p keeps it finite where only p reads a
    slot: at most log 10. Adding one to every count would weigh more in larger tables.
    iou_between is the sum of the smaller shares over the sum of the larger ones.
    Both are means over the four pairs of halves. kl_floor and iou_floor are the same between the
    halves of one class: the noise of few accesses.
    kl and iou are corrected for the floor, and hardly depend on the number of accesses. kl is
    scaled to 0 at the floor, with log 10 unchanged. iou takes the common share, which is the sum of
    the smaller shares, divided by the floor's. Direction, mixture and correction are our reading.
    """
    def compare(a, b):
        p, q = a / a.sum(), b / b.sum()
        read = p > 0
        kl = (p[read] * np.log(p[read] / (0.9 * q[read] + 0.1 * p[read]))).sum()
        return kl, np.minimum(p, q).sum()

    def iou(common):
        return common / (2 - common)

    halves = [*itertools.permutations(positive), *itertools.permutations(negative)]
    kl_floor, floor = np.mean([compare(*pair) for pair in halves], 0)
    kl, common = np.mean([compare(*pair) for pair in itertools.product(positive, negative)], 0)
    if not floor:
        raise UserError("two halves of one class have no slot in common: too few examples to "
                        "compare classes")
    most = math.log(10)
    return {"kl_between": kl, "kl_floor": kl_floor,
            "kl": most * (kl - kl_floor) / (most - kl_floor),
            "iou_between": iou(common), "iou_floor": iou(floor), "iou": iou(common / floor)}
