"""
The metrics of section 3.2, with known answers.
"""
import math

import numpy as np
import pytest
import torch

from lib.usage import count_reads, usage_metrics
from tests.helpers import tiny_bert


def test_usage_metrics_known_answers():
    one, every = np.zeros(64), np.ones(64)
    one[5] = 10
    m = usage_metrics(one, one, one, topk=1, effective_k=10)
    assert m["mu"] == m["top1_mu"] == 1 / 64 and m["accesses"] == 10 and m["effective_k"] == 1
    assert m["kl_u"] == m["kl_w"] == pytest.approx(math.log(64))
    assert m["mu_uniform"] == m["top1_mu_uniform"] == pytest.approx(1 - (63 / 64) ** 10)
    m = usage_metrics(4 * every, every, every / 3, topk=4, effective_k=64 * 2.5)
    assert m["mu"] == m["top1_mu"] == 1 and abs(m["kl_u"]) + abs(m["kl_w"]) < 1e-12
    assert usage_metrics(np.ones(2), np.ones(2), np.ones(2), 8, 1)["mu_uniform"] == 1  # 2 rows
    assert m["mu_uniform"] == pytest.approx(1 - (60 / 64) ** 64) and m["effective_k"] == 2.5
    four = np.repeat([10.0, 0.0], [4, 60])  # every access reads the same 4 slots
    m = usage_metrics(four, one, np.repeat([4, 3, 2, 1, 0.0], [1, 1, 1, 1, 60]), 4, 30)
    assert m["mu"] == 4 / 64 and m["kl_u"] == pytest.approx(math.log(64 / 4))
    assert math.log(64 / 4) < m["kl_w"] < math.log(64)
    half = np.repeat([2.0, 0.0], 32)  # slots that are never read add nothing
    m = usage_metrics(half, half, half, topk=1, effective_k=64)
    assert m["mu"] == 0.5 and m["kl_u"] == pytest.approx(math.log(2))


def test_effective_k_of_known_weights():
    """One slot that has it all: 1; all alike: topk. Averaged over the accesses."""
    model = tiny_bert(memory_layers=(2,)).eval()
    slots = torch.tensor([[[0, 1, 2], [3, 4, 5]]], dtype=torch.int32)
    weights = torch.tensor([[[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]])
    with torch.no_grad(), count_reads(model) as counts:
        model.bert.layers[1].memory.values(slots, weights)
    metrics = usage_metrics(**counts[2])
    assert metrics["effective_k"] == pytest.approx(2) and metrics["accesses"] == 2


def test_padding_is_not_counted(monkeypatch):
    """Count a padded batch as its real tokens, also where padding is looked up, as on GPUs."""
    memory = tiny_bert(memory_layers=(1,)).bert.layers[0].memory.eval()
    x, mask = torch.randn(3, 5, 8), torch.arange(5) < torch.tensor([[5], [2], [1]])
    counts = []
    for looked_up, args in ((False, (x[mask],)), (False, (x, mask)), (True, (x, mask))):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda looked_up=looked_up: looked_up)
        model = tiny_bert(memory_layers=(1,))
        model.bert.layers[0].memory = memory
        with torch.no_grad(), count_reads(model) as counted:
            memory(*args)
        counts.append(counted[1])
    for other in counts[1:]:
        for name in counts[0]:
            np.testing.assert_allclose(other[name], counts[0][name], rtol=1e-6)
