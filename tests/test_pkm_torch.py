"""
Test that the memory does what torch expects of a module and of an optimizer.

This is compilation, export, copies, half precision, activation checkpointing, closures, schedulers.
"""
import copy
import io
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import values
from pkm import PKM, LazyAdam, ValueTable
from test_pkm import assert_near, small_memory


def deep(n_layers=3, dtype=torch.float32):
    """Make a chain of memories with something before and after each.

    It ends in a layer norm. The sum of its whole output is constant, and has no gradient.
    """
    torch.manual_seed(0)
    layers = [part for _ in range(n_layers) for part in
              (nn.Linear(8, 8), PKM(8, n_keys=16, heads=2, topk=4, key_dim=8), nn.LayerNorm(8))]
    model = nn.Sequential(*layers).to(dtype)
    tables = [m for m in model.modules() if isinstance(m, ValueTable)]
    return model, (torch.optim.Adam(model.parameters(), lr=0.01), LazyAdam(tables, lr=0.01)), tables


def test_compiled_training_equals_eager():
    """Train several memories, whose buffers inductor shares, as one graph."""
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
    counter = CompileCounterWithBackend("aot_eager")
    memory = torch.compile(small_memory(), backend=counter)
    for tokens in range(10, 16):
        memory(torch.randn(tokens, 6, dtype=torch.float64)).sum().backward()
    assert counter.frame_count == 2  # one for the first length, one for all others
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    memories = [small_memory() for _ in range(4)]
    for memory in memories:
        memory.compile(backend=counter)
        memory(torch.randn(7, 6, dtype=torch.float64)).sum().backward()
    assert counter.frame_count == 1 and all(len(m.values.reads) == 1 for m in memories)


def test_masks_need_no_more_graphs():
    """Compile once for all numbers of real tokens."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    memory, counts = small_memory(), []
    compiled = torch.compile(memory, backend=counter)
    for real in range(2, 7):
        compiled(torch.randn(3, 6, 6, dtype=torch.float64), torch.arange(6).expand(3, 6) < real)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1]


def test_torch_checks_the_op(monkeypatch):
    """Check schema, fake kernel and ahead-of-time dispatch, and that no compiler may drop it."""
    table, slots = ValueTable(20, 8), torch.randint(20, (5, 3), dtype=torch.int32)
    read = torch.randn(5, 8), table.weight.detach(), slots, torch.rand(5, 3)
    with monkeypatch.context() as patch:  # opcheck passes copies of the weight
        patch.setattr(values, "tables_of", lambda weight: [table])
        torch.library.opcheck(values.store_copies, read)
    table.reads.clear()
    out = values.store_copies(*read)
    (stored_slots, stored_weights, stored_grad), = table.reads
    kept = stored_grad, stored_slots, stored_weights
    for ours, theirs in zip((out, *kept), (read[0], read[0], *read[2:]), strict=True):
        assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
    assert kept[0].data_ptr() != out.data_ptr()
    op = torch.ops.values.store.default
    assert torch.Tag.cudagraph_unsafe in op.tags
    graph = torch.fx.Graph()
    graph.call_function(op, tuple(graph.placeholder(name) for name in "abcd"))
    graph.output(None)
    graph.eliminate_dead_code()
    assert op in [node.target for node in graph.nodes]


def test_values_changed_before_backward_are_an_error():
    memory, x = small_memory(), torch.randn(5, 6, dtype=torch.float64)
    out = memory(x).sum()
    with torch.no_grad():
        memory.values.weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_functional_call_with_other_values():
    """Take gradients with respect to the other values; the table stores no read."""
    memory, x = small_memory(), torch.randn(5, 6, dtype=torch.float64)
    (2 * memory(x)).sum().backward()
    expected = memory.keys.grad.clone()
    memory.zero_grad()
    memory.values.reads.clear()
    others = (2 * memory.values.weight).detach().requires_grad_()
    torch.func.functional_call(memory, {"values.weight": others}, (x,)).sum().backward()
    assert_near(memory.keys.grad, expected, 1e-12)
    assert not memory.values.reads and memory.values.weight.grad is None
    slots, weights = memory.search(memory.query_norm(memory.query(x)))
    per_row = torch.zeros(144, dtype=torch.float64)
    per_row.index_add_(0, slots.flatten(), weights.flatten())
    assert_near(others.grad, per_row[:, None].expand(-1, 6), 1e-12)


def test_compiled_functional_call_with_other_values_is_refused_in_words():
    torch.compiler.reset()
    memory, x = small_memory(), torch.randn(5, 6, dtype=torch.float64)
    others = (2 * memory.values.weight).detach().requires_grad_()

    @torch.compile(backend="aot_eager")
    def call(x, others):
        return torch.func.functional_call(memory, {"values.weight": others}, (x,))
    with pytest.raises(RuntimeError, match="trains only with its own weight"):
        call(x, others).sum().backward()


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
    other_model(other).sum().backward()  # its values train as any parameter
    assert memory.values.weight.grad.any() and not memory.values.reads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Convert a whole model, or the values alone."""
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
    """Find the slots and weights that the same numbers in float32 give, without ties."""
    memory = small_memory(torch.bfloat16, n_keys=64, topk=8).eval()
    query = torch.randn(200, 16, dtype=torch.bfloat16)
    slots, weights = memory.search(query)
    expected = memory.float().search(query.float())
    assert torch.equal(slots, expected[0]) and torch.equal(weights, expected[1])


