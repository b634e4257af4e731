"""
Compare pkm.py with independent references, in the order of the code.

The references are brute force over all slots, a dense layer in float64, and SparseAdam. Other modes
(torch.compile, half precision, several ranks) are in tests/test_modes.py.

$ python -m pytest test_pkm.py
"""
import ast
import doctest
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pkm
from lib import usage
from pkm import PKM, LazyAdam, MaskedBatchNorm, ValueTable, candidates

torch.set_num_threads(1)  # at these sizes threads mostly wait for each other


def small_memory(dtype=torch.float64, **sizes):
    """Make a memory without biases of 0 and scales of 1, which would hide their absence."""
    torch.manual_seed(0)
    sizes = {"d_model": 6, "n_keys": 12, "heads": 2, "topk": 4, "key_dim": 8, **sizes}
    memory = PKM(**sizes).to(dtype)
    for p in (memory.query.bias, memory.query_norm.weight, memory.query_norm.bias):
        nn.init.normal_(p)
    return memory


def assert_near(ours, reference, tolerance):
    """Assert that the difference is within `tolerance` of the reference's norm."""
    difference = (ours.detach().double() - reference.detach().double()).norm()
    assert difference <= tolerance * reference.norm(), f"{difference / reference.norm():.1e}"


def brute_force(query, keys, topk):
    """Find the topk best of all n_keys^2 slots.

    Returns a list of (scores, slots), one pair a head, both (tokens, topk).
    """
    best = []
    for part, (keys_1, keys_2) in zip(query.chunk(len(keys), 1), keys, strict=True):
        first, second = (half @ k.T for half, k in zip(part.chunk(2, 1), (keys_1, keys_2)))
        scores = (first[:, :, None] + second[:, None, :]).flatten(1)  # slot = n_keys * i + j
        best.append(scores.topk(topk))
    return best


# the example and the files

def test_the_docstrings_examples_run():
    text, names = pkm.__doc__ + usage.__doc__, vars(pkm) | vars(usage)
    examples = doctest.DocTestParser().get_doctest(text, names, "pkm", None, 0)
    assert doctest.DocTestRunner().run(examples, clear_globs=False).failed == 0
    model, sparse = examples.globs["model"], examples.globs["sparse"]
    assert sparse.state[model.memory.values.weight]["step"] == 2
    assert examples.globs["schedule"].last_epoch == 2
    assert len(examples.globs["found"]) == 5 and 0 < examples.globs["metrics"]["top1_mu"] < 1


@pytest.mark.parametrize("module, needed", [(pkm, {"torch"}), (usage, {"numpy", "torch"})])
def test_the_two_files_need_nothing_of_this_project(module, needed):
    nodes = list(ast.walk(ast.parse(Path(module.__file__).read_text())))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import)
                for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} - sys.stdlib_module_names == needed


# the search

def test_candidates_of_32_are_119_of_1024():
    pairs = [(i, j) for i in range(32) for j in range(32) if (i + 1) * (j + 1) <= 32]
    assert candidates(32, "cpu").T.tolist() == list(map(list, pairs)) and len(pairs) == 119


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_initialization(device):
    """Draw sub-keys and values as XLM does, and Xavier-uniform queries (our reading)."""
    with torch.device(device):
        memory = PKM(64, n_keys=64, heads=4, topk=8, key_dim=64)
    if device == "meta":  # then in torch's way
        memory.to_empty(device="cpu")
        for module in memory.modules():
            module.reset_parameters()
    assert torch.equal(memory.query_norm.running_var, torch.ones(256))
    assert 0.9 / 8 < memory.query.bias.abs().max() <= 1 / 8
    bound = math.sqrt(6 / (64 + 4 * 64))
    assert 0.99 * bound < memory.query.weight.abs().max() <= bound
    assert 0.99 * 32**-0.5 < memory.keys.abs().max() <= 32**-0.5
    assert memory.values.weight.std().item() == pytest.approx(64**-0.5, rel=0.01)
    with torch.device("meta"):
        memory = PKM(768)
    assert (memory.keys.shape, memory.topk, len(memory.values.weight)) == ((4, 2, 512, 128), 32,
                                                                           512**2)


