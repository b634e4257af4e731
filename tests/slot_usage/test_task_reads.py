"""
How far apart the slots of two classes are.
"""
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lib.errors import UserError
from lib.usage import class_distances, count_task_reads, training_examples
from model import Classifier
from tests.helpers import PIECES, save_model, tiny_bert


def test_distances_of_classes_slot_by_slot():
    def shares(counts):
        return [count / sum(counts) for count in counts]

    def kl(a, b):
        return sum(p * math.log(p / (0.9 * q + 0.1 * p)) for p, q in zip(a, b, strict=True) if p)

    def overlap(a, b):
        return sum(map(min, a, b))

    positive, negative = np.random.default_rng(0).integers(0, 9, (2, 2, 50))
    found = class_distances(positive, 3 * negative)
    (a, b), (c, d) = ([shares(half.tolist()) for half in halves] for halves in (positive, negative))
    for measure, key in ((kl, "kl"), (overlap, "iou")):
        between = sum(measure(*pair) for pair in ((a, c), (a, d), (b, c), (b, d))) / 4
        floor = sum(measure(*pair) for pair in ((a, b), (b, a), (c, d), (d, c))) / 4
        if measure is kl:  # on the line through (floor, 0) and (log 10, log 10)
            fixed = math.log(10) - math.log(10) * (math.log(10) - between) / (math.log(10) - floor)
        else:
            fixed = between / floor
            between, floor, fixed = (share / (2 - share) for share in (between, floor, fixed))
        assert [found[f"{key}_between"], found[f"{key}_floor"], found[key]] == pytest.approx(
            [between, floor, fixed])
    same = class_distances(positive[[0, 0]], positive[[0, 0]])
    assert (same["kl"], same["iou"]) == pytest.approx((0, 1))
    apart = class_distances(np.array([[3, 1, 0]] * 2), np.array([[0, 0, 7]] * 2))
    assert (apart["kl"], apart["iou"]) == pytest.approx((math.log(10), 0))
    with pytest.raises(UserError, match="too few examples"):
        class_distances(np.eye(4)[:2], np.eye(4)[2:])


def test_training_examples_are_those_of_fine_tuning(workdir):
    """They have the run's max_len, a "[SEP]" in a text is text, and reads are without dropout."""
    bert = tiny_bert(vocab_size=len(PIECES), memory_layers=(2,), dropout=0.5)
    model = Classifier(bert.bert.config, 2)
    save_model("out/run/seed0", model, ["x", "y"])
    shutil.copy("vocab.txt", "out/run/seed0")
    settings = {"task": "own", "max_len": 8, "doc_stride": 4}
    Path("out/run/seed0/config.json").write_text(json.dumps(settings))
    Path("own").mkdir()
    texts = ["cat [SEP]", "mat", "cat " * 20, "the", "sat"]
    rows = [f"{text}\t{'xy'[n % 2]}\n" for n, text in enumerate(texts)]
    Path("own/train.tsv").write_text("".join(["sentence\tlabel\n", *rows]))
    _, _, task, examples, chosen = training_examples("out/run", None)
    assert (task.labels, chosen.tolist()) == (["x", "y"], [0, 1, 2, 3, 4])
    assert [ids.tolist() for ids in examples.ids] == [
        [2, 6, 1, 1, 1, 3], [2, 9, 3], [2, *[6] * 6, 3], [2, 5, 3], [2, 7, 3]]
    assert training_examples("out/run", 3)[4].tolist() == [0, 2, 4]  # evenly spread
    counts = [count_task_reads("out/run", examples, chosen, torch.device("cpu"), "")[2]["weight"]
              for _ in range(2)]
    assert counts[0].sum() == pytest.approx((6 + 3 + 8 + 3 + 3) * 2)  # tokens x heads
    assert np.array_equal(*counts)


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_distances_do_not_depend_on_the_number_of_accesses(spread):
    """A few accesses a slot give nearly the true distance, though the floor is far from 0."""
    rng = np.random.default_rng(1)
    p = rng.lognormal(0, 2, 4096)
    q = p * rng.lognormal(0, spread, 4096)
    p, q = p / p.sum(), q / q.sum()
    shared = np.minimum(p, q).sum()
    true = (p * np.log(p / (0.9 * q + 0.1 * p))).sum(), shared / (2 - shared)
    for accesses in (8_000, 80_000, 800_000):
        found = class_distances(*(rng.multinomial(accesses, x, 2) for x in (p, q)))
        assert found["kl"] == pytest.approx(true[0], rel=0.2, abs=0.02)
        assert found["iou"] == pytest.approx(true[1], rel=0.2, abs=0.02)
        assert found["kl_floor"] > 0.1 or accesses > 8_000
