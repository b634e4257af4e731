"""
pkm.py against independent references, in its order: brute force over all slots, a dense layer in
float64, torch's own SparseAdam; then everything that a torch module and optimizer should survive.

$ python -m pytest test_pkm.py
"""
import ast
import copy
import doctest
import io
import math
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import pkm
from pkm import PKM, LazyAdam, ValueTable

torch.set_num_threads(1)  # at these sizes threads mostly wait for each other


def small_memory(dtype=torch.float64, **sizes):
    """A memory with no parameter at a value, 0 or 1, that would hide its absence."""
    torch.manual_seed(0)
    sizes = {"d_model": 6, "n_keys": 12, "heads": 2, "topk": 4, "key_dim": 8, **sizes}
    memory = PKM(**sizes).to(dtype)
    for p in (memory.query.bias, memory.query_norm.weight, memory.query_norm.bias):
        nn.init.normal_(p)
    return memory


def assert_near(ours, reference, tolerance):
    """Difference within `tolerance` of the reference's norm."""
    difference = (ours.detach().double() - reference.detach().double()).norm()
    assert difference <= tolerance * reference.norm(), f"{difference / reference.norm():.1e}"


def brute_force(query, keys, topk):
    """The topk best of all n_keys^2 slots, head by head: [(scores, slots)], (tokens, topk) each."""
    best = []
    for part, (keys_1, keys_2) in zip(query.chunk(len(keys), 1), keys, strict=True):
        first, second = (half @ k.T for half, k in zip(part.chunk(2, 1), (keys_1, keys_2)))
        scores = (first[:, :, None] + second[:, None, :]).flatten(1)  # slot = n_keys * i + j
        best.append(scores.topk(topk))
    return best


# the example and the file itself

def test_the_docstrings_example_runs():
    examples = doctest.DocTestParser().get_doctest(pkm.__doc__, vars(pkm).copy(), "pkm", None, 0)
    assert len([e for e in examples.examples if "class" not in e.source]) <= 8
    assert doctest.DocTestRunner().run(examples, clear_globs=False).failed == 0
    model, values = examples.globs["model"], examples.globs["values"]
    assert values.state[model.memory.values.weight]["step"] == 1


def test_it_needs_nothing_but_torch():
    nodes = list(ast.walk(ast.parse(Path(pkm.__file__).read_text())))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import)
                for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} - sys.stdlib_module_names == {"torch"}


# the search

@pytest.mark.parametrize("sizes, word", [({"topk": 13}, "topk"), ({"topk": 0}, "topk"),
                                         ({"key_dim": 7}, "key_dim")])
def test_impossible_sizes_are_refused(sizes, word):
    with pytest.raises(ValueError, match=word):
        small_memory(**sizes)


def test_candidates_of_32_are_119_of_1024():
    assert PKM(8, n_keys=32, topk=32, key_dim=4).pairs.shape == (2, 119)


def test_initialization():
    """Section 5.1 and XLM's: queries Xavier-uniform, sub-keys uniform, values normal."""
    memory = PKM(64, n_keys=64, heads=4, topk=8, key_dim=64)
    bound = math.sqrt(6 / (64 + 4 * 64))
    assert 0.99 * bound < memory.query.weight.abs().max() <= bound
    assert 0.99 * 32**-0.5 < memory.keys.abs().max() <= 32**-0.5
    assert memory.values.weight.std().item() == pytest.approx(64**-0.5, rel=0.01)


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
    """The layer without any shortcut; the table is an ordinary tensor. Returns its output, 0 at
    padded tokens, and the rows that it read."""
    x, mask = x.flatten(0, 1), slice(None) if mask is None else mask.flatten()
    query = x[mask] @ parameters["query.weight"].T + parameters["query.bias"]
    query = (query - query.mean(0)) / (query.var(0, correction=0) + 1e-5).sqrt()
    query = query * parameters["query_norm.weight"] + parameters["query_norm.bias"]
    best = brute_force(query, parameters["keys"], topk)
    out = torch.zeros_like(x)
    out[mask] = sum((scores.softmax(1)[..., None] * table[slots]).sum(1) for scores, slots in best)
    return out, torch.cat([slots.flatten() for _, slots in best]).unique()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)],
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


