"""
Train one model on several ranks. Only scripts that torchrun started import this file.

The ranks share the micro-batches of a step. A micro-batch and its dropout are a function of (seed,
step, micro-batch), and any number of ranks makes the same step. Each rank has all dense weights and
adds up their gradients with the others. Each has some columns of every value table.
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lib.ranks import get_rank, get_world_size
from lib.settings import UserError
from pkm import PKM, ValueTable


def shard(model):
    """Cut the value tables of a model, which has its weights already, over the ranks.

    A rank sees 1 / W of the micro-batches of W ranks. Momentum m becomes 1 - (1 - m)^W, and running
    statistics fade as fast as in one process.
    """
    world_size = get_world_size()
    later_ranks = world_size - 1 - get_rank()
    for memory in memories(model):
        memory.values = ShardedValueTable(memory.values)
        norm, momentum = memory.query_norm, memory.query_norm.momentum
        norm.momentum = 1 - (1 - momentum) ** world_size
        # the weight of this rank's statistics in merge()
        norm.share = momentum * (1 - momentum) ** later_ranks / norm.momentum


def memories(model):
    return [module for module in model.modules() if isinstance(module, PKM)]


@torch.no_grad()
def merge(model, loss, count):
    """Merge what the ranks computed in a step: dense gradients, loss, running statistics.

    Every rank calls it after its `count` micro-batches. Returns the sum of the losses. The
    statistics equal those of one process that saw the ranks' micro-batches in order.
    """
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
    return map_moments(gather, state)


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
