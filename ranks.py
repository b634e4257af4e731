"""
More than one process: what a script shares with the others that torchrun started, through
torch.distributed (NCCL between CUDA cards, gloo between CPUs). A script alone uses none of it.

$ torchrun --standalone --nproc_per_node=4 pretrain.py configs/base_resm_init.py
$ torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=HOST pretrain.py CONFIG.py
$ torchrun --nnodes=2 --node_rank=1 --nproc_per_node=8 --master_addr=HOST pretrain.py CONFIG.py

The micro-batches of a step are dealt out; what is in one, its dropout too, is a function of (seed,
step, micro-batch), so any number of ranks makes the same step, but for the order of sums. The dense
weights are on every rank, their gradients are added up once a step. A value table is cut by columns
(ShardedValueTable). Files are those of one process. Only the scripts and what they share need this
file: pkm.py stays free of it.
"""
import contextlib
import mmap
import os
import sys
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import common
import pkm

GROUP = None  # of processes; None is torch's default
MISTAKE = 1000  # above all signals
GATHERED = 2**22  # bytes of a tensor that the first rank gathers at a time, to save it


def started():
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_initialized()


def world():
    """How many processes there are."""
    return dist.get_world_size() if started() else 1


def rank():
    """The number of this process; the first, 0, prints and writes."""
    return dist.get_rank() if started() else 0


def run(main):
    """common.run(main). Under torchrun in a process group: the first rank prints, and a mistake
    that one rank or all of them meet ends all with status 2, after one line."""
    common.run((lambda: _run_as_rank(main)) if common.under_torchrun() else main)


def _run_as_rank(main):
    on_this_node = int(os.environ["LOCAL_RANK"])
    if cards := torch.cuda.device_count():  # CUDA_VISIBLE_DEVICES= : ranks on CPUs
        if on_this_node > cards:
            sys.exit(2)  # one says it
        if on_this_node == cards:
            raise common.UserError(f"more ranks than cards: --nproc_per_node={cards}, or "
                                   "CUDA_VISIBLE_DEVICES= for ranks on CPUs")
        torch.cuda.set_device(on_this_node)
    store, number, size = next(dist.rendezvous("env://"))
    # torchrun keeps the store after a restart, with the addresses of the dead
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(store=store, rank=number, world_size=size)
    if rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - to the end
    try:
        status = main()
        dist.destroy_process_group()
        return status
    except common.UserError:  # to be said by the first one of those that met it
        own = MISTAKE + world() - rank()
        with contextlib.suppress(RuntimeError):  # the others may be gone
            if _agree(own, timedelta(seconds=30)) > own:
                sys.exit(2)
        raise
    except RuntimeError as error:
        if on_this_node and isinstance(error, common.Failure):
            sys.exit(1)
        if not lost(error):
            raise
        raise common.Failure(f"rank {rank()} lost another one, or waited longer than rank_timeout "
                             f"for it ({str(error).splitlines()[0]})") from None


def lost(error):
    """Whether an error says that another rank is gone, or was waited for too long."""
    return started() and (isinstance(error, dist.DistError) or "gloo" in str(error))


def set_timeout(seconds):
    """From now on a rank that waits longer than this for another one fails; all ranks call it."""
    global GROUP
    if started():
        GROUP = dist.new_group(timeout=timedelta(seconds=seconds))


def agree(number=0):
    """The highest number that a rank calls this with; all ranks do, and wait for each other. Ends
    a rank with status 2 where another one met a user's mistake."""
    result = _agree(number) if started() else number
    if result >= MISTAKE:
        sys.exit(2)
    return result


def signalled(signals):
    """Whether a signal has come to any rank; then one is in the list of each."""
    if (number := agree(max(signals, default=0))) and not signals:
        signals.append(number)
    return bool(number)


def _agree(number, timeout=None):
    code = torch.tensor(number)
    work = dist.all_reduce(code, dist.ReduceOp.MAX, group=GROUP, async_op=True)
    work.wait(timeout) if timeout else work.wait()
    return code.item()


@contextlib.contextmanager
def first_rank_first():
    """The other ranks come to the block once the first one is through."""
    if rank():
        agree()
    yield
    if not rank():
        agree()


def total(value):
    """The sum over the ranks of a number or a numpy array, as such."""
    if not started():
        return value
    tensor = torch.from_numpy(np.array(value))
    dist.all_reduce(tensor, group=GROUP)
    return tensor.numpy() if isinstance(value, np.ndarray) else tensor.item()


