"""
Run a script in the processes of torchrun (NCCL between CUDA cards, gloo between CPUs).

$ torchrun --standalone --nproc_per_node=4 pretrain.py configs/base_resm_init.py
$ torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=HOST pretrain.py CONFIG.py
$ torchrun --nnodes=2 --node_rank=1 --nproc_per_node=8 --master_addr=HOST pretrain.py CONFIG.py

The ranks share the micro-batches of a step. A micro-batch and its dropout are a function of (seed,
step, micro-batch). Any number of ranks therefore makes the same step, except for the order of sums.
Each rank has all dense weights, and adds up their gradients with the others (gradients.py). Each
has some columns of every value table (sharded_values.py). Files are the same as one process's.
"""
import contextlib
import json
import mmap
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lib.errors import Failure, UserError, run_main
from lib.files import under_torchrun
from pkm import PKM
from values import ValueTable

GROUP = None  # the process group of all collectives; None is torch's default
MISTAKE = 1000  # codes from here up report a user's mistake; lower ones are signals


def is_distributed():
    """Tell whether this process shares its work with others."""
    return dist.is_available() and dist.is_initialized()


def get_world_size():
    """Return the number of processes."""
    return dist.get_world_size() if is_distributed() else 1


def get_rank():
    """Return the number of this process; the first one, 0, prints and writes files."""
    return dist.get_rank() if is_distributed() else 0


def run_ranks(main):
    """Call main() as run_main does. Under torchrun, set up a process group first. Only the first
    rank prints. A user's mistake ends all ranks with status 2 and one line, even if only one rank
    met it."""
    run_main((lambda: _run_as_rank(main)) if under_torchrun() else main)


def _run_as_rank(main):
    local_rank = int(os.environ["LOCAL_RANK"])
    if cards := torch.cuda.device_count():  # if CUDA_VISIBLE_DEVICES is empty, ranks run on CPUs
        if local_rank > cards:
            sys.exit(2)  # the rank with number `cards` prints the error
        if local_rank == cards:
            raise UserError(f"more ranks than cards: --nproc_per_node={cards}, or "
                            "CUDA_VISIBLE_DEVICES= for ranks on CPUs")
        torch.cuda.set_device(local_rank)
    store, rank, world_size = next(dist.rendezvous("env://"))
    # torchrun keeps the store after a restart, with the addresses of dead processes
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    # without a name, ranks with cards would have NCCL alone: no group for tensors on the CPU
    backend = "cpu:gloo,cuda:nccl" if cards else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - to the end
    try:
        status = main()
        dist.destroy_process_group()
        return status
    except UserError as error:  # the lowest rank that met one prints it
        tell_torchrun(error)  # first: torchrun ends this rank as soon as another one has ended
        code = MISTAKE + world_size - rank
        with contextlib.suppress(RuntimeError):  # the others may be gone
            highest = _all_reduce_max(code, timedelta(seconds=30))
            dist.destroy_process_group()
            if highest > code:
                sys.exit(2)
        raise
    except RuntimeError as error:
        if local_rank and isinstance(error, Failure):
            sys.exit(1)
        failure = error
        if lost_rank(error):
            failure = Failure(f"rank {rank} lost another one, or waited longer than rank_timeout "
                              f"for it ({str(error).splitlines()[0]})")
        elif not isinstance(error, Failure):
            raise  # with its cause
        tell_torchrun(failure)
        raise failure from None


def tell_torchrun(error):
    """Leave an error's line for torchrun, whose report of twenty lines then ends with it."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        line = f"error: {error}"
        more = {"py_callstack": line, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": more}}))


def lost_rank(error):
    """Tell whether an error reports a rank that is gone, or too slow."""
    return is_distributed() and (isinstance(error, dist.DistError) or "gloo" in str(error))


def set_timeout(seconds):
    """Make a rank fail if it waits longer than `seconds` for another. Every rank must call it."""
    global GROUP
    if is_distributed():
        GROUP = dist.new_group(timeout=timedelta(seconds=seconds))


def max_over_ranks(value=0):
    """Return the maximum of an int over the ranks. All must call it, and wait for each other. Ends
    this rank with status 2 if another one met a user's mistake."""
    maximum = _all_reduce_max(value) if is_distributed() else value
    if maximum >= MISTAKE:
        dist.destroy_process_group()
        sys.exit(2)
    return maximum


def any_signalled(signals):
    """Tell whether any rank has a signal in its list; then every rank gets one."""
    stop, _ = stop_or_save(signals, False)
    return stop


def stop_or_save(signals, save):
    """Agree with the other ranks on what follows a step, in one exchange. Returns (any rank has a
    signal in its list, any rank wants to save). If one has a signal, every rank gets it."""
    signal, save = divmod(max_over_ranks(2 * max(signals, default=0) + save), 2)
    if signal and not signals:
        signals.append(signal)
    return bool(signal), bool(save)


