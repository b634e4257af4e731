"""Values of a product-key memory, and an Adam that updates only the rows that were read."""
import re
import warnings
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adam import adam

NAME = re.sub(r"\W", "_", __name__)  # namespace of the op, so that copies of this file coexist
WARN_AT = 256  # backward passes without an update
CHUNK = 2**18  # elements updated at a time: 1 MB in float32, which fits a core's cache
# All ValueTables. Compiled code, copies and shared storage reach the backward pass as tensors only,
# so it finds a ValueTable by the memory of its weight, not through its module.
TABLES = weakref.WeakSet()


class ValueTable(nn.Module):
    """The values of a memory: (n_slots, dim) rows, read as weighted sums.

    Row r's gradient is the sum, over the reads of r, of weight * grad_out[token]. The gradient of
    the whole table is never made: clip_grad_norm_ and GradScaler do not see it. Backward stores
    (slots, weights, grad_out) in `reads`, and LazyAdam uses them.
    """

    def __init__(self, n_slots, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_slots, dim))
        self.reset_parameters()
        self.reads = []  # stored since the last update, one for each backward pass
        TABLES.add(self)

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=self.weight.shape[1]**-0.5)

    def __setstate__(self, state):  # called for a deep copy and an unpickled table
        super().__setstate__(state)
        TABLES.add(self)

    def forward(self, slots, weights, dtype=None):
        """Sum the rows at `slots`, weighted by `weights`.
        slots (int) and weights: (tokens, heads, topk). Returns (tokens, dim) in `dtype`."""
        slots, weights = slots.flatten(1), weights.flatten(1)
        # A traced or exported table has an ordinary gradient. In torch 2.11, is_exporting() is also
        # true while compiling.
        exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
        tracing = torch.jit.is_tracing() or exporting
        training = torch.is_grad_enabled() and self.weight.requires_grad and not tracing
        weight = self.weight.detach() if training else self.weight
        out = F.embedding_bag(slots, weight, per_sample_weights=weights.to(weight.dtype),
                              mode="sum").to(dtype or weight.dtype)
        if training:
            out = StoreRead.apply(out, self.weight, slots, weights.detach())
        return out


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
    reads = tables[0].reads
    reads.append((slots, weights, grad_out))
    if len(reads) == WARN_AT:
        warnings.warn(f"a ValueTable stores the reads of {WARN_AT} backward passes, without a "
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
        raise RuntimeError("a ValueTable got another weight tensor after this LazyAdam was made "
                           "(load_state_dict with assign=True?): create a new LazyAdam")
    reads = []
    for table in tables:
        reads += table.reads
        table.reads.clear()
    return reads


def reads_by_row(slots, chunk):
    """Yield `chunk` rows at a time, their reads, and where each row's reads start.
    slots: (tokens, reads). A read is a position in slots.flatten()."""
    slots, order = slots.flatten().sort(stable=True)
    rows, counts = slots.unique_consecutive(return_counts=True)
    starts = counts.cumsum(0) - counts
    bounds = [*starts[::chunk].tolist(), len(slots)]
    parts = zip(rows.long().split(chunk), starts.split(chunk), strict=True)
    for n, (rows, starts) in enumerate(parts):
        yield rows, order[bounds[n]:bounds[n + 1]], starts - bounds[n]


class LazyAdam(torch.optim.Optimizer):
    """Adam for ValueTables that updates only the rows read since the last step.

    The other rows keep their moments, as in torch.optim.SparseAdam. There is no weight decay.
    tables: ValueTables, or groups whose "params" are ValueTables. zero_grad() drops stored reads.
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
        """Update once. grad_scale: a GradScaler's scale; if it found an inf, do not call step()."""
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for weight in group["params"]:
                if reads := take_reads(weight):
                    slots, weights, grad_out = map(torch.cat, zip(*reads, strict=True))
                    self._update(weight, group, slots, weights / grad_scale, grad_out)
        return loss

    def _update(self, weight, group, slots, weights, grad_out):
        """Apply Adam to the rows at `slots` (tokens, reads), one chunk after the other."""
        seen = grad_out.any(1).nonzero().flatten()  # tokens that the loss sees; others move no row
        if not len(seen):
            return
        slots, weights, grad_out = slots[seen], weights[seen].flatten(), grad_out[seen]
        state, (beta1, beta2) = self.state[weight], group["betas"]
        state["step"] = step = state.get("step", 0) + 1
        for name in ("exp_avg", "exp_avg_sq"):  # the table's dtype and device may have changed
            state[name] = state[name].to(weight) if name in state else torch.zeros_like(weight)
        tensors = weight, state["exp_avg"], state["exp_avg_sq"]
        eps = group["eps"] / (1 - beta2**step)**0.5  # adam() adds it after bias correction
        weights, grad_out = weights.to(weight.dtype), grad_out.to(weight.dtype)
        chunk = max(1, CHUNK // weight.shape[1]) if weight.is_cpu else 2**16
        for rows, order, starts in reads_by_row(slots, chunk):
            grad = F.embedding_bag(order // slots.shape[1], grad_out, starts, mode="sum",
                                   per_sample_weights=weights[order])  # (rows, dim)
            parts = [tensor.index_select(0, rows) for tensor in tensors]
            before = torch.full((), step - 1.0, device=weight.device)  # adam() adds 1
            adam(parts[:1], [grad], parts[1:2], parts[2:], [], [before], fused=True,
                 lr=group["lr"], beta1=beta1, beta2=beta2, eps=eps, weight_decay=0.0,
                 amsgrad=False, maximize=False)
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.index_copy_(0, rows, part)

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for weight in group["params"]:
                take_reads(weight)