def test_autocast():
    """Keep grad_out in autocast's dtype, and scores and softmax in float32."""
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
    before = memory.values.weight.detach().clone()
    LazyAdam([memory.values], lr=0.1).step()
    assert not torch.equal(memory.values.weight, before)


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
    """Store nothing in a forward pass, torch.autograd.grad, or a backward pass to other inputs."""
    memory, x = small_memory(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    memory(x)
    torch.autograd.grad(memory(x).sum(), x)
    torch.autograd.grad(memory(x).sum(), [x, memory.values.weight], allow_unused=True)
    memory(x).sum().backward(inputs=[x])
    assert not memory.values.reads
    memory(x).sum().backward()
    memory(x).sum().backward(inputs=[memory.values.weight])
    assert len(memory.values.reads) == 2


def test_zero_grad_drops_pending_reads():
    model, (_, optimizer), tables = deep()
    before = [table.weight.detach().clone() for table in tables]
    model(torch.randn(4, 8))[:, 0].sum().backward()
    tables[0].weight.grad = torch.ones_like(tables[0].weight)  # as another loss can leave it
    optimizer.zero_grad()
    optimizer.step()
    assert tables[0].weight.grad is None
    assert all(torch.equal(t.weight, old) for t, old in zip(tables, before, strict=True))


@pytest.mark.parametrize("with_optimizer, first", [(False, 2), (True, 5)])
def test_reads_that_pile_up_warn_once(monkeypatch, with_optimizer, first):
    monkeypatch.setattr(values, "WARN_AT", 5)
    memory = small_memory()
    if with_optimizer:
        LazyAdam([memory.values])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counts = []
        for _ in range(7):
            memory(torch.randn(5, 6, dtype=torch.float64)).sum().backward()
            counts.append(len(caught))
    assert counts == [n >= first for n in range(1, 8)] and "LazyAdam" in str(caught[0].message)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_a_model_of_its_own(how):
    """Copy between backward and step, after which both go on with the same reads."""
    model, optimizers, tables = deep()
    model(torch.randn(4, 8))[:, 0].sum().backward()
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


def test_a_memory_made_on_the_meta_device_is_filled_by_its_state_dict():
    memory, x = small_memory(), torch.randn(7, 6, dtype=torch.float64)
    with torch.device("meta"):
        other = PKM(6, n_keys=12, heads=2, topk=4, key_dim=8).double()
    other.to_empty(device="cpu").load_state_dict(memory.state_dict())
    for each in (memory, other):
        each(x).square().sum().backward()
        LazyAdam([each.values], lr=0.01).step()
    assert torch.equal(memory.values.weight, other.values.weight)
    assert torch.equal(memory.eval()(x), other.eval()(x))


def test_a_loaded_state_dict_goes_on_as_the_saved_one():
    """Hold the moments themselves in state_dict(), as every optimizer of torch does."""
    def train(model, optimizer, steps):
        for step in range(steps):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            optimizer.step()

    model, (_, optimizer), _ = deep()
    train(model, optimizer, 3)
    saved, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    moments = optimizer.state[model[1].values.weight]
    assert optimizer.state_dict()["state"][0]["exp_avg"] is moments["exp_avg"]
    train(model, optimizer, 2)
    again, (_, other), _ = deep()
    again.load_state_dict(weights)
    other.load_state_dict(saved)
    train(again, other, 2)
    assert torch.equal(again[1].values.weight, model[1].values.weight)
    assert other.state[again[1].values.weight]["step"] == 5


def test_moments_follow_the_table():
    model, (_, optimizer), tables = deep()
    model(torch.randn(4, 8))[:, 0].sum().backward()
    optimizer.step()
    model.double()
    model(torch.randn(4, 8).double())[:, 0].sum().backward()
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


def test_tables_of_one_optimizer_move_as_alone(monkeypatch):
    """Update tables of 1, 4 and 20 chunks. One has only reads of weight 0."""
    monkeypatch.setattr(values, "CHUNK", 8)
    alone = [ValueTable(n, 4) for n in (2, 8, 7, 40)]
    together = copy.deepcopy(alone)
    optimizer, moved = LazyAdam(together, lr=0.1), []
    for table, other in zip(alone, together, strict=True):
        n, before = len(table.weight), table.weight.detach().clone()
        weights = torch.full((n, 1, 2), float(n != 7))
        for each in (table, other):
            each(torch.arange(2 * n).view(n, 1, 2) % n, weights).square().sum().backward()
        LazyAdam([table], lr=0.1).step()
        moved.append((table.weight != before).all().item())
    optimizer.step()
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(alone, together, strict=True))
    assert moved == [True, True, False, True] and len(optimizer.state) == 3