@pytest.mark.parametrize("trained", [False, True], ids=["random", "trained"])
@pytest.mark.parametrize("dtype, gap", [(torch.float64, 0), (torch.float32, 1e-4)],
                         ids=["float64", "float32"])
@pytest.mark.parametrize("n_keys, topk, heads", [(1, 1, 1), (40, 1, 3), (7, 2, 2), (12, 5, 2),
                                                 (8, 8, 2), (9, 8, 4), (32, 32, 2), (64, 32, 4)])
def test_search_equals_brute_force(n_keys, topk, heads, dtype, gap, trained):
    memory = small_memory(dtype, n_keys=n_keys, topk=topk, heads=heads)
    x = torch.randn(33, 6, dtype=dtype)
    if trained:
        optimizers = (torch.optim.Adam(memory.parameters(), lr=0.1),
                      LazyAdam([memory.values], lr=0.1))
        for _ in range(8):
            F.mse_loss(memory(x), x.roll(1, 1)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
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


# the layer, its gradients and its updates

def dense_layer(parameters, table, x, topk, mask):
    """Compute the layer without any shortcut, from an ordinary tensor as table.

    Returns the output, 0 at padded tokens, and the rows that were read.
    """
    x, mask = x.flatten(0, 1), slice(None) if mask is None else mask.flatten()
    query = x[mask] @ parameters["query.weight"].T + parameters["query.bias"]
    query = (query - query.mean(0)) / (query.var(0, correction=0) + 1e-5).sqrt()
    query = query * parameters["query_norm.weight"] + parameters["query_norm.bias"]
    best = brute_force(query, parameters["keys"], topk)
    out = torch.zeros_like(x)
    out[mask] = sum((scores.softmax(1)[..., None] * table[slots]).sum(1) for scores, slots in best)
    return out, torch.cat([slots.flatten() for _, slots in best]).unique()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)],
                         ids=["float64", "float32"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("micro_batches", [(3,), (2, 1, 4)], ids=["one", "accumulated"])
def test_gradients_and_updates_equal_a_dense_layer(micro_batches, padded, dtype, tolerance):
    memory = small_memory(dtype)
    optimizer = LazyAdam([memory.values], lr=0.01)
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
        optimizer.step()
        rows = sorted(rows)
        with torch.no_grad():  # torch.optim.SparseAdam's formula
            grad = table.grad[rows]
            exp_avg[rows] += 0.1 * (grad - exp_avg[rows])
            exp_avg_sq[rows] += 0.001 * (grad**2 - exp_avg_sq[rows])
            size = 0.01 * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            table[rows] -= size * exp_avg[rows] / (exp_avg_sq[rows].sqrt() + 1e-8)
        table.grad = None
        state = optimizer.state[memory.values.weight]
        for ours, reference in [(memory.values.weight, table), (state["exp_avg"], exp_avg),
                                (state["exp_avg_sq"], exp_avg_sq)]:
            assert_near(ours, reference, tolerance)


@pytest.mark.parametrize("dim", [8, 2**16])  # all rows are updated at a time, or 4
def test_value_updates_equal_sparse_adam(dim):
    """Compare with a sparse embedding bag. A row that was not read keeps every bit."""
    torch.manual_seed(0)
    ours, bag = ValueTable(50, dim), nn.EmbeddingBag(50, dim, mode="sum", sparse=True)
    bag.weight.data.copy_(ours.weight)
    optimizer = LazyAdam([ours], lr=0.01)
    reference = torch.optim.SparseAdam(bag.parameters(), lr=0.01)
    for step in range(1, 6):
        slots = torch.randint(50, (4, 2, 3), dtype=torch.int32)
        weights, target = torch.rand(4, 2, 3, requires_grad=True), torch.randn(4, dim)
        weights_ref = weights.detach().clone().requires_grad_()
        out = ours(slots, weights)
        out_ref = bag(slots.flatten(1), per_sample_weights=weights_ref.flatten(1))
        assert_near(out, out_ref, 1e-6)
        (256 * F.mse_loss(out, target)).backward()  # as a GradScaler scales it
        F.mse_loss(out_ref, target).backward()
        assert_near(weights.grad / 256, weights_ref.grad, 1e-5)
        moments = optimizer.state[ours.weight]
        tensors = [ours.weight, *(moments[name] for name in list(moments)[1:])]
        before = [tensor.detach().clone() for tensor in tensors]
        optimizer.step(grad_scale=256)
        reference.step()
        reference.zero_grad()
        assert_near(ours.weight, bag.weight, 1e-5)
        for name in ("exp_avg", "exp_avg_sq"):
            assert_near(moments[name], reference.state[bag.weight][name], 1e-5)
        unread = [row for row in range(50) if row not in slots]
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor[unread], old[unread])
            assert not torch.equal(tensor, old)


