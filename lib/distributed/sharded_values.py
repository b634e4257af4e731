"""
Cut value tables by columns over the ranks, and save them as if they were whole.
"""
import mmap
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lib.common.errors import UserError
from lib.distributed.processes import get_rank, get_world_size, is_distributed
from values import ValueTable

PIECE = 2**20  # numbers gathered at a time: 4 MB in float32


def columns(whole):
    """View this rank's columns of a value table, or of its moments."""
    return whole.chunk(get_world_size(), dim=1)[get_rank()]


class ShardedValueTable(ValueTable):
    """This rank's columns of a ValueTable; all ranks answer a lookup together.

    Each rank sends the slots and weights of its reads to all others, sums up its columns for the
    tokens of all ranks, and sends these sums back. Gradients go the other way. A rank then has
    what the update of its columns needs: no gradient of values is ever reduced.

    A rank has T tokens with R = heads * topk reads each; T may differ between ranks. With W ranks
    and s bytes a number in `dtype` (a slot has 4) it sends, for each layer and micro-batch,
        forward   (W - 1) * T * ((4 + s) * R + s * dim / W)    slots, weights; sums of rows
        backward  (W - 1) * T * (s * R + s * dim / W)          gradients of weights; of sums
    and T itself, 8 bytes to each rank. Under autocast, weights and each rank's part of their
    gradients are rounded to bfloat16 to travel. One process has them in float32.
    """

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
        dist.all_to_all_single(sizes, own)
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
        ctx.back = received, sizes
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sizes)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.back), None, None


def count_parameters(model):
    """Count the parameters of a whole model, those of the other ranks included."""
    cut = {id(m.weight) for m in model.modules() if isinstance(m, ShardedValueTable)}
    return sum(p.numel() * (get_world_size() if id(p) in cut else 1) for p in model.parameters())


class Columns:
    """Mark one rank's columns of a tensor, which save_whole will write whole."""

    def __init__(self, own):
        self.own = own
        self.shape = len(own), own.shape[1] * get_world_size()  # of the whole tensor


def mark_weights(model):
    """Make a model's state dict for save_whole: Columns in place of cut value tables."""
    cut = {f"{name}.weight" for name, module in model.named_modules()
           if isinstance(module, ShardedValueTable)}
    return {name: Columns(w) if name in cut else w for name, w in model.state_dict().items()}


def mark_moments(state):
    """Put Columns in place of the moments in LazyAdam's state dict, for save_whole."""
    return tree_map_only(torch.Tensor, Columns, state) if is_distributed() else state


def cut_moments(state):
    """Copy this rank's columns of the moments in LazyAdam's state dict."""
    return tree_map_only(torch.Tensor, lambda whole: columns(whole).clone(), state)


def save_whole(content, path):
    """Save nested dicts and lists as torch.save does, with whole tensors in place of Columns.

    Every rank must call it. The first one makes a file with room for all tensors, maps it into
    memory and fills it in. It never has a whole table in memory.
    """
    if not is_distributed():
        torch.save(content, path)
        return
    file = content
    if not get_rank():
        with torch.serialization.skip_data():
            torch.save(tree_map_only(Columns, lambda c: torch.empty(c.shape, dtype=c.own.dtype),
                                     content), path)
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here, not a crash below
            with open(path, "rb+") as reserved:
                os.posix_fallocate(reserved.fileno(), 0, path.stat().st_size)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            file = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    for tensor, target in zip(tree_leaves(content), tree_leaves(file), strict=True):
        if isinstance(tensor, Columns):
            gather_columns(tensor.own, target)
        elif torch.is_tensor(tensor) and not get_rank():
            target.copy_(tensor)


def gather_columns(own, whole):
    """Copy the columns of all ranks into the tensor `whole` of the first rank, in pieces."""
    rows = PIECE // (own.shape[1] * get_world_size())
    for start in range(0, len(own), rows):
        piece = own[start:start + rows]
        parts = None if get_rank() else [torch.empty_like(piece) for _ in range(get_world_size())]
        dist.gather(piece, parts)
        if parts:
            whole[start:start + rows].copy_(torch.cat(parts, dim=1))
