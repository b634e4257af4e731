"""
Count what the training examples of a task read: Table 6, and Figure 4 for two classes.
"""
import itertools
import math

import numpy as np
import torch

from lib.common.errors import UserError
from lib.common.progress import Progress
from lib.corpus.vocabulary import text_tokenizer
from lib.distributed.processes import deal_batches, first_rank_first
from lib.slot_usage.counts import count_reads, usage_metrics
from lib.tasks.examples import batches_by_length
from lib.tasks.glue import find_task
from lib.tasks.task_data import load_examples
from lib.training.trainer import to_device
from lib.weights.checkpoint import find_weights, load_model, read_weights
from lib.weights.run import Run


def task_usage(path, sequences, device):
    """Measure the slot usage of a fine-tuned run in its training examples: Table 6, for JSON."""
    _, config, task, examples, chosen = training_examples(path, sequences)
    counts = count_task_reads(path, examples, chosen, device, path)
    layers = {layer: usage_metrics(**sums) for layer, sums in counts.items()}
    return {"run": path, "task": task.name, "examples": len(chosen), "layers": layers,
            "n_rows": config.n_rows}


def compare_classes(path, sequences, device):
    """Compare the top-1 slots of two classes before and after fine-tuning: Figure 4, for JSON."""
    settings, config, task, examples, chosen = training_examples(path, sequences)
    halves, records = draw_halves(task, examples, chosen), []
    if not (config.memory_layers and config.beta):
        raise UserError(f"{path}: a model without memory has no slots to compare")
    for when, weights in (("before", settings["init_checkpoint"]), ("after", path)):
        title = f"{path}, {when}, class"
        counts = [[count_task_reads(weights, examples, half, device, f"{title} {label}, half {n}")
                   for n, half in enumerate(halves[label], 1)] for label in (1, 0)]
        for layer in counts[0][0]:
            top1 = np.array([[half[layer]["top1"] for half in of_class] for of_class in counts])
            records.append({"run": path, "when": when, "layer": layer, **class_distances(*top1),
                            "accesses": int(top1.sum()) // 4, "n_rows": config.n_rows})
    return records


def training_examples(path, sequences):
    """Load the training examples of a fine-tuned run. Returns its settings, its model's
    BertConfig, its Task, the examples, and indices of `sequences` examples, evenly spread. None
    stands for all."""
    checkpoint, vocab = find_weights(path)
    settings = Run(checkpoint.parent).settings()
    if "task" not in settings:
        raise UserError(f"{path}: not a fine-tuned run; table takes others with --data NAME")
    print(f"{path}: weights of {checkpoint}")
    config = read_weights(checkpoint)["config"]
    with first_rank_first():
        task = find_task(settings["task"])
    examples = load_examples(task, "train", text_tokenizer(vocab), settings["max_len"],
                             settings["doc_stride"])
    total = len(examples.ids)
    chosen = np.linspace(0, total - 1, min(sequences or total, total)).astype(int)
    return settings, config, task, examples, chosen


@torch.no_grad()
def count_task_reads(path, examples, chosen, device, title):
    """Count what the model at `path` reads in the examples `chosen` (see count_reads)."""
    model = load_model(path).to(device).eval()
    batches = batches_by_length(examples.lengths[chosen], 32)
    with count_reads(model) as counts:
        for batch in deal_batches(Progress(batches, title)):
            model.bert(**to_device(examples.pad(chosen[batch]), device))
    return counts


def draw_halves(task, examples, chosen):
    """Draw two halves of each class, all of one size: a list of indices (2, size)."""
    labels, rng = examples.labels[chosen], np.random.default_rng(0)
    classes = [chosen[labels == label] for label in range(len(task.labels))]
    size = min(map(len, classes), default=0) // 2
    if len(classes) != 2 or not size:
        raise UserError(f"{task.folder}: expected two classes with two examples or more, found "
                        f"{[len(members) for members in classes]} examples")
    return [rng.permutation(members)[:2 * size].reshape(2, size) for members in classes]


def class_distances(positive, negative):
    """Measure how much the slots that two classes read differ (Figure 4).

    positive, negative: top-1 counts of two random halves of each class, (2, n_slots). Call the
    slots' shares in a positive half p, in a negative half q. All this is our reading:
    - kl_between is KL(p || 0.9 q + 0.1 p) in nats, the mean over the four pairs of halves. The
      0.1 p bounds it by log 10.
    - iou_between is the sum of min(p, q) over the sum of max(p, q). Each sum is first averaged over
      the four pairs.
    - kl_floor and iou_floor compare the halves of one class: the noise of few accesses.
    - kl is scaled to 0 at the floor, with log 10 unchanged.
    - iou comes from the sum of min(p, q), divided by the floor's.
    """
    def compare(p, q):
        read = p > 0
        kl = (p[read] * np.log(p[read] / (0.9 * q + 0.1 * p)[read])).sum()
        return kl, np.minimum(p, q).sum()

    def iou(common):
        return common / (2 - common)

    positive, negative = (x / x.sum(1, keepdims=True) for x in (positive, negative))
    halves = [*itertools.permutations(positive), *itertools.permutations(negative)]
    kl_floor, floor = np.mean([compare(*pair) for pair in halves], 0)
    kl, common = np.mean([compare(*pair) for pair in itertools.product(positive, negative)], 0)
    if not floor:
        raise UserError("two halves of one class have no slot in common: too few examples")
    most = math.log(10)
    return {"kl_between": kl, "kl_floor": kl_floor,
            "kl": most * (kl - kl_floor) / (most - kl_floor),
            "iou_between": iou(common), "iou_floor": iou(floor), "iou": iou(common / floor)}