@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_stops_the_step_of_all_tables(factor):
    tables = [ValueTable(9, 4) for _ in range(3)]
    before = [table.weight.detach().clone() for table in tables]
    optimizer = LazyAdam(tables, lr=0.1)
    for n, table in enumerate(tables):
        out = table(torch.tensor([[[3, 5]]]), torch.ones(1, 1, 2))
        (out * (factor if n == 1 else 1)).sum().backward()
    optimizer.step()
    assert all(torch.equal(table.weight, old) for table, old in zip(tables, before, strict=True))
    assert optimizer.skipped == 1 and not optimizer.state


@pytest.mark.parametrize("chosen", [None, torch.tensor([3, 5])])
def test_shapes_of_sorted_reads_do_not_depend_on_the_reads(chosen):
    """Sort reads on the meta device, whose tensors have no content that a host could wait for."""
    with torch.device("meta"):
        slots, weights, grad_out = torch.zeros(6, 4).int(), torch.ones(6, 4), torch.ones(6, 8)
        parts = values.sort_reads(slots, weights, grad_out, n_slots=9, chunk=5, chosen=chosen)
    assert [len(part) for part in parts] == [24, 24, 24, 10, 5]


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
    """Compare betas and eps with torch.optim.SparseAdam's."""
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


@pytest.mark.parametrize("wrong", [
    {"lr": float("nan")}, {"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, 1.0)},
    {"eps": -1.0}])
def test_numbers_that_adam_refuses_are_refused(wrong):
    with pytest.raises(ValueError, match="Invalid"):
        LazyAdam([small_memory().values], **wrong)


def test_an_optimizer_minds_its_own_tables():
    """Update all tables that share a weight, and no other."""
    model, _, tables = deep()
    first, second = LazyAdam(tables[:1], lr=0.1), LazyAdam(tables[1:2], lr=0.1)
    tables[2].weight = tables[1].weight
    model(torch.randn(4, 8)).square().sum().backward()
    second.step()
    assert tables[0].reads and not tables[1].reads and not tables[2].reads
    first.zero_grad()
    assert not tables[0].reads
    with pytest.raises(TypeError, match="takes ValueTables, found .*Parameter"):
        LazyAdam(model.parameters())


def test_a_table_with_another_weight_is_refused_in_words():
    memory = small_memory()
    optimizer = LazyAdam([memory.values])
    memory.values.load_state_dict(copy.deepcopy(memory.values.state_dict()), assign=True)
    with pytest.raises(RuntimeError, match="another weight tensor"):
        optimizer.step()


def test_a_table_within_a_larger_tensor_learns():
    """Update a table at an offset, where its rows are not aligned."""
    tables = [ValueTable(9, 4), ValueTable(9, 4)]
    whole = torch.zeros(9 * 4 + 1)
    whole[1:] = tables[0].weight.detach().flatten()
    tables[1].weight = nn.Parameter(whole[1:].view(9, 4))
    assert tables[1].weight.storage_offset() == 1
    for table in tables:
        table(torch.tensor([[[3, 5]]]), torch.full((1, 1, 2), 0.5)).sum().backward()
        LazyAdam([table], lr=0.1).step()
    assert torch.equal(tables[0].weight, tables[1].weight)
    assert torch.equal(whole[1:], tables[0].weight.flatten()) and whole[0] == 0


def test_tables_that_share_storage_are_one():
    """Read a shallow copy, and a table made by load_state_dict(assign=True), each once."""
    tables, expected = [ValueTable(9, 4)], ValueTable(9, 4)
    expected.load_state_dict(tables[0].state_dict())
    with torch.device("meta"):
        tables.append(ValueTable(9, 4))
    tables[1].load_state_dict(tables[0].state_dict(), assign=True)
    tables.append(copy.copy(tables[0]))
    for table in [*tables, *3 * [expected]]:
        table(torch.tensor([[[3, 5]]]), torch.full((1, 1, 2), 0.5)).sum().backward()
    for table in (tables[1], expected):
        LazyAdam([table], lr=0.1).step()
    assert torch.equal(tables[0].weight, expected.weight) and not any(t.reads for t in tables)


def test_a_model_without_memory_has_nothing_to_update():
    LazyAdam([]).step()


def test_a_reloaded_module_keeps_live_tables():
    """Reload values.py, as notebooks do, between building a memory and training it."""
    code = ("import importlib, torch, pkm, values; memory = pkm.PKM(8, 8, topk=4, key_dim=8); "
            "optimizer = pkm.LazyAdam([memory.values]); before = memory.values.weight.clone(); "
            "importlib.reload(values); memory(torch.randn(5, 8)).sum().backward(); "
            "optimizer.step(); assert (memory.values.weight != before).any()")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_strictly_exported_values_train_as_any_parameter():
    memory, x = small_memory().eval(), torch.randn(5, 6, dtype=torch.float64)
    exported = torch.export.export(memory, (x,), strict=True).module()
    exported(x).sum().backward()
    if values.TELLS_EXPORTING:
        assert exported.get_parameter("values.weight").grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loaded_moments_are_those_that_were_saved(dtype):
    def train(steps, resume_at=None):
        torch.manual_seed(0)
        table = ValueTable(20, 8).to(dtype)
        optimizer = LazyAdam([table], lr=0.01)
        for step in range(steps):
            if step == resume_at:
                saved = optimizer.state_dict()
                optimizer = LazyAdam([table], lr=0.01)
                optimizer.load_state_dict(saved)
            out = table(torch.randint(20, (9, 2, 3)), torch.full((9, 2, 3), 0.5))
            (1e-4 * out.float()).sum().backward()
            optimizer.step()
        return table.weight

    assert torch.equal(train(6, resume_at=5), train(6))


def test_small_gradients_of_half_precision_values_count_as_in_float32():
    """Take steps of the same size: squares of small gradients are 0 in float16."""
    moved = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        table = ValueTable(20, 8)
        table.weight.data.zero_()
        table.to(dtype)
        optimizer = LazyAdam([table], lr=0.01)
        for _ in range(5):
            out = table(torch.randint(20, (9, 2, 3)), torch.full((9, 2, 3), 0.5))
            (1e-4 * out.float()).sum().backward()
            optimizer.step()
        moved.append(table.weight.abs().mean().item())
    assert moved[1:] == pytest.approx([moved[0]] * 2, rel=0.02)
