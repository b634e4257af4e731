"""Values of a product-key memory, and an Adam that updates only rows that were read."""
import re
import warnings
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adam import adam

NAME = re.sub(r"\W", "_", __name__)  # namespace of the op, so that copies of this file coexist
WARN_AT = 130  # backward passes without an update; 2 if there is no LazyAdam for the table
TELLS_EXPORTING = torch.__version__ >= (2, 12)
CHUNK = 2**18  # elements updated at a time: 1 MB in float32, which fits a core's cache
# All ValueTables. Compiled code, copies and shared storage reach the backward pass as tensors only,
# so it finds a ValueTable by the memory of its weight, not through its module. A reload keeps them.
TABLES = globals().get("TABLES", weakref.WeakSet())


class ValueTable(nn.Module):
    """The values of a memory: (n_slots, dim) rows, read as weighted sums.

    Row r's gradient is the sum, over the reads of r, of weight * grad_out[token]. The gradient of
    the whole table is never made: clip_grad_norm_ and GradScaler do not see it. Backward stores
    (slots, weights, grad_out) in `reads`, and LazyAdam uses them. torch.autograd.grad stores
    nothing in eager mode, but in compiled code it does: call zero_grad() after it.
    """
    replicated = True  # where there are several ranks, each has the whole table

    def __init__(self, n_slots, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_slots, dim))
        self.reset_parameters()
        self.reads = []  # stored since the last update, one for each backward pass
        self.has_optimizer = False  # a LazyAdam takes the reads
        TABLES.add(self)

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=self.weight.shape[1]**-0.5)

    def __setstate__(self, state):  # called for a deep copy and an unpickled table
        super().__setstate__(state)
        TABLES.add(self)

    def forward(self, slots, weights, dtype=None):
        """Sum the rows at `slots`, weighted by `weights`. A token of weights 0 moves no row.
        slots (int) and weights: (tokens, heads, topk). Returns (tokens, dim) in `dtype`."""
        slots, weights = slots.flatten(1), weights.flatten(1)
        tracing = torch.jit.is_tracing() or is_exporting()  # then the gradient is an ordinary one
        training = torch.is_grad_enabled() and self.weight.requires_grad and not tracing
        if training and not self.weight.is_leaf:
            raise RuntimeError("DataParallel and FullyShardedDataParallel train copies of a "
                               "ValueTable, not its weight: use DistributedDataParallel")
        weight = self.weight.detach() if training else self.weight
        out = F.embedding_bag(slots, weight, per_sample_weights=weights.to(weight.dtype),
                              mode="sum").to(dtype or weight.dtype)
        if training:
            out = StoreRead.apply(out, self.weight, slots, weights.detach())
        return out


def is_exporting():
    """Tell whether torch.export runs. Up to torch 2.11 this is also true while compiling."""
    return torch.compiler.is_exporting() and (TELLS_EXPORTING
                                              or not torch.compiler.is_dynamo_compiling())


class StoreRead(torch.autograd.Function):
    """Pass a read's output on, and store the read in backward."""

    @staticmethod
    def forward(ctx, out, weight, slots, weights):  # weight makes the output require a gradient
        ctx.save_for_backward(weight, slots, weights)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad_out):
        weight, slots, weights = ctx.saved_tensors
        if torch.compiler.is_compiling():
            return store_copies(grad_out, weight, slots, weights), None, None, None
        if not tables_of(weight):
            products = (weights[..., None] * grad_out[:, None]).to(weight.dtype).flatten(0, 1)
            grad_weight = torch.zeros_like(weight).index_add_(0, slots.flatten(), products)
            return grad_out, grad_weight, None, None
        if accumulates(weight):
            store(grad_out, weight, slots, weights)
        return grad_out, None, None, None


def tables_of(weight):
    """Find the ValueTables with this weight. Other values in a functional_call have none."""
    return [table for table in TABLES if table.weight.data_ptr() == weight.data_ptr()]


def accumulates(weight):
    """Tell whether this backward pass adds to .grad, which torch.autograd.grad does not."""
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad was asked for the gradient of `weight`
        return False


def store(grad_out, weight, slots, weights):
    if not (tables := tables_of(weight)):
        raise RuntimeError("under torch.compile a ValueTable trains only with its own weight, not "
                           "with one passed by functional_call")
    if tables[0].replicated and several_ranks():
        forget_gradient(weight)
    reads = tables[0].reads
    reads.append((slots, weights, grad_out))
    if len(reads) == (WARN_AT if any(table.has_optimizer for table in tables) else 2):
        warnings.warn(f"a ValueTable stores the reads of {len(reads)} backward passes, without a "
                      "LazyAdam step() or zero_grad(); ignore this if you accumulate so many")


