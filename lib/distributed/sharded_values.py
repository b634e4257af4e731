"""
Value tables that are cut by columns over the ranks.
"""
import mmap
import os

import torch
import torch.distributed as dist

import pkm
from lib.distributed import processes
from lib.distributed.processes import get_rank, get_world_size, is_distributed

GATHERED = 2**22  # bytes of a tensor that the first rank gathers at a time, to save it


class Exchange(torch.autograd.Function):
    """Rows to every rank, and rows from every rank: sizes[r] of x go to rank r, in this order, and
    received[r] come from it. The gradient takes the same way back."""

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
        if dim % get_world_size():
            raise ValueError(f"values of width d_model = {dim} cannot be cut into {get_world_size()} equal "
                             "parts, one for each rank that torchrun started: take another number")
        super().__init__(n_slots, dim // get_world_size())

    @torch.no_grad()
    def reset_parameters(self):
        """On a CPU these are columns of the table that one process would draw, whatever world()
        is; a chunk of rows at a time, so that there never is a whole one."""
        dim = self.weight.shape[1] * get_world_size()
        for rows in self.weight.split(1024):
            rows.copy_(columns(rows.new_empty(len(rows), dim).normal_(std=dim**-0.5)))

    @torch.compiler.disable
    def forward(self, slots, weights, dtype=None):
        own = slots.new_full((get_world_size(),), len(slots), dtype=torch.int64, device="cpu")
        counts = torch.empty_like(own)
        dist.all_to_all_single(counts, own, group=processes.GROUP)
        own, counts = own.tolist(), counts.tolist()
        slots = Exchange.apply(slots.repeat(get_world_size(), 1, 1), own, counts)
        sent = weights.repeat(get_world_size(), 1, 1).to(dtype or self.weight.dtype)
        weights = Exchange.apply(sent, own, counts).to(weights.dtype)
        sums = super().forward(slots, weights, dtype)  # (tokens of all ranks, dim / world)
        sums = Exchange.apply(sums, counts, own)  # (world * tokens, dim / world)
        return sums.view(get_world_size(), own[0], sums.shape[1]).transpose(0, 1).flatten(1)


def table_class():
    return ShardedValueTable if is_distributed() else pkm.ValueTable


def columns(whole):
    """This rank's columns of a value table, or of its moments: a view."""
    return whole.chunk(get_world_size(), dim=1)[get_rank()]


def sharded_tables(model):
    """{name of its weight: ShardedValueTable} of a model."""
    return {f"{name}.weight": module for name, module in model.named_modules()
            if isinstance(module, ShardedValueTable)}


def parameter_sizes(model):
    """{name: numbers in it} of the parameters of the whole model, of which this rank may have some
    columns only."""
    cut = sharded_tables(model)
    return {name: p.numel() * (get_world_size() if name in cut else 1)
            for name, p in model.named_parameters()}


def count_parameters(model):
    return sum(parameter_sizes(model).values())


def cut_weights(model, weights):
    """A state dict of whole tensors as one with this rank's columns of the value tables."""
    ours = sharded_tables(model)
    return {name: columns(w) if name in ours else w for name, w in weights.items()}


def cut_moments(state):
    """LazyAdam's state dict, likewise, but with copies."""
    return {**state, "state": {n: {key: columns(value).clone() if torch.is_tensor(value) else value
                                   for key, value in moments.items()}
                               for n, moments in state["state"].items()}}


class Columns:
    """In the content of a file to be saved: a tensor of which each rank has its columns."""

    def __init__(self, part):
        self.part, self.shape = part.detach(), (len(part), part.shape[1] * get_world_size())


def mark_weights(model, weights):
    """A state dict with the columns of value tables marked, for save()."""
    ours = sharded_tables(model)
    return {name: Columns(w) if name in ours else w for name, w in weights.items()}


def mark_moments(state):
    """LazyAdam's state dict, likewise."""
    if not is_distributed():
        return state
    return {**state, "state": {n: {key: Columns(value) if torch.is_tensor(value) else value
                                   for key, value in moments.items()}
                               for n, moments in state["state"].items()}}


def save_whole(content, path):
    """torch.save(content, path), by the first rank; Columns in it are whole tensors in the file. No
    rank ever has one of these: the first makes a file with room for them, and fills it a few rows
    of all ranks at a time."""
    if not is_distributed():
        torch.save(content, path)
        return
    file = None
    if not get_rank():
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
        rows = max(1, GATHERED // (get_world_size() * content.part[0].nbytes))
        parts = content.part.new_empty(get_world_size(), rows, content.part.shape[1])
        for n, part in enumerate(content.part.split(rows)):
            received = None if get_rank() else list(parts[:, :len(part)])
            dist.gather(part, received, group=processes.GROUP)
            if not get_rank():
                at = slice(n * rows, n * rows + len(part))
                file[at].view(len(part), get_world_size(), -1).copy_(parts[:, :len(part)].transpose(0, 1))
    elif torch.is_tensor(content) and not get_rank():
        file.copy_(content)