def test_another_rule_updates_the_rows():
    """Its state is its own, beside the number of steps."""
    def momentum(weight, row, grad, state, group):
        sums = state.setdefault("sums", {})
        for r, g in zip(row.tolist(), grad):
            sums[r] = 0.5 * sums.get(r, 0) + g
            weight[r] -= group["lr"] / state["step"] * sums[r]

    table = ValueTable(6, 4)
    optimizer, expected = LazyAdam([table], lr=0.1, rule=momentum), table.weight.clone()
    for _ in range(2):
        table(torch.tensor([[[1, 3]]]), torch.ones(1, 1, 2)).sum().backward()
        optimizer.step()
    expected[[1, 3]] -= 0.1 * (1 + 1.5 / 2)
    assert_near(table.weight, expected, 1e-6)


def test_statistics_are_those_of_the_real_tokens():
    ours, reference = MaskedBatchNorm(4).double(), nn.BatchNorm1d(4).double()
    for _ in range(2):
        x, real = torch.randn(30, 4, dtype=torch.float64), torch.rand(30) < 0.6
        assert_near(ours(x, real[:, None])[real], reference(x[real]), 1e-12)
    for a, b in zip(ours.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("why", ["unseen by the loss", "weight 0, as of padding"])
def test_tokens_that_do_not_count_move_no_row(why):
    """Give all rows a momentum first, by which reads without a gradient could move theirs."""
    values = ValueTable(6, 4)
    optimizer, weights = LazyAdam([values], lr=0.1), torch.ones(3, 1, 2)
    values(torch.arange(6).view(3, 1, 2), weights).sum().backward()
    optimizer.step()
    before = values.weight.detach().clone()
    if why.startswith("weight"):
        weights[2] = 0
    out = values(torch.arange(6).view(3, 1, 2), weights)
    (out if why.startswith("weight") else out[:2]).sum().backward()
    optimizer.step()
    assert torch.equal((values.weight != before).any(1), torch.arange(6) < 4)


@pytest.mark.parametrize("compiled", [False, True])
def test_values_learn_where_all_else_is_frozen(compiled):
    """Run backward where nothing before the values requires a gradient."""
    memory, x = small_memory(), torch.randn(3, 6, dtype=torch.float64)
    whole = small_memory()
    memory.requires_grad_(False)
    for m in (memory, whole):
        optimizer = LazyAdam([m.values], lr=0.1)
        (torch.compile(m, backend="aot_eager") if compiled else m)(x).square().sum().backward()
        optimizer.step()
    assert not torch.equal(memory.values.weight, small_memory().values.weight)
    assert_near(memory.values.weight, whole.values.weight, 1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_no_token_at_all(training):
    memory, x = small_memory().train(training), torch.randn(2, 3, 6, dtype=torch.float64)
    out = memory(x.requires_grad_(), torch.zeros(2, 3, dtype=torch.bool))
    out.sum().backward()
    optimizer = LazyAdam([memory.values])
    optimizer.step()
    assert not out.any() and not x.grad.any() and not optimizer.state
    assert all(b.isfinite().all() for b in memory.buffers())
    assert all(p.grad.isfinite().all() for p in memory.parameters() if p.requires_grad)
