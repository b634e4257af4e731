"""
pkm.py against independent references: brute force over all slots, a dense layer in float64, torch's
own topk, SparseAdam and batch norm.

$ python -m pytest test_pkm.py
"""
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pkm
from tests.helpers import assert_near

torch.set_num_threads(1)  # at these sizes threads mostly wait for each other


@pytest.mark.parametrize("shape, k", [((3, 2, 700, 512), 32), ((5, 119), 32), ((4, 7), 7),
                                      ((2, 1), 1), ((0, 9), 3)])
def test_topk_is_torchs(shape, k):
    scores = torch.randn(shape) * 10.0 ** torch.randint(-44, 38, shape)
    scores[torch.rand(shape) < 0.1] = 0.0
    values, index = pkm.topk(scores, k)
    assert values.dtype == torch.float32 and index.dtype == torch.int64
    assert torch.equal(values, scores.topk(k).values)
    assert torch.equal(scores.gather(-1, index), values)
    assert all(len(set(row)) == k for row in index.flatten(0, -2).tolist())
    assert torch.equal(pkm.topk(scores.double(), k)[0], values.double())
    scores[torch.rand(shape) < 0.1] = random.choice([math.inf, -math.inf, math.nan])
    assert all(0 <= i < shape[-1] for i in pkm.topk(scores, k)[1].flatten().tolist())


@pytest.mark.parametrize("chunk", [1, 3, None])
def test_value_updates_equal_sparse_adam(chunk):
    """Of an ordinary sparse embedding bag; a row that was not read keeps its every bit."""
    torch.manual_seed(0)
    ours, bag = pkm.ValueTable(50, 8), nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
    bag.weight.data.copy_(ours.weight)
    optimizer = torch.optim.SparseAdam(bag.parameters(), lr=0.01)
    for step in range(1, 6):
        slots = torch.randint(50, (4, 2, 3), dtype=torch.int32)
        weights, target = torch.rand(4, 2, 3, requires_grad=True), torch.randn(4, 8)
        weights_ref = weights.detach().clone().requires_grad_()
        out = ours(slots, weights)
        out_ref = bag(slots.flatten(1), per_sample_weights=weights_ref.flatten(1))
        assert_near(out, out_ref, 1e-6)
        (256 * F.mse_loss(out, target)).backward()  # as a GradScaler scales it
        F.mse_loss(out_ref, target).backward()
        assert_near(weights.grad / 256, weights_ref.grad, 1e-5)
        state = [ours.weight] + [ours.exp_avg, ours.exp_avg_sq] * (step > 1)
        before = [tensor.detach().clone() for tensor in state]
        ours.step(lr=0.01, grad_scale=256, chunk=chunk)
        optimizer.step()
        optimizer.zero_grad()
        moments = optimizer.state[bag.weight]
        for mine, reference in [(ours.weight, bag.weight), (ours.exp_avg, moments["exp_avg"]),
                                (ours.exp_avg_sq, moments["exp_avg_sq"])]:
            assert_near(mine, reference, 1e-5)
        unread = [row for row in range(50) if row not in slots]
        for tensor, old in zip(state, before, strict=True):
            assert torch.equal(tensor[unread], old[unread])
            assert not torch.equal(tensor, old)


@pytest.mark.parametrize("by_row", [True, False])
def test_gradient_of_the_weights(by_row):
    values = pkm.ValueTable(400, 700).double()  # more rows than a chunk has
    slots, grad_out = torch.randint(400, (90, 8)).int(), torch.randn(90, 700).double()
    expected = torch.einsum("trd,td->tr", values.weight.detach()[slots.long()], grad_out)
    with torch.no_grad():
        assert_near(values.weights_grad(slots, grad_out, by_row), expected, 1e-12)


def small_memory(dtype=torch.float64, **sizes):
    """A memory with no parameter at a value, 0 or 1, that would hide its absence."""
    torch.manual_seed(0)
    sizes = {"d_model": 6, "n_keys": 12, "heads": 2, "topk": 4, "key_dim": 8, **sizes}
    memory = pkm.PKM(**sizes).to(dtype)
    for p in (memory.query.bias, memory.query_norm.weight, memory.query_norm.bias):
        nn.init.normal_(p)
    return memory


