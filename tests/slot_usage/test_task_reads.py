"""
How far apart the slots of two classes are.
"""
import math

import numpy as np
import pytest

from lib.common.errors import UserError
from lib.slot_usage.task_reads import class_distances


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
