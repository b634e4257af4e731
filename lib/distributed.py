"""
Run a script in the processes of torchrun (NCCL between CUDA cards, gloo between CPUs).

$ torchrun --standalone --nproc_per_node=4 pretrain.py configs/base_resm_init.py

The ranks share the micro-batches of a step. A micro-batch and its dropout are a function of (seed,
step, micro-batch), and any number of ranks makes the same step. Each rank has all dense weights and
adds up their gradients with the others. Each has some columns of every value table.
"""
import contextlib
import os
import sys
import time
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lib.errors import UserError, run_main
from lib.files import under_torchrun
from pkm import PKM
from values import ValueTable


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
    """Call main() as run_main does; under torchrun in a process group, where rank 0 prints."""
    run_main(partial(run_as_rank, main) if under_torchrun() else main)


def run_as_rank(main):
    """Join the process group of torchrun and call main(). Returns its status."""
    local_rank = int(os.environ["LOCAL_RANK"])
    cards = torch.cuda.device_count()  # if CUDA_VISIBLE_DEVICES is empty, ranks run on CPUs
    if cards and local_rank >= cards:
        raise UserError(f"more ranks than cards: --nproc_per_node={cards}, or "
                        "CUDA_VISIBLE_DEVICES= for ranks on CPUs")
    if cards:
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
    except UserError:
        if rank:
            time.sleep(10)  # rank 0 prints the line, and torchrun ends this rank
        raise
    dist.destroy_process_group()
    return status


def sum_over_ranks(value):
    """Sum a number or a numpy array over the ranks. Returns the same type."""
    if not is_distributed():
        return value
    tensor = torch.from_numpy(np.array(value))
    dist.all_reduce(tensor)
    return tensor.numpy() if isinstance(value, np.ndarray) else tensor.item()


def barrier():
    """Wait for the other ranks."""
    sum_over_ranks(0)


@contextlib.contextmanager
def first_rank_first():
    """Let the other ranks enter the block after the first one has left it."""
    if get_rank():
        barrier()
    yield
    if not get_rank():
        barrier()


def any_signalled(signals):
    """Tell whether any rank has a signal in its list."""
    return sum_over_ranks(len(signals)) > 0


