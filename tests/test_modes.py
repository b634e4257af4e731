"""
Train the memory in the modes that people use, beside eager mode in one process.

The modes are masks, torch.compile, export, half precision, autocast, a GradScaler, activation
checkpointing, saved states, DistributedDataParallel and FSDP.
"""
import copy
import inspect
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pkm
from pkm import PKM, LazyAdam, MaskedBatchNorm, ValueTable
from test_pkm import assert_near, small_memory
from tests.helpers import assert_same
from tests.on_ranks import finish, start

MASK = torch.arange(6) < torch.tensor([[6], [2], [4], [1]])


def deep(n_layers=3, dtype=torch.float64):
    """Make a chain of memories with something before and after each."""
    torch.manual_seed(0)
    layers = []
    for _ in range(n_layers):
        memory = PKM(8, n_keys=16, heads=2, topk=4, key_dim=8)
        layers += [nn.Linear(8, 8), memory, nn.LayerNorm(8)]
    model = nn.Sequential(*layers).to(dtype)
    tables = [module for module in model.modules() if isinstance(module, ValueTable)]
    optimizers = torch.optim.Adam(model.parameters(), lr=0.01), LazyAdam(tables, lr=0.01)
    return model, optimizers, tables


def seeded(step, *shape):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def train(model, optimizers, steps=range(4), call=None, loss_scale=1.0):
    """Train; return the weights at the end."""
    for step in steps:
        loss = (call or model)(seeded(step, 5, 8))[:, 0].sum()
        (loss * loss_scale).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= loss_scale
        optimizers[0].step()
        optimizers[1].step(grad_scale=loss_scale)
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.state_dict().values()]


def assert_all_near(ours, theirs, tolerance=1e-10):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def train_with_mask(call, memory):
    """Train on padded batches; return all that padding could change, NaN included."""
    optimizer, results = LazyAdam([memory.values], lr=0.1), []
    memory(seeded(9, 400, 6)).square().sum().backward()  # gives every row a momentum
    optimizer.step()
    for step in range(3):
        x, weight = seeded(step, 2, 4, 6, 6)
        x[~MASK] = torch.nan if step == 2 else 50.0
        memory.zero_grad()
        out = call(x.requires_grad_(), MASK)
        (out * weight).sum().backward()
        results += [out, x.grad, *(p.grad.clone() for p in memory.parameters() if p.requires_grad)]
        optimizer.step()
    return [*results, *memory.buffers(), memory.values.weight]


def test_compiled_training_with_masks_equals_eager():
    torch.compiler.reset()
    expected, memory = small_memory(), small_memory()
    ours = train_with_mask(torch.compile(memory, backend="aot_eager"), memory)
    assert_all_near(ours, train_with_mask(expected, expected), 1e-9)


def test_inductors_training_equals_eager():
    """Keep reads out of the buffers that inductor uses again."""
    torch.compiler.reset()
    model, optimizers, _ = deep(1)
    ours = train(model, optimizers, call=torch.compile(model))
    assert_all_near(ours, train(*deep(1)[:2]), 1e-7)


def test_an_exported_memory_reads_other_slots_for_another_input():
    memory = small_memory().eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(memory, (seeded(0, 4, 6, 6), MASK)).module()
        assert_near(exported(seeded(1, 4, 6, 6), ~MASK), memory(seeded(1, 4, 6, 6), ~MASK), 1e-12)


@pytest.mark.filterwarnings("ignore")
def test_onnxruntime_reads_the_same(tmp_path):
    """For another number of tokens than that of the export."""
    runtime = pytest.importorskip("onnxruntime")
    memory, (x, mask) = small_memory(torch.float32).eval(), (seeded(0, 4, 6, 6).float(), MASK)
    sizes, real = {0: "sequences", 1: "tokens"}, torch.ones(2, 5, dtype=torch.bool)
    torch.onnx.export(memory, (torch.ones(2, 5, 6), real), tmp_path / "memory.onnx",
                      dynamic_shapes=(sizes, sizes), input_names=["x", "mask"])
    [found] = runtime.InferenceSession(tmp_path / "memory.onnx").run(
        None, {"x": x.numpy(), "mask": mask.numpy()})
    assert_near(torch.from_numpy(found), memory(x, mask), 1e-6)