def test_frozen_or_unread_values_stay():
    memory = small_memory()
    x, before = torch.randn(5, 6, dtype=torch.float64), memory.values.weight.detach().clone()
    memory.values.step(lr=1.0)
    memory.values.weight.requires_grad_(False)
    memory(x).sum().backward()
    memory.values.step(lr=1.0)
    assert torch.equal(memory.values.weight, before) and memory.values.steps == 0
    assert memory.keys.grad.norm() > 0
    memory.values.weight.requires_grad_(True)
    memory(x).sum().backward()
    memory.values.step(lr=1.0)
    after = memory.values.weight.detach().clone()
    assert not torch.equal(after, before)
    memory.values.step(lr=1.0)  # nothing was read since
    assert torch.equal(memory.values.weight, after) and memory.values.steps == 1


def test_values_learn_where_all_else_is_frozen():
    """Backward must come by although nothing before the values requires a gradient."""
    memory, x = small_memory(), torch.randn(3, 6, dtype=torch.float64)
    whole = small_memory()
    for p in memory.parameters():
        p.requires_grad_(p is memory.values.weight)
    for m in (memory, whole):
        m(x).square().sum().backward()
        m.values.step(lr=0.1)
    assert not torch.equal(memory.values.weight, small_memory().values.weight)
    assert torch.equal(memory.values.weight, whole.values.weight)


