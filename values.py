"""
The values of a product-key memory, and the Adam that updates only the rows that were read.

pkm.py uses this file, and shows in its docstring how a model is trained.
"""
import itertools
import math
import re
import warnings
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = re.sub(r"\W", "_", __name__)  # the op's namespace: two copies of this file can coexist
WARN_AT = 256  # backward passes without an update
CHUNK = 2**18  # elements of a table updated at a time: 1 MB in float32 fits a core's cache
TABLES = weakref.WeakValueDictionary()  # {table_id: ValueTable}
next_table_id = itertools.count()


class ValueTable(nn.Module):
    """The values of a memory: (n_slots, dim) rows, read as weighted sums.

    The gradient of the whole table is never made. Row r's gradient is the sum, over the reads of
    r, of weight * grad_out[token]. Backward only stores (slots, weights, grad_out) in `reads`, and
    LazyAdam computes from them the rows to update. torch.nn.utils.clip_grad_norm_ and GradScaler
    do not see this gradient. With a GradScaler, call LazyAdam.step(grad_scale=its scale) where it
    found no inf. weight.requires_grad_(False) freezes the table.
    """

    def __init__(self, n_slots, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_slots, dim))
        self.reset_parameters()
        self.reads = []  # stored since the last update, one for each backward pass
        self._register()

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=self.weight.shape[1]**-0.5)

    def _register(self):
        table_id = next(next_table_id)
        TABLES[table_id] = self
        # torch.compile would take an int for a constant, and compile every table anew
        self.table_id = torch.tensor(table_id, device="cpu")

    def __setstate__(self, state):
        """Give a deep copy or an unpickled table an id."""
        super().__setstate__(state)
        self._register()

    def forward(self, slots, weights, dtype=None):
        """Sum the rows at `slots`, weighted by `weights`.

        slots (int) and weights: (tokens, heads, topk). Returns (tokens, dim) in `dtype`, or in the
        table's dtype. A forward hook sees every read.
        """
        slots, weights = slots.flatten(1), weights.flatten(1)
        tracing = torch.jit.is_tracing()
        training = torch.is_grad_enabled() and self.weight.requires_grad and not tracing
        weight = self.weight.detach() if training else self.weight
        out = F.embedding_bag(slots, weight, per_sample_weights=weights.to(weight.dtype),
                              mode="sum").to(dtype or weight.dtype)
        if training:
            out = StoreRead.apply(out, self.weight, slots, weights.detach(), self.table_id)
        return out


class StoreRead(torch.autograd.Function):
    """Pass a read's output on, and store the read in backward.

    The output requires a gradient because `weight` does, also where all else is frozen.
    """

    @staticmethod
    def forward(ctx, out, weight, slots, weights, table_id):
        ctx.save_for_backward(weight, slots, weights, table_id)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad_out):
        weight, slots, weights, table_id = ctx.saved_tensors
        grad_weight = None
        if torch.compiler.is_compiling():
            grad_out = store_copies(grad_out, weight, slots, weights, table_id)
        elif not is_own(weight, table_id):
            products = weights[..., None] * grad_out[:, None]  # (tokens, reads, dim)
            grad_weight = torch.zeros_like(weight).index_add_(
                0, slots.flatten(), products.flatten(0, 1).to(weight.dtype))
        elif accumulates(weight):
            store(grad_out, slots, weights, table_id)
        return grad_out, grad_weight, None, None, None


def is_own(weight, table_id):
    """Tell whether `weight` is the table's, and not another one in a functional_call."""
    return weight.data_ptr() == TABLES[int(table_id)].weight.data_ptr()


def accumulates(weight):
    """Tell whether this backward pass adds to weight.grad.

    loss.backward() does; torch.autograd.grad(loss, x) and loss.backward(inputs=[x]) do not.
    """
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad was asked for the gradient of `weight`
        return False


def store(grad_out, slots, weights, table_id):
    reads = TABLES[int(table_id)].reads
    reads.append((slots, weights, grad_out))
    if len(reads) == WARN_AT:
        warnings.warn(f"{WARN_AT} backward passes without an update: a ValueTable keeps what each "
                      "of them read until a LazyAdam calls step() or zero_grad(); if you "
                      "accumulate gradients over more passes, ignore this", stacklevel=2)


