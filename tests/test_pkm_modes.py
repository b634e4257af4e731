"""
Compare the memory in the modes that people use with eager mode on one process.

The modes are masks in compiled and exported graphs, activation checkpointing, threads, GradScaler
and DistributedDataParallel. DataParallel, FullyShardedDataParallel and fully_shard are refused.
"""
import copy
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pkm import LazyAdam, ValueTable
from test_pkm import assert_near, small_memory
from tests.test_pkm_torch import deep

MASK = torch.arange(6) < torch.tensor([[6], [2], [4], [1]])


def train_with_mask(call, memory, steps=3):
    """Train a memory on padded batches. Returns all that masks could change. All rows have a
    momentum first, by which padding could move them."""
    optimizer, results = LazyAdam([memory.values], lr=0.1), []
    memory(torch.randn(400, 6, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    memory.zero_grad()
    for step in range(steps):
        x, weight = torch.randn(2, 4, 6, 6, dtype=torch.float64,
                                generator=torch.Generator().manual_seed(step))
        x[~MASK] = torch.nan if step == 2 else 50.0
        out = call(x.requires_grad_(), MASK)
        (out * weight).sum().backward()
        grads = [p.grad.clone() for p in memory.parameters() if p.grad is not None]
        results += [out, x.grad, *grads]
        memory.zero_grad()
        optimizer.step()
    return [*results, *memory.buffers(), memory.values.weight]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_training_with_a_mask_equals_eager(backend):
    """Compile one graph. Padded tokens change nothing, even if they are nan."""
    torch.compiler.reset()
    expected = small_memory()
    expected = train_with_mask(expected, expected)
    memory = small_memory()
    ours = train_with_mask(torch.compile(memory, backend=backend, fullgraph=True), memory)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_compiled_masks_of_many_shapes_need_two_graphs():
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    memory = small_memory()
    compiled = torch.compile(memory, backend=counter, fullgraph=True)
    for time in range(4, 9):
        mask = torch.rand(3, time) > 0.3
        x = torch.randn(3, time, 6, dtype=torch.float64)
        assert_near(compiled(x, mask), copy.deepcopy(memory)(x, mask), 1e-12)
    assert counter.frame_count <= 2


def test_one_real_token_leaves_the_running_statistics():
    memory, x = small_memory(), torch.randn(1, 3, 6, dtype=torch.float64)
    before = [buffer.clone() for buffer in memory.buffers()][:2]
    mask = torch.tensor([[True, False, False]])
    out = torch.compile(memory, backend="eager")(x, mask)
    assert out.isfinite().all() and not out[~mask].any()
    assert all(torch.equal(a, b) for a, b in zip(memory.buffers(), before))
    for eager in (lambda: memory(x, mask), lambda: memory(x[:, 0])):
        with pytest.raises(ValueError, match="more than one token"):
            eager()


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_mask(strict):
    memory, x = small_memory().eval(), torch.randn(4, 6, 6, dtype=torch.float64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(memory, (x, MASK), strict=strict).module()
        for mask in (MASK, ~MASK):
            assert_near(exported(2 * x, mask), memory(2 * x, mask), 1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing_two_passes_with_two_masks(use_reentrant, compiled):
    """Recompute both passes, each with its own mask. The running statistics move once a pass."""
    torch.compiler.reset()
    if compiled and use_reentrant:
        pytest.skip("torch.compile has no graph for reentrant checkpointing")
    results = []
    for recompute in (False, True):
        memory = small_memory()

        def call(x, mask, memory=memory, recompute=recompute):
            if recompute:
                return checkpoint(memory, x, mask, use_reentrant=use_reentrant)
            return memory(x, mask)
        if compiled:
            call = torch.compile(call, backend="aot_eager", fullgraph=True)
        first, second = torch.randn(2, 4, 6, 6, dtype=torch.float64,
                                    generator=torch.Generator().manual_seed(0)).requires_grad_()
        loss = (call(first, MASK) * call(second, MASK.flip(0))).sum()
        loss = loss + call(first.flip(0), torch.ones_like(MASK)).square().sum()
        loss.backward()
        LazyAdam([memory.values], lr=0.1).step()
        grads = [p.grad for p in memory.parameters() if p.grad is not None]
        results.append([loss, *grads, *memory.buffers(), memory.values.weight])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_threads_with_masks_of_their_own():
    memory = small_memory().eval()
    x, wrong = torch.randn(8, 4, 6, 6, dtype=torch.float64), []
    masks = torch.rand(8, 4, 6) > 0.4

    def serve(n):
        with torch.no_grad():
            for _ in range(30):
                out = memory(x[n], masks[n])
                wrong.extend([n] * (not torch.equal(out, expected[n])))
    with torch.no_grad():
        expected = [memory(*pair) for pair in zip(x, masks, strict=True)]
    threads = [threading.Thread(target=serve, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_batch_norm_in_evaluation_mode_stays():
    """Keep its statistics, as fine-tuning with frozen norms does, while the memory trains."""
    memory, x = small_memory(), torch.randn(5, 6, dtype=torch.float64)
    expected = memory.eval()(x)
    memory.train().query_norm.eval()
    assert torch.equal(memory(x), expected)
    assert not memory.query_norm.running_mean.any()


def test_a_mask_changes_no_real_token_in_evaluation():
    memory, x = small_memory().eval(), torch.randn(4, 6, 6, dtype=torch.float64)
    assert_near(memory(x, MASK)[MASK], memory(x)[MASK], 1e-12)


@pytest.mark.parametrize("how", ["grad_scale", "scaler"])
def test_a_gradient_scaler(how):
    """Train as without a scaler. A step that overflows moves nothing and is counted."""
    weights = []
    for scaled in (False, True):
        model, optimizers, tables = deep(dtype=torch.float64)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        for step in range(4):
            x = torch.randn(4, 8, dtype=torch.float64,
                            generator=torch.Generator().manual_seed(step))
            loss = model(x)[:, 0].sum()
            if scaled and step == 2:
                before = [table.weight.detach().clone() for table in tables]
                (scaler.scale(loss) * torch.inf).backward()
            elif step != 2:
                scaler.scale(loss).backward()
            scaler.step(optimizers[0])
            if how == "scaler":
                scaler.step(optimizers[1])
            else:
                optimizers[1].step(grad_scale=scaler.get_scale())
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if scaled and step == 2:
                assert optimizers[1].skipped == 1
                assert all(torch.equal(t.weight, old) for t, old in zip(tables, before))
        weights.append([p.detach() for p in model.parameters()])
    for a, b in zip(*weights, strict=True):
        assert_near(a, b, 1e-9)


def test_a_gradient_scaler_that_unscales_the_values_is_refused_in_words():
    memory, scaler = small_memory(), torch.amp.GradScaler("cpu")
    optimizer = LazyAdam([memory.values])
    scaler.scale(memory(torch.randn(5, 6, dtype=torch.float64)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.step(optimizer)


def test_a_data_parallel_replica_is_refused_in_words():
    memory = small_memory()
    replica = memory.values._replicate_for_data_parallel()
    replica.weight = memory.values.weight * 1  # what replicate() puts there: a copy with history
    with pytest.raises(RuntimeError, match="DataParallel"):
        replica(torch.zeros(2, 1, 1, dtype=torch.int32), torch.ones(2, 1, 1).double())


def test_an_optimizer_of_frozen_values_warns():
    memory = small_memory()
    memory.values.weight.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            memory(torch.randn(5, 6, dtype=torch.float64)).sum().backward()
    with pytest.warns(UserWarning, match="frozen"):
        LazyAdam([memory.values]).step()


def test_a_synchronized_batch_norm_is_refused_in_words():
    memory = nn.SyncBatchNorm.convert_sync_batchnorm(small_memory())
    with pytest.raises(TypeError, match="found SyncBatchNorm"):
        memory(torch.randn(5, 6, dtype=torch.float64))


# several ranks

def run_on_ranks(function, world, folder, *args):
    """Call function(rank, world, *args) in forked processes with a gloo group."""
    torch.multiprocessing.start_processes(join_group, nprocs=world, start_method="fork",
                                          args=(world, str(folder / "store"), function, args))


def join_group(rank, world, store, function, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    function(rank, world, *args)
    dist.destroy_process_group()


def micro_batch(step, micro, rank):
    """Make an input: ranks have different numbers of tokens."""
    seed = 100 * step + 10 * micro + rank
    return torch.randn(3 + 2 * rank, 8, dtype=torch.float64,
                       generator=torch.Generator().manual_seed(seed))


def train_ranks(model, tables, wrap, world, ranks):
    """Make 4 steps of 2 micro-batches for each of `ranks`. The loss is the mean over ranks."""
    dense = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.5)
    optimizer = LazyAdam(tables, lr=0.1)
    for step in range(4):
        for micro in range(2):
            for rank in ranks:
                loss = wrap(micro_batch(step, micro, rank)).square()[:, :3].sum()
                (loss if len(ranks) == 1 else loss / world).backward()
        for each in (dense, optimizer):
            each.step()
            each.zero_grad()


def ddp(rank, world, expected):
    torch.manual_seed(rank)  # DistributedDataParallel broadcasts rank 0's weights
    model, _, tables = deep(dtype=torch.float64)
    for p in model.parameters():
        p.data += rank
    train_ranks(model, tables, DistributedDataParallel(model), world, [rank])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, expected[name], rtol=1e-12, atol=1e-13)
    assert all(table.weight.grad is None for table in tables)


@pytest.mark.parametrize("world", [2, 4])
def test_distributed_data_parallel_trains_as_one_process(world, tmp_path):
    """Update values in every rank as one process does, and never decay them."""
    model, _, tables = deep(dtype=torch.float64)
    train_ranks(model, tables, model, world, range(world))
    run_on_ranks(ddp, world, tmp_path, dict(model.named_parameters()))


def unread(rank, world):
    """Update where no rank has read, where one has, and where one has a gradient of inf."""
    table = ValueTable(6, 4)
    optimizer = LazyAdam([table], lr=0.1)
    dist.broadcast(table.weight.data, 0)
    before = table.weight.detach().clone()
    optimizer.step()
    assert torch.equal(table.weight, before)
    if rank:
        table(torch.tensor([[[1, 3]]]), torch.full((1, 1, 2), 0.5)).sum().backward()
    optimizer.step()
    assert torch.equal((table.weight != before).any(1), torch.tensor([0, 1, 0, 1, 0, 0]).bool())
    before = table.weight.detach().clone()
    table(torch.tensor([[[1, 3]]]), torch.full((1, 1, 2), 0.5)).sum().mul(
        torch.inf if rank else 1).backward()
    optimizer.step()
    assert torch.equal(table.weight, before) and optimizer.skipped == 1


def test_a_rank_without_reads_or_with_an_inf(tmp_path):
    run_on_ranks(unread, 2, tmp_path)


def fsdp(rank, world):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    for wrap in ("flat", "original", "dtensor"):
        model, _, tables = deep()
        with pytest.raises((RuntimeError, TypeError), match="fully_shard|FullyShardedDataParallel"):
            if wrap == "dtensor":
                fully_shard(model)
                LazyAdam(tables)
            else:
                FullyShardedDataParallel(model, device_id=torch.device("cpu"),
                                         use_orig_params=wrap == "original")(torch.randn(4, 8))
    model, _, tables = deep()
    optimizer = LazyAdam(tables)
    fully_shard(model)
    model(torch.randn(4, 8)).square().sum().backward()
    with pytest.raises(RuntimeError, match="fully_shard"):
        optimizer.step()


def test_fully_sharded_models_are_refused_in_words(tmp_path):
    run_on_ranks(fsdp, 2, tmp_path)