def test_grad_out_is_kept_in_autocasts_dtype():
    memory, x = pkm.PKM(8, n_keys=16, heads=2, topk=4, key_dim=8), torch.randn(9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        memory(x).sum().backward()
    assert [read[2].dtype for read in memory.values.reads] == [torch.bfloat16]


@pytest.mark.parametrize("sizes, word", [({"topk": 13}, "topk"), ({"topk": 0}, "topk"),
                                         ({"key_dim": 7}, "key_dim")])
def test_impossible_sizes_are_refused(sizes, word):
    with pytest.raises(ValueError, match=word):
        small_memory(**sizes)


def test_candidates_of_32_are_119_of_1024():
    assert pkm.PKM(8, n_keys=32, topk=32, key_dim=4).pairs.shape == (2, 119)


def brute_force(query, keys, topk):
    """The topk best of all n_keys^2 slots, head by head: [(scores, slots)], (tokens, topk) each."""
    found = []
    for part, (keys_1, keys_2) in zip(query.chunk(len(keys), 1), keys, strict=True):
        first, second = (half @ k.T for half, k in zip(part.chunk(2, 1), (keys_1, keys_2)))
        scores = (first[:, :, None] + second[:, None, :]).flatten(1)  # slot = n_keys * i + j
        found.append(scores.topk(topk))
    return found


@pytest.mark.parametrize("trained", [False, True], ids=["random", "trained"])
@pytest.mark.parametrize("dtype, gap", [(torch.float64, 0), (torch.float32, 1e-4)],
                         ids=["float64", "float32"])
@pytest.mark.parametrize("n_keys, topk, heads", [(1, 1, 1), (40, 1, 3), (7, 2, 2), (12, 5, 2),
                                                 (8, 8, 2), (9, 8, 4), (32, 32, 2), (64, 32, 4)])
def test_search_equals_brute_force(n_keys, topk, heads, dtype, gap, trained):
    memory = small_memory(dtype, n_keys=n_keys, topk=topk, heads=heads)
    x = torch.randn(33, 6, dtype=dtype)
    if trained:
        dense = [p for name, p in memory.named_parameters() if name != "values.weight"]
        optimizer = torch.optim.Adam(dense, lr=0.1)
        for _ in range(8):
            F.mse_loss(memory(x), x.roll(1, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            memory.values.step(lr=0.1)
    query = memory.query_norm(memory.query(x)).detach()
    slots, weights = memory.search(query)
    assert slots.dtype == torch.int32 and slots.shape == weights.shape == (33, heads, topk)
    compared = 0
    for head, (scores, expected) in enumerate(
            brute_force(query.double(), memory.keys.double(), min(topk + 1, n_keys**2))):
        torch.testing.assert_close(weights[:, head].double(), scores[:, :topk].softmax(1),
                                   rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
        gaps = F.pad(-scores.diff(dim=1), (1, 1), value=math.inf)  # to the next better and worse
        distinct = ((gaps[:, :-1] > gap) & (gaps[:, 1:] > gap))[:, :topk]
        assert torch.equal(slots[:, head][distinct].long(), expected[:, :topk][distinct])
        compared += distinct.double().mean().item() / heads
    assert compared > 0.9


def dense_layer(parameters, table, x, topk, mask):
    """The layer without any shortcut; the table is an ordinary tensor. Returns its output, 0 at
    padded tokens, and the rows that it read."""
    x, mask = x.flatten(0, 1), slice(None) if mask is None else mask.flatten()
    query = x[mask] @ parameters["query.weight"].T + parameters["query.bias"]
    query = (query - query.mean(0)) / (query.var(0, correction=0) + 1e-5).sqrt()
    query = query * parameters["query_norm.weight"] + parameters["query_norm.bias"]
    found = brute_force(query, parameters["keys"], topk)
    out = torch.zeros_like(x)
    out[mask] = sum((scores.softmax(1)[..., None] * table[slots]).sum(1) for scores, slots in found)
    return out, torch.cat([slots.flatten() for _, slots in found]).unique()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)],
                         ids=["float64", "float32"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("micro_batches", [(3,), (2, 1, 4)], ids=["one", "accumulated"])
def test_gradients_and_updates_equal_a_dense_layer(micro_batches, padded, dtype, tolerance):
    memory = small_memory(dtype)
    parameters = {name: p.detach().double().requires_grad_()
                  for name, p in memory.named_parameters()}
    table = parameters.pop("values.weight").detach().requires_grad_()
    exp_avg, exp_avg_sq = torch.zeros_like(table), torch.zeros_like(table)
    for step in range(1, 5):
        rows = set()
        for batch in micro_batches:
            x, weight = torch.randn(2, batch, 5, 6, dtype=dtype)
            mask = torch.arange(5) < torch.randint(2, 6, (batch, 1)) if padded else None
            (memory(x.requires_grad_(), mask) * weight).sum().backward()
            x_ref = x.detach().double().requires_grad_()
            out, read = dense_layer(parameters, table, x_ref, memory.topk, mask)
            (out * weight.flatten(0, 1)).sum().backward()
            assert_near(x.grad, x_ref.grad, tolerance)
            rows.update(read.tolist())
        assert memory.values.weight.grad is None
        for name, p in parameters.items():
            ours = memory.get_parameter(name).grad
            if name == "query.bias":  # the batch norm takes it out
                assert ours.norm() < 10 * tolerance
            else:
                assert_near(ours, p.grad, tolerance)
            p.grad = None
        memory.zero_grad()
        memory.values.step(lr=0.01)
        rows = sorted(rows)
        with torch.no_grad():  # torch.optim.SparseAdam's formula
            grad = table.grad[rows]
            exp_avg[rows] += 0.1 * (grad - exp_avg[rows])
            exp_avg_sq[rows] += 0.001 * (grad**2 - exp_avg_sq[rows])
            size = 0.01 * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            table[rows] -= size * exp_avg[rows] / (exp_avg_sq[rows].sqrt() + 1e-8)
        table.grad = None
        for ours, reference in [(memory.values.weight, table), (memory.values.exp_avg, exp_avg),
                                (memory.values.exp_avg_sq, exp_avg_sq)]:
            assert_near(ours, reference, tolerance)


def test_padding_changes_no_real_token_and_no_value():
    """The first step is without padding: it gives every row a momentum that padding could use."""
    x, weight = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([[6], [2], [4]])
    results = []
    for pad in (0.0, 50.0, None):  # None: the real tokens alone
        memory = small_memory()
        (memory(torch.randn(400, 6, dtype=torch.float64)) ** 2).sum().backward()
        memory.values.step(lr=0.1)
        memory.zero_grad()
        out = memory(x[mask]) if pad is None else memory(x.where(mask[..., None], pad), mask)[mask]
        (out * weight[mask]).sum().backward()
        memory.values.step(lr=0.1)
        grads = [p.grad for p in memory.parameters() if p.grad is not None]
        results.append([out, *grads, *memory.buffers(), memory.values.weight])
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_compiled_inference_is_one_graph(dtype, tolerance):
    memory, x = small_memory(dtype).eval(), torch.randn(2, 5, 6, dtype=dtype)
    with torch.no_grad():
        compiled = torch.compile(memory, fullgraph=True)
        torch.testing.assert_close(compiled(x), memory(x), rtol=tolerance, atol=tolerance)


def test_bfloat16_values_change_little():
    memory, x = pkm.PKM(64, n_keys=32, heads=4, topk=8, key_dim=16).eval(), torch.randn(50, 64)
    with torch.no_grad():
        expected = memory(x)
        memory.values.to(torch.bfloat16)
        assert memory(x).dtype == torch.float32
        assert_near(memory(x), expected, 0.01)
        assert not torch.equal(memory(x), expected)