def test_one_real_token_leaves_the_running_statistics():
    memory = small_memory()
    before = [buffer.clone() for buffer in memory.buffers()][:2]
    out = memory(seeded(0, 1, 3, 6), torch.tensor([[1, 0, 0]]))  # as a tokenizer returns it
    assert out.isfinite().all() and not out[:, 1:].any()
    assert all(map(torch.equal, memory.buffers(), before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_reads_but_does_not_learn(dtype):
    """Convert the values alone, then a whole memory. The refusal comes before any table moves."""
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    memory = PKM(64, n_keys=32, heads=4, topk=8, key_dim=16).eval()
    with torch.no_grad():
        expected = memory(x)
        memory.values.to(dtype)
        assert memory(x).dtype == torch.float32
        assert memory.values(*memory.search(torch.randn(3, 64))).dtype == dtype
        assert_near(memory(x), expected, 0.01)
    memory = memory.to(dtype).train()
    first = ValueTable(6, 4)
    optimizer, before = LazyAdam([first, memory.values]), first.weight.clone()
    first(torch.tensor([[[1, 3]]]), torch.ones(1, 1, 2)).sum().backward()
    memory(x.to(dtype), torch.arange(50) < 40).float().square().mean().backward()
    assert memory.keys.grad.any()
    with pytest.raises(AssertionError, match=str(dtype)):
        optimizer.step()
    assert torch.equal(first.weight, before)


def test_scores_of_a_half_precision_memory_are_float32s():
    """Find the slots and weights that the same numbers in float32 give, without ties."""
    memory = small_memory(torch.bfloat16, n_keys=64, topk=8).eval()
    query = torch.randn(200, 16, dtype=torch.bfloat16)
    slots, weights = memory.search(query)
    expected = memory.float().search(query.float())
    assert torch.equal(slots, expected[0]) and torch.equal(weights, expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_a_half_precision_memory_are_float32s(dtype):
    norm, x = MaskedBatchNorm(4).to(dtype), 10 + torch.randn(3000, 4)
    x, mask = x.to(dtype), torch.arange(3000)[:, None] < 2999
    real = x[:-1].double()
    expected = (x.double() - real.mean(0)) / (real.var(0, correction=0) + norm.eps).sqrt()
    assert_near(norm(x, mask), expected, 1e-4)


def test_autocast():
    """Keep grad_out in autocast's dtype, and scores and softmax in float32."""
    memory, x = PKM(8, n_keys=16, heads=2, topk=4, key_dim=8).eval(), torch.randn(9, 8)
    LazyAdam([memory.values])
    with torch.autocast("cpu", torch.bfloat16):
        query = memory.query(x)
        memory(x).sum().backward()
    [(slots, weights, grad_out)] = memory.values.pending
    assert (query.dtype, weights.dtype, grad_out.dtype) == (torch.bfloat16, torch.float32,
                                                            torch.bfloat16)
    assert not weights.requires_grad  # it would keep the graph
    expected = memory.search(memory.query_norm(query.float()))
    assert torch.equal(slots, expected[0].flatten(1))
    assert torch.equal(weights, expected[1].flatten(1))


def test_a_gradient_scaler():
    """Train as without scaling. After an overflow anywhere no weight moves, and all go on."""
    model, (dense, sparse), _ = deep()
    plain, (dense_2, sparse_2), _ = deep()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step, overflow in enumerate(("", "", "before the values", "", "after the values")):
        before = [p.clone() for p in model.parameters()]
        hidden = model[:-1](seeded(step, 5, 8))  # the last module has no memory
        loss = model[-1](hidden)[:, 0].sum()
        scaler.scale(loss).backward()
        if overflow.startswith("before"):  # the table's gradient is finite
            model[0].bias.grad[0] = torch.inf
        if overflow.startswith("after"):
            model[-1].bias.grad[0] = torch.nan
        scaler.unscale_(dense)
        sparse.step_with(dense, scaler)
        if overflow:
            assert all(map(torch.equal, model.parameters(), before))
        else:
            plain(seeded(step, 5, 8))[:, 0].sum().backward()
            dense_2.step()
            sparse_2.step()
        for optimizer in (dense, sparse, dense_2, sparse_2):
            optimizer.zero_grad()
    assert_all_near(model.parameters(), plain.parameters())
    assert scaler.get_scale() == 512.0  # doubled once, halved twice


def test_a_step_whose_reads_overflow_moves_no_table():
    model, (_, optimizer), tables = deep()
    before = [table.weight.clone() for table in tables]
    hidden = model[:-3](seeded(0, 5, 8))  # without the last memory, whose gradient is finite
    (hidden.sum() * torch.inf + model[-3:](hidden.detach())[:, 0].sum()).backward()
    optimizer.step()
    assert all(torch.equal(table.weight, old) for table, old in zip(tables, before))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    """Recompute two passes with masks of their own; each keeps one read."""
    results = []
    for recompute in (False, True):
        memory, loss = small_memory(), 0.0
        optimizer = LazyAdam([memory.values], lr=0.1)
        for step, mask in enumerate((MASK, MASK.flip(0))):
            x = seeded(step, 4, 6, 6).requires_grad_()
            out = (checkpoint(memory, x, mask, use_reentrant=use_reentrant) if recompute
                   else memory(x, mask))
            loss = loss + (out * seeded(7, 4, 6, 6)).sum()
        loss.backward()
        assert len(memory.values.pending) == 2
        optimizer.step()
        grads = [p.grad for p in memory.parameters() if p.requires_grad]
        results.append([loss, *grads, memory.values.weight])
    assert_all_near(*results)


def test_only_backward_keeps_reads_and_zero_grad_drops_them():
    """Freeze the values in between: they keep no read, and all else learns."""
    memory, x = small_memory(), seeded(0, 5, 6).requires_grad_()
    optimizer, before = LazyAdam([memory.values]), memory.values.weight.clone()
    memory(x)
    with torch.no_grad():
        memory(x)
    memory.values.learns = False
    memory(x).sum().backward()
    assert not memory.values.pending and memory.keys.grad.any()
    memory.values.learns = True
    memory(x).sum().backward()
    memory(x).sum().backward()
    assert len(memory.values.pending) == 2
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(memory.values.weight, before)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_inputs_or_of_named_weights_keep_no_read(compiled):
    """Take gradients as a saliency map or adversarial training does."""
    memory, x = small_memory(), seeded(0, 5, 6).requires_grad_()
    LazyAdam([memory.values])
    call = torch.compile(memory, backend="aot_eager") if compiled else memory
    [expected] = torch.autograd.grad(call(x).square().sum(), x)
    assert not memory.values.pending
    call(x).square().sum().backward(inputs=[x])
    assert torch.equal(x.grad, expected) and not memory.values.pending
    trained = [p for p in memory.parameters() if p.requires_grad]
    call(x).square().sum().backward(inputs=trained)
    assert memory.keys.grad.any() and not memory.values.pending
    call(x).square().sum().backward()
    assert len(memory.values.pending) == 1


def test_two_backward_passes_of_a_graph_count_twice():
    updated = []
    for weights in ((1.0, 2.0), (3.0,)):
        memory = small_memory()
        optimizer = LazyAdam([memory.values], lr=0.1)
        loss = memory(seeded(0, 5, 6)).square().sum()
        for weight in weights:
            (weight * loss).backward(retain_graph=True)
        optimizer.step()
        updated.append(memory.values.weight)
    assert_near(*updated, 1e-12)
    assert not torch.equal(updated[0], small_memory().values.weight)


@pytest.mark.parametrize("optimizer", ["none", "never steps", "of the original", "of both", "late"])
def test_values_that_do_not_learn_say_so_once(optimizer):
    """Without a LazyAdam nothing is kept. A copy of the model alone has none."""
    memory = small_memory()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        memory.eval()(seeded(0, 5, 6).requires_grad_())  # an evaluation with gradients
        memory.train()
        if optimizer == "of both":
            memory, _ = copy.deepcopy((memory, LazyAdam([memory.values])))
        elif optimizer == "of the original":
            LazyAdam([memory.values])
            memory = copy.deepcopy(memory)
        for step in range(1100 if optimizer == "never steps" else 3):
            if (step, optimizer) in [(0, "never steps"), (2, "late")]:
                LazyAdam([memory.values])
            memory(seeded(0, 2, 6)).sum().backward()
    kept = {"never steps": 1100, "of both": 3, "late": 1}
    assert len(memory.values.pending) == kept.get(optimizer, 0)
    assert [str(warning.message)[:19] for warning in said] == ["values do not learn"] * (
        optimizer != "of both")


def test_other_optimizers_and_requires_grad_do_not_reach_the_values():
    """Set requires_grad on every parameter, as from_pretrained of transformers does."""
    model, (_, optimizer), tables = deep()
    model.requires_grad_(True)
    dense = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = [table.weight.detach().clone() for table in tables]
    model(seeded(0, 5, 8))[:, 0].sum().backward()
    dense.step()
    assert all(torch.equal(table.weight, old) for table, old in zip(tables, before))
    assert all(table.weight.grad is None for table in tables)
    optimizer.step()
    assert not any(torch.equal(table.weight, old) for table, old in zip(tables, before))
    LazyAdam(tables)
    assert not any(table.weight.requires_grad for table in tables)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_saved_state_goes_on_as_the_first(stepped, tmp_path):
    """An optimizer that has stepped is also filled in place, by torch.distributed.checkpoint."""
    model, optimizers, _ = deep()
    train(model, optimizers, range(2))
    other, their_optimizers, _ = deep()
    train(other, their_optimizers, range(5, 6) if stepped else ())
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    for mine, theirs in zip(their_optimizers, optimizers, strict=True):
        state = copy.deepcopy(theirs.state_dict())
        if stepped:
            folder = tmp_path / type(mine).__name__
            dcp.save({"mine": state}, checkpoint_id=folder)
            state = mine.state_dict()
            dcp.load({"mine": state}, checkpoint_id=folder)
        mine.load_state_dict(state)
    steps = range(2, 5)
    for a, b in zip(train(other, their_optimizers, steps), train(model, optimizers, steps)):
        assert torch.equal(a, b)


def test_a_state_that_set_state_dict_leaves_out_is_refused():
    """torch leaves out what requires no gradient. get_optimizer_state_dict has it all."""
    model, optimizers, _ = deep()
    train(model, optimizers, range(2))
    state = state_dict.get_optimizer_state_dict(model, optimizers[1])
    other, (_, sparse), _ = deep()
    with pytest.raises(ValueError, match="set_state_dict leaves out the state of values"):
        state_dict.set_optimizer_state_dict(other, sparse, state)
    sparse.load_state_dict(state)
    assert_same(sparse.state_dict()["state"], optimizers[1].state_dict()["state"])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_model_and_optimizer_goes_on_as_they_do(clone):
    model, optimizers, _ = deep()
    train(model, optimizers, range(2))
    other, others = clone((model, optimizers))
    for a, b in zip(train(other, others, range(2, 4)), train(model, optimizers, range(2, 4))):
        assert torch.equal(a, b)


def test_what_lazy_adam_is_given():
    """A table that is named twice moves once. A replaced weight, or no table, is an error."""
    moved = []
    for times in (1, 2):
        torch.manual_seed(0)
        table = ValueTable(6, 4)
        optimizer = LazyAdam([table] * times)
        table(torch.tensor([[[1, 3]]]), torch.ones(1, 1, 2)).sum().backward()
        optimizer.step()
        moved.append(table.weight)
    assert torch.equal(*moved)
    table.weight = nn.Parameter(torch.zeros(6, 4))
    with pytest.raises(AssertionError, match="new weight"):
        optimizer.step()
    memory = PKM(4, n_keys=2, topk=1, key_dim=2)
    for wrong in (None, memory, [memory], memory.values.weight, {"name": memory.values}):
        with pytest.raises(TypeError, match="takes a list of ValueTables"):
            LazyAdam(wrong)


def test_a_closure_makes_the_gradient_and_the_step_returns_its_loss():
    def closure():
        loss = table(torch.tensor([[[1, 3]]]), torch.full((1, 1, 2), 0.5)).sum()
        loss.backward()
        return loss

    table = ValueTable(6, 4)
    before = table.weight.clone()
    assert LazyAdam([table]).step(closure).item() == pytest.approx(before[[1, 3]].sum().item() / 2)
    expected = torch.tensor([0, 1e-3, 0, 1e-3, 0, 0])[:, None].expand(6, 4)  # lr, by default
    torch.testing.assert_close(before - table.weight, expected, rtol=1e-3, atol=1e-9)


def test_tables_of_one_optimizer_move_as_alone():
    """Use the settings of each group, which a scheduler may change."""
    results = []
    for together in (True, False):
        model, _, tables = deep()
        optimizers = [LazyAdam(tables[:2], lr=0.01)] if together else [
            LazyAdam([table], lr=9.0) for table in tables]
        if together:
            optimizers[0].add_param_group({"params": tables[2:], "eps": 1e-3})
        else:
            optimizers[2].param_groups[0]["eps"] = 1e-3
        for step in range(3):
            model(seeded(step, 5, 8))[:, 0].sum().backward()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 * (step + 1)
                optimizer.step()
                optimizer.zero_grad()
        model(seeded(3, 5, 8)).sum().backward()
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert not any(table.pending for table in tables)
        results.append([table.weight for table in tables])
    assert all(map(torch.equal, *results))
    assert not torch.equal(results[0][0], deep()[2][0].weight)


# DistributedDataParallel

def train_ranks(model, tables, wrap, world, ranks):
    """Make 3 steps of 2 micro-batches for each of `ranks`. The loss is the mean over ranks."""
    dense, optimizer = torch.optim.SGD(model.parameters(), lr=0.01), LazyAdam(tables, lr=0.1)
    for step in range(3):
        for micro in range(2):
            for rank in ranks:  # ranks have different numbers of tokens
                x = seeded(100 * step + 10 * micro + rank, 3 + 2 * rank, 8)
                loss = wrap(x).square()[:, :3].sum()
                (loss if len(ranks) == 1 else loss / world).backward()
        for each in (dense, optimizer):
            each.step()
            each.zero_grad()


def on_each_rank(expected, sharded):
    model, _, tables = deep()
    tables = dict(enumerate(tables))
    if sharded:
        wrap = fully_shard(model, ignored_params={table.weight for table in tables.values()})
    else:
        for p in model.parameters():
            p.data += dist.get_rank()  # DistributedDataParallel broadcasts rank 0's weights
        wrap = DistributedDataParallel(model)
    train_ranks(model, tables.values(), wrap, 2, [dist.get_rank()])
    for name, p in model.named_parameters():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        assert isinstance(p, DTensor) == (sharded and "values" not in name)
        torch.testing.assert_close(whole, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sharded", [False, True], ids=["DistributedDataParallel", "FSDP"])
def test_two_ranks_train_as_one_process(sharded):
    line = "fully_shard(model, ignored_params={table.weight for table in tables.values()})"
    assert line in pkm.__doc__ and line in inspect.getsource(on_each_rank)
    model, _, tables = deep()
    train_ranks(model, tables, model, 2, range(2))
    expected = {name: p.detach() for name, p in model.named_parameters()}
    finish(start(2, on_each_rank, expected, sharded))


def unread():
    table = ValueTable(6, 4)
    optimizer = LazyAdam([table], lr=0.1)
    dist.broadcast(table.weight, 0)
    before = table.weight.clone()
    optimizer.step()
    assert torch.equal(table.weight, before)
    read = torch.tensor([[[1, 3]]]), torch.full((1, 1, 2), 0.5)
    if dist.get_rank():
        table(*read).sum().backward()
    optimizer.step()
    assert torch.equal((table.weight != before).any(1), torch.tensor([0, 1, 0, 1, 0, 0]).bool())
    before = table.weight.clone()
    table(*read).sum().mul(torch.inf if dist.get_rank() else 1).backward()
    optimizer.step()
    assert torch.equal(table.weight, before)


def test_a_rank_without_reads_or_with_an_inf():
    finish(start(2, unread))