def _all_reduce_max(value, timeout=None):
    maximum = torch.tensor(value)
    work = dist.all_reduce(maximum, dist.ReduceOp.MAX, group=GROUP, async_op=True)
    work.wait(timeout) if timeout else work.wait()
    return maximum.item()


@contextlib.contextmanager
def first_rank_first():
    """Let the other ranks enter the block after the first one has left it."""
    if get_rank():
        max_over_ranks()
    yield
    if not get_rank():
        max_over_ranks()


def sum_over_ranks(value):
    """Sum a number or a numpy array over the ranks. Returns the same type."""
    if not is_distributed():
        return value
    tensor = torch.from_numpy(np.array(value))
    dist.all_reduce(tensor, group=GROUP)
    return tensor.numpy() if isinstance(value, np.ndarray) else tensor.item()


def deal_batches(batches):
    """Yield this rank's batches: every world_size-th. They are arrays or dicts of arrays. Ranks
    with one batch fewer get an empty one at the end, because lookups are collective."""
    number = -1
    for number, batch in enumerate(batches):
        if number % get_world_size() == get_rank():
            yield batch
    if number % get_world_size() < get_rank() and number >= 0:
        yield batch[:0] if isinstance(batch, np.ndarray) else {k: v[:0] for k, v in batch.items()}


def my_micro_batches(accumulation, batch_size=0):
    """List this rank's micro-batches of a step; UserError if the ranks cannot share them evenly.
    With `batch_size`, the sequences of a micro-batch, the error names settings that work and keep
    the sequences of a step."""
    world_size = get_world_size()
    if accumulation % world_size:
        sequences = accumulation * batch_size
        more = range(accumulation - accumulation % world_size + world_size, sequences + 1)
        same = [n for n in more if n % world_size == 0 and sequences % n == 0]
        flags = f"--accumulation={more.start}"
        if same:
            flags = (f"--batch_size={sequences // same[0]} --accumulation={same[0]}, which keep "
                     f"{sequences} sequences a step")
        raise UserError(f"accumulation = {accumulation} is not a multiple of the {world_size} "
                        f"ranks that torchrun started: use {flags}")
    return range(get_rank(), accumulation, world_size)


def distribute(model):
    """Prepare a model, which has its weights already, for training on several ranks.

    Each value table keeps only this rank's columns. Batch norms get another momentum: one process
    computes (1 - m) * running + m * new for each micro-batch; a rank sees every world_size-th one.
    """
    if is_distributed():
        shard_values(model)
        for norm in batch_norms(model):
            norm.one_process_momentum = norm.momentum
            norm.momentum = 1 - (1 - norm.momentum) ** get_world_size()


def batch_norms(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]


@torch.no_grad()
def sum_gradients(model, loss, count):
    """Add up the dense gradients and the loss over the ranks. Returns the sum of the losses.

    Every rank calls it once a step, after its `count` micro-batches. The running statistics of
    batch norms become those of one process: a mean over the ranks, in which later micro-batches
    weigh more. All this is one all-reduce.
    """
    if not is_distributed():
        return loss
    world_size, norms = get_world_size(), batch_norms(model)
    statistics = []
    for norm in norms:
        momentum, later_ranks = norm.one_process_momentum, world_size - 1 - get_rank()
        weight = momentum * (1 - momentum) ** later_ranks / norm.momentum
        statistics += [weight * norm.running_mean, weight * norm.running_var]
    parameters = [p for p in model.parameters() if p.grad is not None]
    tensors = [*(p.grad for p in parameters), *statistics, loss]
    flat = torch.cat([tensor.flatten().to(tensors[0].dtype) for tensor in tensors])
    dist.all_reduce(flat, group=GROUP)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    sums = iter([piece.view_as(tensor) for tensor, piece in zip(tensors, pieces, strict=True)])
    for parameter in parameters:
        parameter.grad = next(sums)
    for norm in norms:
        norm.running_mean.copy_(next(sums))
        norm.running_var.copy_(next(sums))
        norm.num_batches_tracked += (world_size - 1) * count
    return next(sums)


def columns(whole):
    """View this rank's columns of a value table, or of its moments."""
    return whole.chunk(get_world_size(), dim=1)[get_rank()]


def shard_values(model):
    """Replace each value table of a model by this rank's columns of it."""
    for module in model.modules():
        if isinstance(module, PKM):
            module.values = ShardedValueTable(module.values)