@pytest.mark.parametrize("chunk", [1, 24, 2**18])  # values: 1, 3, all rows
def test_value_updates_equal_sparse_adam(monkeypatch, chunk):
    """Of an ordinary sparse embedding bag; a row that was not read keeps its every bit."""
    monkeypatch.setattr(pkm, "CHUNK", chunk)
    torch.manual_seed(0)
    ours, bag = ValueTable(50, 8), nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
    bag.weight.data.copy_(ours.weight)
    optimizer = LazyAdam([ours], lr=0.01)
    reference = torch.optim.SparseAdam(bag.parameters(), lr=0.01)
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


@pytest.mark.parametrize("private", [True, False])
def test_gradient_of_the_weights(monkeypatch, private):
    if not private:
        monkeypatch.setattr(torch.ops, "aten", None)
    values = ValueTable(400, 700).double()  # more rows than a chunk has
    slots, grad_out = torch.randint(400, (290, 8)).int(), torch.randn(290, 700).double()
    weights = torch.rand(290, 8, dtype=torch.float64)
    expected = torch.einsum("trd,td->tr", values.weight.detach()[slots.long()], grad_out)
    with torch.no_grad():
        grad = pkm.read_backward(grad_out, values.weight, slots, weights, values.number, False,
                                 False)
    assert_near(grad, expected, 1e-12)


@pytest.mark.parametrize("tokens", [1, 256, 257, 700])
def test_gradient_of_the_scores_of_many_tokens(tokens):
    """A chunk of them at a time, as autograd has it of all scores at once."""
    memory, grads = small_memory(), []
    query = torch.randn(tokens, 16, dtype=torch.float64, requires_grad=True)
    slots, weights = memory.search(query)
    out = torch.randn_like(weights)
    grads.append(torch.autograd.grad((weights * out).sum(), (query, memory.keys)))
    halves = query.view(tokens, 2, 2, 4)  # (tokens, heads, 2, half)
    first, second = (torch.einsum("thd,hkd->thk", halves[:, :, i], memory.keys[:, i])
                     for i in range(2))
    scores = first.gather(2, slots.long() // 12) + second.gather(2, slots.long() % 12)
    grads.append(torch.autograd.grad((scores.softmax(2) * out).sum(), (query, memory.keys)))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_padding_changes_no_real_token_and_no_value():
    """The first step is without padding: it gives every row a momentum that padding could use."""
    x, weight = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([[6], [2], [4]])
    results = []
    for pad in (0.0, 50.0, None):  # None: the real tokens alone
        memory = small_memory()
        optimizer = LazyAdam([memory.values], lr=0.1)
        (memory(torch.randn(400, 6, dtype=torch.float64)) ** 2).sum().backward()
        optimizer.step()
        memory.zero_grad()
        out = memory(x[mask]) if pad is None else memory(x.where(mask[..., None], pad), mask)[mask]
        (out * weight[mask]).sum().backward()
        optimizer.step()
        grads = [p.grad for p in memory.parameters() if p.grad is not None]
        results.append([out, *grads, *memory.buffers(), memory.values.weight])
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)


def test_tokens_that_the_loss_does_not_see_move_no_row():
    """Though the momentum of an earlier step could move the rows that they read."""
    values = ValueTable(6, 4)
    optimizer, weights = LazyAdam([values], lr=0.1), torch.ones(3, 1, 2)
    values(torch.arange(6).view(3, 1, 2), weights).sum().backward()
    optimizer.step()
    before = values.weight.detach().clone()
    values(torch.arange(6).view(3, 1, 2), weights)[:2].sum().backward()
    optimizer.step()
    assert torch.equal((values.weight != before).any(1), torch.arange(6) < 4)