# In a compiled graph an op stores the read. Compiled code reuses its buffers, hence the copies. A
# CUDA graph would not store anything when it is replayed, hence the tag.
@torch.library.custom_op(f"{NAME}::store", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def store_copies(grad_out: Tensor, weight: Tensor, slots: Tensor, weights: Tensor,
                 table_id: Tensor) -> Tensor:
    if not is_own(weight, table_id):
        raise RuntimeError("a compiled model cannot train other values than its table's")
    store(grad_out.clone(), slots.clone(), weights.clone(), table_id)
    return grad_out.clone()


store_copies.register_fake(lambda grad_out, *_: torch.empty_like(grad_out))
torch.fx.node.has_side_effect(getattr(torch.ops, NAME).store.default)  # keeps the op in the graph


def tables_of(weight):
    """Find the ValueTables that have this tensor: one, or all that share it."""
    return [table for table in TABLES.values() if table.weight is weight]


def reads_by_row(slots, chunk):
    """Sort reads by the row that they read, `chunk` rows at a time.

    slots: (tokens, reads). Yields the rows, the positions of their reads in slots.flatten(), and
    where each row's reads start among these positions.
    """
    slots, order = slots.flatten().sort(stable=True)
    rows, counts = slots.unique_consecutive(return_counts=True)
    starts = counts.cumsum(0) - counts
    bounds = itertools.pairwise([*starts[::chunk].tolist(), len(slots)])
    parts = rows.long().split(chunk), starts.split(chunk), bounds
    for rows, starts, (first, last) in zip(*parts, strict=True):
        yield rows, order[first:last], starts - first


class LazyAdam(torch.optim.Optimizer):
    """Adam for ValueTables that updates only the rows read since the last step.

    A row that was not read keeps its moments too (torch.optim.SparseAdam's formula). There is no
    weight decay. tables: an iterable of ValueTables, or of parameter groups whose "params" are
    ValueTables. step() uses the stored reads up; zero_grad() drops them.
    """

    def __init__(self, tables, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        groups = list(tables) or [{"params": []}]  # torch refuses an empty list
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    def add_param_group(self, param_group):
        tables = list(param_group["params"])
        for table in tables:
            if not isinstance(table, ValueTable):
                raise TypeError(f"LazyAdam takes ValueTables, found {type(table).__name__}")
        super().add_param_group({**param_group, "params": [table.weight for table in tables]})

    @torch.no_grad()
    def step(self, closure=None, grad_scale=1.0):
        """Update once. grad_scale: the factor by which a GradScaler multiplied the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                tables = tables_of(weight)
                if not tables:
                    raise RuntimeError("a ValueTable got another weight tensor after this LazyAdam "
                                       "was made (load_state_dict with assign=True?): make it anew")
                reads = [read for table in tables for read in table.reads]
                for table in tables:
                    table.reads.clear()
                if reads:
                    slots, weights, grad_out = map(torch.cat, zip(*reads, strict=True))
                    self._update(weight, group, slots, weights / grad_scale, grad_out)
        return loss

    def _update(self, weight, group, slots, weights, grad_out):
        """Update the rows at `slots` (tokens, reads), a chunk at a time while it is in cache."""
        seen = grad_out.any(1)  # tokens that the loss does not see move no row
        if not seen.all():
            slots, weights, grad_out = slots[seen], weights[seen], grad_out[seen]
        if not len(slots):
            return
        state = self.state[weight]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(weight),
                      "exp_avg_sq": torch.zeros_like(weight)}
        state["step"] += 1
        for name in ("exp_avg", "exp_avg_sq"):  # the table's dtype and device may have changed
            state[name] = state[name].to(weight)
        tensors = weight, state["exp_avg"], state["exp_avg_sq"]

        beta1, beta2 = group["betas"]
        size = group["lr"] * math.sqrt(1 - beta2**state["step"]) / (1 - beta1**state["step"])
        dtype = torch.promote_types(weight.dtype, torch.float32)  # float16 has no room for squares
        weights, grad_out = weights.flatten().to(dtype), grad_out.to(dtype)
        chunk = max(1, CHUNK // weight.shape[1]) if weight.is_cpu else 2**16
        for rows, order, starts in reads_by_row(slots, chunk):
            grad = F.embedding_bag(order // slots.shape[1], grad_out, starts, mode="sum",
                                   per_sample_weights=weights[order])  # (rows, dim)
            value, exp_avg, exp_avg_sq = (tensor[rows].to(dtype) for tensor in tensors)
            exp_avg.lerp_(grad, 1 - beta1)
            exp_avg_sq.lerp_(grad.square(), 1 - beta2)
            value.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(group["eps"]), value=-size)
            for tensor, part in zip(tensors, (value, exp_avg, exp_avg_sq), strict=True):
                tensor.index_copy_(0, rows, part.to(tensor.dtype))

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for table in itertools.chain.from_iterable(map(tables_of, group["params"])):
                table.reads.clear()