def deal(batches):
    """This rank's part of the batches, arrays or dicts of arrays: one of world(). All ranks must
    look up as often, so those with one batch less get an empty one in the end."""
    number = -1
    for number, batch in enumerate(batches):
        if number % world() == rank():
            yield batch
    if number % world() < rank() and number >= 0:
        yield batch[:0] if isinstance(batch, np.ndarray) else {k: v[:0] for k, v in batch.items()}


def micro_batches(accumulation):
    """Those of a step that this rank works on. UserError where they cannot be dealt out evenly."""
    if over := accumulation % world():
        least = accumulation - over
        nearest = f"{least} or {least + world()}" if least else world()
        raise common.UserError(f"accumulation = {accumulation}: no multiple of the {world()} ranks "
                               f"that torchrun started: --accumulation={nearest} is")
    return range(rank(), accumulation, world())


def batch_norms(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]


def prepare(model):
    """Make the model's batch norms ready for sum_gradients. A running statistic is
    (1 - m) * running + m * new for each micro-batch in turn; here a rank sees every world()th."""
    for norm in batch_norms(model) if started() else ():
        norm.of_one, norm.momentum = norm.momentum, 1 - (1 - norm.momentum) ** world()


@torch.no_grad()
def sum_gradients(model, loss, count):
    """Once a step, after this rank's `count` micro-batches: add up over the ranks the dense
    gradients and the loss, which is returned, in one all-reduce. The running statistics of batch
    norms become what one process would have after the micro-batches of all ranks: a mean of those
    of the ranks, which saw every world()th, with more weight for the later ranks."""
    if not started():
        return loss
    norms, parameters = batch_norms(model), [p for p in model.parameters() if p.grad is not None]
    weights = [norm.of_one * (1 - norm.of_one) ** (world() - 1 - rank()) / norm.momentum
               for norm in norms]
    statistics = [weight * running for norm, weight in zip(norms, weights, strict=True)
                  for running in (norm.running_mean, norm.running_var)]
    parts = [*(p.grad for p in parameters), *statistics, loss]
    flat = torch.cat([part.flatten().to(parts[0].dtype) for part in parts])
    dist.all_reduce(flat, group=GROUP)
    sizes = [part.numel() for part in parts]
    sums = [piece.view_as(part) for part, piece in zip(parts, flat.split(sizes), strict=True)]
    for parameter, grad in zip(parameters, sums, strict=False):
        parameter.grad = grad
    for norm in norms:
        norm.num_batches_tracked += (world() - 1) * count
    running = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
    for buffer, mean in zip(running, sums[len(parameters):], strict=False):
        buffer.copy_(mean)
    return sums[-1]


class Exchange(torch.autograd.Function):
    """Rows to every rank, and rows from every rank: sizes[r] of x go to rank r, in this order, and
    received[r] come from it. The gradient takes the same way back."""

    @staticmethod
    def forward(ctx, x, sizes, received):
        ctx.sizes = sizes, received
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sizes, group=GROUP)
        return out

    @staticmethod
    def backward(ctx, grad):
        sizes, received = ctx.sizes
        return Exchange.apply(grad, received, sizes), None, None