def test_a_mask_of_ones_and_zeros_is_a_mask():
    memory, x = small_memory().eval(), torch.randn(3, 5, 6, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([[5], [2], [1]])
    assert torch.equal(memory(x, mask.long()), memory(x, mask))
    assert not memory(x, mask.long())[~mask].any()


def test_frozen_or_unread_values_stay():
    memory = small_memory()
    optimizer, table = LazyAdam([memory.values], lr=1.0), memory.values.weight
    x, before = torch.randn(5, 6, dtype=torch.float64), table.detach().clone()
    optimizer.step()
    table.requires_grad_(False)
    memory(x).sum().backward()
    optimizer.step()
    assert torch.equal(table, before) and not optimizer.state[table]
    assert memory.keys.grad.norm() > 0
    table.requires_grad_(True)
    memory(x).sum().backward()
    optimizer.step()
    after = table.detach().clone()
    assert not torch.equal(after, before)
    optimizer.step()  # nothing was read since
    assert torch.equal(table, after) and optimizer.state[table]["step"] == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_values_learn_where_all_else_is_frozen(compiled):
    """Backward must come by although nothing before the values requires a gradient."""
    memory, x = small_memory(), torch.randn(3, 6, dtype=torch.float64)
    whole = small_memory()
    for p in memory.parameters():
        p.requires_grad_(p is memory.values.weight)
    for m in (memory, whole):
        (torch.compile(m) if compiled else m)(x).square().sum().backward()
        LazyAdam([m.values], lr=0.1).step()
    assert not torch.equal(memory.values.weight, small_memory().values.weight)
    assert_near(memory.values.weight, whole.values.weight, 1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_no_token_at_all(training):
    memory, x = small_memory().train(training), torch.randn(2, 3, 6, dtype=torch.float64)
    out = memory(x.requires_grad_(), torch.zeros(2, 3, dtype=torch.bool))
    out.sum().backward()
    LazyAdam([memory.values]).step()
    assert not out.any() and not x.grad.any()


# what a module of torch's and an optimizer of torch's can do

def deep(n_layers=3, dtype=torch.float32):
    """A chain of memories with something before and after each."""
    torch.manual_seed(0)
    layers = [part for _ in range(n_layers) for part in
              (nn.Linear(8, 8), PKM(8, n_keys=16, heads=2, topk=4, key_dim=8), nn.LayerNorm(8))]
    model = nn.Sequential(*layers).to(dtype)
    tables = [m for m in model.modules() if isinstance(m, ValueTable)]
    return model, (torch.optim.Adam(model.parameters(), lr=0.01), LazyAdam(tables, lr=0.01)), tables


def test_compiled_training_equals_eager():
    """One graph; 20 steps of several memories, whose buffers inductor shares."""
    torch.compiler.reset()
    results = []
    for compiled in (False, True):
        model, optimizers, tables = deep()
        call = torch.compile(model, fullgraph=True) if compiled else model
        losses = []
        for step in range(20):
            x = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(step))
            loss = F.mse_loss(call(x), x.roll(1, 2))
            loss.backward()
            losses.append(loss.item())
            if step == 0:
                grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                kept = [part.clone() for table in tables for read in table.reads for part in read]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        results.append((losses, grads, kept, [table.weight for table in tables]))
    (losses, grads, kept, values), (losses_2, grads_2, kept_2, values_2) = results
    for a, b in zip([*grads, *kept], [*grads_2, *kept_2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses_2, losses, rtol=0, atol=1e-3)
    for a, b in zip(values, values_2, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)


def test_few_graphs_for_many_lengths_and_many_tables():
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    memory = torch.compile(small_memory(), backend=counter)
    for tokens in range(10, 16):
        memory(torch.randn(tokens, 6, dtype=torch.float64)).sum().backward()
    assert counter.frame_count == 2  # one for the first length, one for all others
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    memories = [small_memory() for _ in range(4)]
    for memory in memories:
        memory.compile(backend=counter)
        memory(torch.randn(7, 6, dtype=torch.float64)).sum().backward()
    assert counter.frame_count == 1 and all(len(m.values.reads) == 1 for m in memories)


def test_torch_checks_the_ops():
    """Its own checker: schemas, fake kernels, autograd, ahead-of-time dispatch."""
    values, slots = ValueTable(20, 8), torch.randint(20, (5, 3), dtype=torch.int32)
    weights = torch.rand(5, 3, requires_grad=True)
    torch.library.opcheck(pkm.read, (values.weight, slots, weights, values.number, torch.float32))


def test_values_changed_before_backward_are_an_error():
    memory, x = small_memory(), torch.randn(5, 6, dtype=torch.float64)
    out = memory(x).sum()
    with torch.no_grad():
        memory.values.weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_functional_call_with_other_values():
    """Gradients are of those values; the table's own reads are not touched."""
    memory, x = small_memory(), torch.randn(5, 6, dtype=torch.float64)
    (2 * memory(x)).sum().backward()
    expected = memory.keys.grad.clone()
    memory.zero_grad()
    memory.values.reads.clear()
    values = (2 * memory.values.weight).detach().requires_grad_()
    torch.func.functional_call(memory, {"values.weight": values}, (x,)).sum().backward()
    assert_near(memory.keys.grad, expected, 1e-12)
    assert not memory.values.reads


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_compiled_inference_is_one_graph(dtype, tolerance):
    memory, x = small_memory(dtype).eval(), torch.randn(2, 5, 6, dtype=dtype)
    with torch.no_grad():
        compiled = torch.compile(memory, fullgraph=True)
        torch.testing.assert_close(compiled(x), memory(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("how", ["trace", "export", "fake"])
def test_traced_and_exported_models_read_other_slots_for_another_input(how):
    memory = small_memory().eval()
    x, other = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    if how == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor(other)
            assert memory(fake).shape == memory.train()(fake).shape == other.shape
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other_model = (torch.jit.trace(memory, x) if how == "trace" else
                       torch.export.export(memory, (x,)).module())
    torch.testing.assert_close(other_model(other), memory(other), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Of a whole model, and of the values alone."""
    x = torch.randn(50, 64)
    memory = PKM(64, n_keys=32, heads=4, topk=8, key_dim=16).eval()
    with torch.no_grad():
        expected = memory(x)
        memory.values.to(dtype)
        assert memory(x).dtype == torch.float32
        assert_near(memory(x), expected, 0.01)
        assert not torch.equal(memory(x), expected)
    memory = memory.to(dtype).train()
    before = memory.values.weight.detach().clone()
    out = memory(x.to(dtype))
    out.float().square().mean().backward()
    LazyAdam([memory.values], lr=0.1).step()
    assert out.dtype == memory.keys.grad.dtype == dtype and memory.keys.grad.any()
    assert not torch.equal(memory.values.weight, before)


def test_scores_of_a_half_precision_memory_are_float32s():
    """No ties by rounding: the same slots and weights as from the same numbers in float32."""
    memory = small_memory(torch.bfloat16, n_keys=64, topk=8).eval()
    query = torch.randn(200, 16, dtype=torch.bfloat16)
    slots, weights = memory.search(query)
    expected = memory.float().search(query.float())
    assert torch.equal(slots, expected[0]) and torch.equal(weights, expected[1])


def test_autocast():
    """grad_out is kept in its dtype; scores and softmax are float32's, for what the query is."""
    memory, x = PKM(8, n_keys=16, heads=2, topk=4, key_dim=8).eval(), torch.randn(9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        query = memory.query(x)
        memory(x).sum().backward()
    (slots, weights, grad_out), = memory.values.reads
    assert (query.dtype, weights.dtype, grad_out.dtype) == (torch.bfloat16, torch.float32,
                                                            torch.bfloat16)
    expected = memory.search(memory.query_norm(query.float()))
    assert torch.equal(slots, expected[0].flatten(1))
    assert torch.equal(weights, expected[1].flatten(1))


def test_activation_checkpointing():
    x, grads = torch.randn(4, 8), []
    for recompute in (False, True):
        model, _, tables = deep()
        if recompute:
            out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        else:
            out = model(x)
        out.square().sum().backward()
        assert [len(table.reads) for table in tables] == [1, 1, 1]
        grads.append(model[0].weight.grad)
    assert torch.equal(*grads)


def test_only_backward_stores_reads():
    """Not a forward pass alone, nor torch.autograd.grad, nor a backward pass to other inputs."""
    memory, x = small_memory(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    memory(x)
    torch.autograd.grad(memory(x).sum(), x)
    torch.autograd.grad(memory(x).sum(), [x, memory.values.weight], allow_unused=True)
    memory(x).sum().backward(inputs=[x])
    assert not memory.values.reads
    memory(x).sum().backward()
    assert len(memory.values.reads) == 1


def test_zero_grad_drops_pending_reads():
    model, (_, optimizer), tables = deep()
    before = [table.weight.detach().clone() for table in tables]
    model(torch.randn(4, 8)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(t.weight, old) for t, old in zip(tables, before, strict=True))


def test_reads_that_pile_up_warn_once(monkeypatch):
    monkeypatch.setattr(pkm, "WARN_AT", 3)
    memory = small_memory()
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(7):
            memory(torch.randn(5, 6, dtype=torch.float64)).sum().backward()
    assert len(caught) == 1 and "LazyAdam" in str(caught[0].message)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_a_model_of_its_own(how):
    """Taken between backward and step: both go on with the same reads."""
    model, optimizers, tables = deep()
    model(torch.randn(4, 8)).sum().backward()
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    others = [m for m in other.modules() if isinstance(m, ValueTable)]
    before = others[0].weight.detach().clone()
    optimizers[1].step()
    assert torch.equal(others[0].weight, before)
    LazyAdam(others, lr=0.01).step()
    for ours, theirs in zip(tables, others, strict=True):
        assert torch.equal(ours.weight, theirs.weight)
    other(torch.randn(4, 8)).sum().backward()
    assert others[0].reads and not tables[0].reads


def test_state_dicts_are_copies():
    def train(model, optimizer, steps):
        for step in range(steps):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            optimizer.step()

    model, (_, optimizer), _ = deep()
    train(model, optimizer, 3)
    saved, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    kept = copy.deepcopy(saved)
    train(model, optimizer, 2)
    again, (_, other), _ = deep()
    again.load_state_dict(weights)
    other.load_state_dict(saved)
    train(again, other, 2)
    assert torch.equal(again[1].values.weight, model[1].values.weight)
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(torch.as_tensor(saved["state"][0][name]),
                           torch.as_tensor(kept["state"][0][name]))


def test_moments_follow_the_table():
    model, (_, optimizer), tables = deep()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    model.double()
    model(torch.randn(4, 8).double()).sum().backward()
    optimizer.step()
    assert optimizer.state[tables[0].weight]["exp_avg"].dtype == torch.float64


def test_parameter_groups_and_schedulers():
    model, _, tables = deep()
    before = [table.weight.detach().clone() for table in tables]
    optimizer = LazyAdam([{"params": tables[:1]}, {"params": tables[1:], "lr": 0.0}], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
    for _ in range(2):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.005), 0.0]
    moved = [not torch.equal(t.weight, old) for t, old in zip(tables, before, strict=True)]
    assert moved == [True, False, False]


def test_a_closure_is_the_step():
    results = []
    for closure in (False, True):
        model, (_, optimizer), tables = deep()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))

        def loss(model=model, x=x):
            value = model(x).square().sum()
            value.backward()
            return value
        returned = optimizer.step(loss) if closure else (loss(), optimizer.step())[0]
        results.append((returned, tables[0].weight))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_settings_of_a_group_are_used():
    """betas and eps, against torch.optim.SparseAdam."""
    ours, bag = ValueTable(9, 4), nn.EmbeddingBag(9, 4, mode="sum", sparse=True)
    bag.weight.data.copy_(ours.weight)
    settings = {"lr": 0.1, "betas": (0.5, 0.9), "eps": 0.01}
    optimizers = LazyAdam([ours], **settings), torch.optim.SparseAdam(bag.parameters(), **settings)
    for _ in range(3):
        slots, weights = torch.randint(9, (5, 1, 2)), torch.rand(5, 1, 2)
        ours(slots, weights).square().sum().backward()
        bag(slots.flatten(1), per_sample_weights=weights.flatten(1)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_near(ours.weight, bag.weight, 1e-5)


def test_an_optimizer_minds_its_own_tables():
    """All that share a weight, no other."""
    model, _, tables = deep()
    first, second = LazyAdam(tables[:1], lr=0.1), LazyAdam(tables[1:2], lr=0.1)
    tables[2].weight = tables[1].weight
    model(torch.randn(4, 8)).square().sum().backward()
    second.step()
    assert tables[0].reads and not tables[1].reads and not tables[2].reads
    first.zero_grad()
    assert not tables[0].reads
    with pytest.raises(TypeError, match="takes ValueTables, found Parameter"):
        LazyAdam(model.parameters())


def test_a_table_with_another_weight_is_refused_in_words():
    memory = small_memory()
    optimizer = LazyAdam([memory.values])
    memory.values.load_state_dict(copy.deepcopy(memory.values.state_dict()), assign=True)
    with pytest.raises(RuntimeError, match="another weight tensor"):
        optimizer.step()


def test_a_model_without_memory_has_nothing_to_update():
    LazyAdam([]).step()