# A compiled graph stores copies, because it reuses its buffers. A CUDA graph cannot store reads.
@torch.library.custom_op(f"{NAME}::store", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def store_copies(grad_out: Tensor, weight: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    store(grad_out.clone(), weight, slots.clone(), weights.clone())
    return grad_out.clone()


store_copies.register_fake(lambda grad_out, *_: torch.empty_like(grad_out))
torch.fx.node.has_side_effect(getattr(torch.ops, NAME).store.default)  # keeps the op in the graph


def take_reads(weight):
    """Take all stored reads of a table's weight, which several tables may share."""
    if not (tables := tables_of(weight)):
        raise RuntimeError("a ValueTable has another weight tensor now (load_state_dict with "
                           "assign=True, or fully_shard?): create a new LazyAdam")
    reads = []
    for table in tables:
        reads += table.reads
        table.reads.clear()
    return reads


# Several ranks, each with the whole table: DistributedDataParallel.
def several_ranks():
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def forget_gradient(weight):
    """Remove the zeros of DistributedDataParallel from .grad: AdamW would decay the values."""
    def forget():
        for table in tables_of(weight):
            table.weight.grad = None

    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(forget))  # twice, to come after DistributedDataParallel's own callback


def gather_reads(weight, reads):
    """Join the reads of all ranks, for the mean of their losses. Every rank must call it."""
    size = torch.tensor(reads[0].shape if reads else (0, 0), device=weight.device)
    dist.all_reduce(size, dist.ReduceOp.MAX)
    (tokens, width), dtype = size.tolist(), torch.promote_types(weight.dtype, torch.float32)
    shapes = (width, torch.int32), (width, dtype), (weight.shape[1], dtype)
    joined = []
    for n, (columns, kind) in enumerate(shapes):
        own = torch.zeros(tokens, columns, dtype=kind, device=weight.device)  # 0: of weight 0
        if reads:
            own[:len(reads[n])] = reads[n]
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        joined.append(torch.cat(parts))
    slots, weights, grad_out = joined
    return slots, weights / dist.get_world_size(), grad_out


def sort_reads(slots, weights, grad_out, n_slots, chunk, chosen=None):
    """Sort reads by row. No shape depends on the reads, so nothing waits for the device.

    slots, weights: (tokens, reads). chosen: the only rows that may change, or None for all.
    Returns the row, token and weight of each read, where each row's reads start, and one tensor:
    whether grad_out is finite, the number of rows, where each chunk of rows starts, the last end.
    """
    may_change = slots.new_full((n_slots,), chosen is None, dtype=torch.bool)
    if chosen is not None:
        may_change[chosen.to(slots.device, non_blocking=True)] = True
    live = may_change[slots]  # the reads that count
    # Padded tokens, whose weights are 0, and tokens that the loss does not see move no row.
    live &= (grad_out.any(1) & (live & (weights != 0)).any(1))[:, None]
    rows, order = slots.where(live, n_slots).flatten().sort(stable=True)  # the others come last
    nth = (rows.diff(prepend=rows[:1]) != 0).cumsum(0)  # counts the rows from 0
    counts = rows.new_zeros(min(n_slots, len(rows)) + 1)
    counts.scatter_add_(0, nth, (rows < n_slots).to(rows.dtype))
    starts = counts.cumsum(0) - counts
    numbers = torch.stack([grad_out.isfinite().all().long(), (counts > 0).sum()])
    sizes = torch.cat([numbers, starts[::chunk], starts[-1:]])
    return rows, order // slots.shape[1], weights.flatten()[order], starts, sizes


def check_rows(table, rows):
    """Raise a TypeError unless `rows` is a 1-D tensor of a whole table's row numbers."""
    numbers = torch.is_tensor(rows) and rows.dim() == 1 and rows.dtype in (torch.int, torch.long)
    if not (numbers and table.replicated and ((rows >= 0) & (rows < len(table.weight))).all()):
        raise TypeError(f"rows: expected a tensor of row numbers under {len(table.weight)}, of a "
                        "table that is not cut over ranks")


class LazyAdam(torch.optim.Optimizer):
    """Adam for ValueTables that updates only the rows read since the last step.

    The other rows keep their moments, as in SparseAdam. There is no weight decay. A step with a
    gradient that is not finite is left out and counted in `skipped`. zero_grad() drops reads.
    tables: ValueTables, or groups. A group's "rows", if given, are the only ones that may change.
    """
    _step_supports_amp_scaling = True  # GradScaler.step(optimizer) sets grad_scale, then calls step

    def __init__(self, tables, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        torch.optim.Adam([torch.zeros(1)], lr, betas, eps)  # raises a ValueError for wrong numbers
        groups = list(tables) or [{"params": []}]  # torch refuses an empty list
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "rows": None})
        self.skipped = 0

    def add_param_group(self, param_group):
        tables = list(param_group["params"])
        for table in tables:
            if not isinstance(table, ValueTable):
                raise TypeError(f"LazyAdam takes ValueTables, found {type(table)}: a copy of "
                                "values.py has a LazyAdam of its own")
            if type(table.weight) is not nn.Parameter:
                raise TypeError(f"LazyAdam cannot update a {type(table.weight).__name__} "
                                "(fully_shard?): use DistributedDataParallel")
            if (rows := param_group.get("rows")) is not None:
                check_rows(table, rows)
            table.has_optimizer = True
        super().add_param_group({**param_group, "params": [table.weight for table in tables]})

    @torch.no_grad()
    def step(self, closure=None, grad_scale=None):
        """Update once. grad_scale: what the loss was multiplied by, if GradScaler did not say."""
        with torch.enable_grad():
            loss = closure() if closure else None
        if grad_scale is None:
            grad_scale = getattr(self, "grad_scale", 1.0)  # GradScaler sets None after unscale_()
            if grad_scale is None:
                raise RuntimeError("GradScaler.unscale_() cannot unscale the reads of a LazyAdam: "
                                   "call it only with the other optimizers")
        updates, sizes = [], []
        for group in self.param_groups:
            for weight in group["params"]:
                if not weight.requires_grad:
                    warnings.warn("LazyAdam got a frozen ValueTable, which it does not update")
                reads = [torch.cat(parts) for parts in zip(*take_reads(weight), strict=True)]
                if tables_of(weight)[0].replicated and several_ranks():
                    reads = gather_reads(weight, reads)
                if reads:
                    slots, weights, grad_out = reads
                    chunk = max(1, CHUNK // weight.shape[1]) if weight.is_cpu else 2**16
                    *by_row, size = sort_reads(slots, weights / grad_scale, grad_out, len(weight),
                                               chunk, group.get("rows"))
                    updates.append((weight, group, grad_out, chunk, *by_row))
                    sizes.append(size.to(updates[0][0].device))
        found = sizes and nn.utils.rnn.pad_sequence(sizes, batch_first=True).tolist()  # one wait
        if not all(finite for finite, *_ in found):
            self.skipped += 1
            return loss
        for update, (_, n_rows, *bounds) in zip(updates, found, strict=True):
            if n_rows:
                self._update(*update, n_rows, bounds)
        return loss

    def _update(self, weight, group, grad_out, chunk, rows, tokens, weights, starts, count, bounds):
        """Apply Adam to the rows of sorted reads, one chunk after the other."""
        state, (beta1, beta2) = self.state[weight], group["betas"]
        state["step"] = step = state.get("step", 0) + 1
        dtype = torch.promote_types(weight.dtype, torch.float32)  # float16 has no small squares
        like = {"dtype": dtype, "device": weight.device}  # which may have changed
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(**like) if key in state else torch.zeros_like(weight, **like)
        tensors = weight, state["exp_avg"], state["exp_avg_sq"]
        eps = group["eps"] / (1 - beta2**step)**0.5  # adam() adds it after bias correction
        weights, grad_out = weights.to(dtype), grad_out.to(dtype)
        for n, start in enumerate(starts[:count].split(chunk)):
            reads, row = slice(bounds[n], bounds[n + 1]), rows[start].long()
            grad = F.embedding_bag(tokens[reads], grad_out, start - bounds[n], mode="sum",
                                   per_sample_weights=weights[reads])  # (rows, dim)
            parts = [tensor.index_select(0, row).to(dtype) for tensor in tensors]
            before = grad.new_full((), step - 1.0, dtype=torch.float32)  # adam() adds 1
            adam(parts[:1], [grad], parts[1:2], parts[2:], [], [before], fused=True, amsgrad=False,
                 maximize=False, lr=group["lr"], beta1=beta1, beta2=beta2, eps=eps, weight_decay=0)
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.index_copy_(0, row, part.to(tensor.dtype))

    def load_state_dict(self, state_dict):
        """Load moments as they were saved. torch would cast them to the weight's dtype."""
        super().load_state_dict(state_dict)
        for state, saved in zip(self.state.values(), state_dict["state"].values(), strict=True):
            state.update(saved)

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for weight in group["params"]:
                take_reads(weight)