class ShardedValueTable(pkm.ValueTable):
    """A ValueTable of which this rank has all slots, but only 1/world() of the columns, and, as
    LazyAdam makes them after it, of the moments. A slot that a token reads is known to all ranks;
    each sums up its columns for the tokens of all, and the tokens get their sums back. Gradients
    go the other way, so every rank has what its columns' update needs: exact, and never reduced.

    Slots travel in int32, all else in `dtype`. The ranks may have different numbers of tokens. With
    T tokens on each, R = heads * topk reads a token, W ranks and s bytes a number of `dtype` (4; 2
    in bfloat16 under autocast) a rank sends, a layer and micro-batch,
        forward   (W - 1) * T * ((4 + s) * R + s * dim / W)    slots, weights; sums of rows
        backward  (W - 1) * T * (s * R + s * dim / W)          gradients of weights; of sums
    and 8 bytes to each rank to say what T is. torch.compile has a graph break here.

    So under autocast an update differs from that of one process by more than the order of sums: the
    read weights, which one process has in float32, and each rank's part of their gradients are
    rounded to bfloat16 (to 1 part in 256) on their way.
    """

    def __init__(self, n_slots, dim):
        if dim % world():
            raise ValueError(f"values of width d_model = {dim} cannot be cut into {world()} equal "
                             "parts, one for each rank that torchrun started: take another number")
        super().__init__(n_slots, dim // world())

    @torch.no_grad()
    def reset_parameters(self):
        """On a CPU these are columns of the table that one process would draw, whatever world()
        is; a chunk of rows at a time, so that there never is a whole one."""
        dim = self.weight.shape[1] * world()
        for rows in self.weight.split(1024):
            rows.copy_(columns(rows.new_empty(len(rows), dim).normal_(std=dim**-0.5)))

    @torch.compiler.disable
    def forward(self, slots, weights, dtype=None):
        own = slots.new_full((world(),), len(slots), dtype=torch.int64, device="cpu")
        counts = torch.empty_like(own)
        dist.all_to_all_single(counts, own, group=GROUP)
        own, counts = own.tolist(), counts.tolist()
        slots = Exchange.apply(slots.repeat(world(), 1, 1), own, counts)
        sent = weights.repeat(world(), 1, 1).to(dtype or self.weight.dtype)
        weights = Exchange.apply(sent, own, counts).to(weights.dtype)
        sums = super().forward(slots, weights, dtype)  # (tokens of all ranks, dim / world)
        sums = Exchange.apply(sums, counts, own)  # (world * tokens, dim / world)
        return sums.view(world(), own[0], sums.shape[1]).transpose(0, 1).flatten(1)


def table_class():
    return ShardedValueTable if started() else pkm.ValueTable


def columns(whole):
    """This rank's columns of a value table, or of its moments: a view."""
    return whole.chunk(world(), dim=1)[rank()]


def tables(model):
    """{name of its weight: ShardedValueTable} of a model."""
    return {f"{name}.weight": module for name, module in model.named_modules()
            if isinstance(module, ShardedValueTable)}


def parameter_sizes(model):
    """{name: numbers in it} of the parameters of the whole model, of which this rank may have some
    columns only."""
    cut = tables(model)
    return {name: p.numel() * (world() if name in cut else 1)
            for name, p in model.named_parameters()}


def count_parameters(model):
    return sum(parameter_sizes(model).values())


def cut_weights(model, weights):
    """A state dict of whole tensors as one with this rank's columns of the value tables."""
    ours = tables(model)
    return {name: columns(w) if name in ours else w for name, w in weights.items()}


def cut_moments(state):
    """LazyAdam's state dict, likewise, but with copies."""
    return {**state, "state": {n: {key: columns(value).clone() if torch.is_tensor(value) else value
                                   for key, value in moments.items()}
                               for n, moments in state["state"].items()}}


class Columns:
    """In the content of a file to be saved: a tensor of which each rank has its columns."""

    def __init__(self, part):
        self.part, self.shape = part.detach(), (len(part), part.shape[1] * world())


def mark_weights(model, weights):
    """A state dict with the columns of value tables marked, for save()."""
    ours = tables(model)
    return {name: Columns(w) if name in ours else w for name, w in weights.items()}


def mark_moments(state):
    """LazyAdam's state dict, likewise."""
    if not started():
        return state
    return {**state, "state": {n: {key: Columns(value) if torch.is_tensor(value) else value
                                   for key, value in moments.items()}
                               for n, moments in state["state"].items()}}


def save(content, path):
    """torch.save(content, path), by the first rank; Columns in it are whole tensors in the file. No
    rank ever has one of these: the first makes a file with room for them, and fills it a few rows
    of all ranks at a time."""
    if not started():
        torch.save(content, path)
        return
    file = None
    if not rank():
        with torch.serialization.skip_data():
            torch.save(_each(content, lambda part: torch.empty(part.shape, dtype=part.part.dtype)),
                       path)
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here, not a crash below
            with open(path, "rb+") as reserved:
                os.posix_fallocate(reserved.fileno(), 0, path.stat().st_size)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            file = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    _fill(content, file)


def _each(content, function):
    """Nested dicts and lists with function(part) in place of every Columns."""
    if isinstance(content, dict):
        return {key: _each(value, function) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(_each(value, function) for value in content)
    return function(content) if isinstance(content, Columns) else content


def _fill(content, file):
    """Copy the tensors in `content` to those in `file`, on the first rank; elsewhere file is None.
    """
    if isinstance(content, dict | list | tuple):
        keys = content if isinstance(content, dict) else range(len(content))
        for key in keys:
            _fill(content[key], None if file is None else file[key])
    elif isinstance(content, Columns):
        rows = max(1, GATHERED // (world() * content.part[0].nbytes))
        parts = content.part.new_empty(world(), rows, content.part.shape[1])
        for n, part in enumerate(content.part.split(rows)):
            received = None if rank() else list(parts[:, :len(part)])
            dist.gather(part, received, group=GROUP)
            if not rank():
                at = slice(n * rows, n * rows + len(part))
                file[at].view(len(part), world(), -1).copy_(parts[:, :len(part)].transpose(0, 1))
    elif torch.is_tensor(content) and not rank():
        file.copy_(content)
