"""
Cut value tables by columns over the ranks, and save them whole.
"""
import mmap
import os

import torch
import torch.distributed as dist
from torch import nn

from lib.common.errors import UserError
from lib.distributed import processes
from lib.distributed.processes import get_rank, get_world_size, is_distributed
from pkm import PKM
from values import ValueTable


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
        dist.all_to_all_single(sizes, own, group=processes.GROUP)
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
        dist.all_to_all_single(out, x.contiguous(), received, sizes, group=processes.GROUP)
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
    dist.gather(own, parts, group=processes.GROUP)
    if parts:
        for target, part in zip(whole.chunk(len(parts), dim=1), parts, strict=True):
            target.copy_(part)