def check_accumulation(config):
    """Raise UserError if the ranks cannot share a step's micro-batches evenly."""
    ranks = get_world_size()
    if config.accumulation % ranks or config.accumulation < 1:
        more = (config.accumulation // ranks + 1) * ranks
        raise UserError(f"accumulation = {config.accumulation} is not a multiple of the {ranks} "
                        f"ranks of torchrun: --accumulation={more}, or another --nproc_per_node")


def my_micro_batches(accumulation):
    """List this rank's micro-batches of a step."""
    return range(get_rank(), accumulation, get_world_size())


def deal_batches(batches):
    """Yield this rank's batches: every world_size-th. They are arrays or dicts of arrays."""
    rank, world_size, number = get_rank(), get_world_size(), -1
    for number, batch in enumerate(batches):
        if number % world_size == rank:
            yield batch
    if 0 <= number and number % world_size < rank:  # an empty one: lookups are collective
        yield batch[:0] if isinstance(batch, np.ndarray) else {k: v[:0] for k, v in batch.items()}


def distribute(model):
    """Prepare a model, which has its weights already, for training on several ranks.

    Each value table keeps only this rank's columns. A rank sees one of world_size micro-batches.
    For the running statistics to fade as in one process, momentum m becomes 1 - (1 - m)^world_size.
    """
    if not is_distributed():
        return
    world_size = get_world_size()
    later_ranks = world_size - 1 - get_rank()
    for memory in memories(model):
        memory.values = ShardedValueTable(memory.values)
        norm, momentum = memory.query_norm, memory.query_norm.momentum
        norm.momentum = 1 - (1 - momentum) ** world_size
        # the weight of this rank's statistics in sum_gradients
        norm.share = momentum * (1 - momentum) ** later_ranks / norm.momentum


def memories(model):
    return [module for module in model.modules() if isinstance(module, PKM)]


@torch.no_grad()
def sum_gradients(model, loss, count):
    """Add up the dense gradients and the loss over the ranks. Returns the sum of the losses.

    Every rank calls it after its `count` micro-batches of a step. The running statistics of batch
    norms become those of one process: a mean in which later ranks weigh more.
    """
    if not is_distributed():
        return loss
    for memory in memories(model):
        norm = memory.query_norm
        if not norm.training:  # a frozen memory
            continue
        norm.num_batches_tracked += (get_world_size() - 1) * count
        for statistic in (norm.running_mean, norm.running_var):
            statistic *= norm.share
            dist.all_reduce(statistic)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    vector_to_parameters(flat, gradients)
    dist.all_reduce(loss)
    return loss


def columns(whole):
    """View this rank's columns of a value table, or of its moments."""
    return whole.chunk(get_world_size(), dim=1)[get_rank()]


class ShardedValueTable(ValueTable):
    """This rank's columns of a ValueTable; all ranks answer a lookup together.

    Each rank sends all other ranks the slots that its tokens read. Each sums up its columns for the
    tokens of all ranks and sends the sums back. Gradients go the other way. Every rank gets what
    the update of its columns needs, exactly. LazyAdam's moments are cut like the values.

    Slots travel in int32, all else in `dtype`: under autocast weights are rounded to bfloat16. With
    W ranks, T tokens of a rank, R = heads * topk reads and s bytes a number, a rank sends
        forward   (W - 1) * T * ((4 + s) * R + s * dim / W)    slots, weights; sums of rows
        backward  (W - 1) * T * (s * R + s * dim / W)          gradients of weights; of sums
    """
    replicated = False

    def __init__(self, table):
        (n_slots, dim), world_size = table.weight.shape, get_world_size()
        if dim % world_size:
            raise UserError(f"values of width d_model = {dim} cannot be cut into {world_size} "
                            "equal parts, one for each rank: change d_model or --nproc_per_node")
        with torch.device("meta"):  # draws no random numbers
            super().__init__(n_slots, dim // world_size)
        self.weight = nn.Parameter(columns(table.weight).clone(), requires_grad=False)
        self.learns = table.learns

    @torch.compiler.disable
    def forward(self, slots, weights, dtype=None):
        world_size = get_world_size()
        own = torch.full((world_size,), len(slots))
        sizes = torch.empty_like(own)
        dist.all_to_all_single(sizes, own)
        own, sizes = own.tolist(), sizes.tolist()  # tokens of this rank, of each rank
        slots = Exchange.apply(slots.repeat(world_size, 1, 1), own, sizes)
        sent = weights.repeat(world_size, 1, 1).to(dtype or self.weight.dtype)
        weights = Exchange.apply(sent, own, sizes).to(weights.dtype)
        sums = super().forward(slots, weights, dtype)  # (tokens of all ranks, dim / world_size)
        sums = Exchange.apply(sums, sizes, own)  # (world_size * tokens, dim / world_size)
        return sums.view(world_size, own[0], sums.shape[1]).transpose(0, 1).flatten(1)


class Exchange(torch.autograd.Function):
    """Send sizes[r] rows of x to each rank r, and receive received[r] rows from it.

    The rows are in the order of the ranks. The gradient travels back the same way.
    """

    @staticmethod
    def forward(ctx, x, sizes, received):
        ctx.sizes = sizes, received
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sizes)
        return out

    @staticmethod
    def backward(ctx, grad):
        sizes, received = ctx.sizes
        return Exchange.apply(grad, received, sizes), None, None


def whole_weights(model):
    """Return a model's state dict. Value tables are whole on the first rank (see gather)."""
    weights = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, ShardedValueTable):
            weights[f"{name}.weight"] = gather(module.weight)
    return weights


def whole_moments(state):
    """Return LazyAdam's state dict with moments that are whole on the first rank (see gather)."""
    return map_moments(gather, state) if is_distributed() else state


def cut_moments(state):
    """Copy this rank's columns of the moments in LazyAdam's state dict."""
    return map_moments(lambda whole: columns(whole).clone(), state)


def map_moments(function, state):
    moments = {n: {key: function(value) if torch.is_tensor(value) else value
                   for key, value in table.items()} for n, table in state["state"].items()}
    return {**state, "state": moments}


def gather(own):
    """Gather a tensor's columns in the first rank's memory. The others return their own."""
    own = own.detach().cpu()
    parts = None if get_rank() else [torch.empty_like(own) for _ in range(get_world_size())]
    dist.gather(own, parts)
    return torch.cat(parts, dim=1) if parts else own