class ShardedValueTable(ValueTable):
    """This rank's columns of a ValueTable; all ranks answer a lookup together.

    Each rank sends all other ranks the slots that its tokens read. Each sums up its columns for the
    tokens of all ranks and sends the sums back. Gradients go the other way. So every rank gets what
    the update of its columns needs, exactly, and no gradient of values is ever reduced. LazyAdam's
    moments are cut like the values.

    Slots travel in int32, all else in `dtype`. The ranks may have different numbers of tokens. A
    rank has T tokens with R = heads * topk reads each. Let W be the number of ranks and s the bytes
    of a number (4, or 2 in bfloat16). For each layer and micro-batch a rank sends:
        forward   (W - 1) * T * ((4 + s) * R + s * dim / W)    slots, weights; sums of rows
        backward  (W - 1) * T * (s * R + s * dim / W)          gradients of weights; of sums
    and T itself, 8 bytes to each rank. torch.compile has a graph break here.

    Under autocast the weights of reads are rounded to bfloat16 (1 part in 256) before they travel,
    and so is each rank's part of their gradients. One process has them in float32.
    """
    replicated = False

    def __init__(self, table):
        (n_slots, dim), world_size = table.weight.shape, get_world_size()
        if dim % world_size:
            raise UserError(f"values of width d_model = {dim} cannot be cut into {world_size} "
                            "equal parts, one for each rank: change d_model or --nproc_per_node")
        with torch.device("meta"):  # draws no random numbers
            super().__init__(n_slots, dim // world_size)
        self.weight = nn.Parameter(columns(table.weight.detach()).clone(),
                                   table.weight.requires_grad)

    @torch.compiler.disable
    def forward(self, slots, weights, dtype=None):
        world_size = get_world_size()
        own = torch.full((world_size,), len(slots))
        sizes = torch.empty_like(own)
        dist.all_to_all_single(sizes, own, group=GROUP)
        own, sizes = own.tolist(), sizes.tolist()  # tokens of this rank, of each rank
        slots = Exchange.apply(slots.repeat(world_size, 1, 1), own, sizes)
        sent = weights.repeat(world_size, 1, 1).to(dtype or self.weight.dtype)
        weights = Exchange.apply(sent, own, sizes).to(weights.dtype)
        sums = super().forward(slots, weights, dtype)  # (tokens of all ranks, dim / world_size)
        sums = Exchange.apply(sums, sizes, own)  # (world_size * tokens, dim / world_size)
        return sums.view(world_size, own[0], sums.shape[1]).transpose(0, 1).flatten(1)


class Exchange(torch.autograd.Function):
    """Send sizes[r] rows of x to each rank r, and receive received[r] rows from it. The rows are
    in the order of the ranks. The gradient travels back the same way."""

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


def count_parameters(model):
    """Count the parameters of a whole model, those of the other ranks included."""
    elsewhere = sum(module.weight.numel() for module in model.modules()
                    if isinstance(module, ShardedValueTable)) * (get_world_size() - 1)
    return sum(p.numel() for p in model.parameters()) + elsewhere


class Columns:
    """One rank's columns of a tensor that save_whole will write whole."""

    def __init__(self, own):
        self.own = own.detach()

    def __reduce_ex__(self, protocol):  # torch.save writes the whole tensor's shape
        shape = len(self.own), self.own.shape[1] * get_world_size()
        return torch.empty(shape, dtype=self.own.dtype).__reduce_ex__(protocol)


def mark_weights(model):
    """Make a model's state dict for save_whole: Columns in place of cut value tables."""
    cut = {f"{name}.weight" for name, module in model.named_modules()
           if isinstance(module, ShardedValueTable)}
    return {name: Columns(w) if name in cut else w for name, w in model.state_dict().items()}


def mark_moments(state):
    """Put Columns in place of the moments in LazyAdam's state dict, for save_whole."""
    return map_moments(Columns, state) if is_distributed() else state


def cut_moments(state):
    """Copy this rank's columns of the moments in LazyAdam's state dict."""
    return map_moments(lambda whole: columns(whole).clone(), state)


def map_moments(function, state):
    moments = {n: {key: function(value) if torch.is_tensor(value) else value
                   for key, value in table.items()} for n, table in state["state"].items()}
    return {**state, "state": moments}


def save_whole(content, path):
    """Save nested dicts and lists as torch.save does, with whole tensors in place of Columns.

    Every rank must call it. The first one makes a file with room for all tensors, maps it into
    memory and fills in one tensor at a time. It never has two whole tables in memory.
    """
    if not is_distributed():
        torch.save(content, path)
        return
    file = content
    if not get_rank():
        with torch.serialization.skip_data():
            torch.save(content, path)
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here, not a crash below
            with open(path, "rb+") as reserved:
                os.posix_fallocate(reserved.fileno(), 0, path.stat().st_size)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            file = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    for tensor, target in zip(leaves(content), leaves(file), strict=True):
        if isinstance(tensor, Columns):
            gather_columns(tensor.own, target)
        elif torch.is_tensor(tensor) and not get_rank():
            target.copy_(tensor)


def leaves(content):
    """List what nested dicts and lists contain."""
    if isinstance(content, dict):
        content = list(content.values())
    if not isinstance(content, list | tuple):
        return [content]
    return [leaf for part in content for leaf in leaves(part)]


def gather_columns(own, whole):
    """Copy the columns of all ranks into the tensor `whole` of the first rank."""
    parts = None if get_rank() else [torch.empty_like(own) for _ in range(get_world_size())]
    dist.gather(own, parts, group=GROUP)
    if parts:
        for target, part in zip(whole.chunk(len(parts), dim=1), parts, strict=True):
            target.copy_(part)
