"""The values of a product-key memory, and an Adam that updates only rows that were read."""
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.adam import adam

CHUNK = 2**18  # elements updated at a time: 1 MB in float32, which fits a core's cache
MANY = 512  # pending reads; more than any config accumulates


class ValueTable(nn.Module):
    """The values of a memory: (n_slots, dim) rows, read as weighted sums.

    Row r's gradient is the sum, over the reads of r, of weight * grad_out[token]. We never build
    the gradient of the whole table: .grad stays None, and optimizers, clipping and
    DistributedDataParallel pass the table by. Backward keeps (slots, weights, grad_out) of each
    read in `pending`, and LazyAdam uses them. `learns = False` freezes the table.
    """
    replicated = True  # under several ranks each rank has the whole table

    def __init__(self, n_slots, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_slots, dim), requires_grad=False)
        nn.init.normal_(self.weight, std=dim**-0.5)
        self.learns = True
        self.pending = []  # reads of the backward passes since the last update

    def forward(self, slots, weights, dtype=None):
        """Sum the rows at `slots`, weighted by `weights`.

        slots (int) and weights: (tokens, heads, topk). Returns (tokens, dim) in `dtype`, by
        default the table's. A token whose weights are 0 moves no row.
        """
        slots, weights = slots.flatten(1), weights.flatten(1)
        weight = self.weight.detach()  # someone may have set requires_grad (from_pretrained does)
        out = F.embedding_bag(slots, weight, mode="sum",
                              per_sample_weights=weights.to(weight.dtype))
        out = out.to(dtype or weight.dtype)
        if self.learns and torch.is_grad_enabled():
            out = self.keep_read(out, slots, weights.detach())
        return out

    @torch.compiler.disable  # a compiled graph reuses its buffers, and cannot keep a read
    def keep_read(self, out, slots, weights):
        # autograd skips a Function if none of its inputs requires a gradient
        anchor = torch.empty(0, requires_grad=True)
        return KeepRead.apply(out, anchor, self, slots, weights)


class KeepRead(torch.autograd.Function):
    """Pass a read's output on. Backward adds the read to its table's pending ones."""

    @staticmethod
    def forward(ctx, out, anchor, table, slots, weights):
        ctx.table = table
        ctx.save_for_backward(slots, weights)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad_out):
        pending = ctx.table.pending
        pending.append((*ctx.saved_tensors, grad_out))
        if len(pending) == MANY:
            warnings.warn(f"a ValueTable keeps the reads of {MANY} backward passes: call a "
                          "LazyAdam's step() and zero_grad(), or set learns = False")
        return grad_out, None, None, None, None


class LazyAdam(torch.optim.Optimizer):
    """Adam for ValueTables that updates only the rows read since the last step.

    The other rows keep their values and moments, as in SparseAdam. There is no weight decay. A
    step with a gradient that is not finite is left out. zero_grad() drops pending reads.
    """

    def __init__(self, tables, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.tables = list(tables)
        for table in self.tables:
            table.weight.requires_grad_(False)
        weights = [table.weight for table in self.tables]
        super().__init__([{"params": weights}], {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None, grad_scale=1.0):
        """Update once. grad_scale: what the loss was multiplied by (GradScaler.get_scale())."""
        with torch.enable_grad():
            loss = closure() if closure else None
        reads = [take_reads(table) for table in self.tables]
        if not all(grad_out.isfinite().all() for *_, grad_out in filter(None, reads)):
            return loss
        for table, read in zip(self.tables, reads, strict=True):
            if read:
                slots, weights, grad_out = read
                self.update(table.weight, slots, weights / grad_scale, grad_out)
        return loss

    def update(self, weight, slots, weights, grad_out):
        """Apply Adam to the rows that were read, a chunk of rows at a time.

        slots, weights: (tokens, reads). grad_out: (tokens, dim).
        """
        # padded tokens have weights of 0, and tokens that the loss does not see no gradient
        live = grad_out.any(1) & weights.any(1)
        if not live.any():
            return
        group, state = self.param_groups[0], self.state[weight]
        step = state["step"] = state.get("step", 0) + 1
        dtype = torch.promote_types(weight.dtype, torch.float32)  # float16 has no small squares
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(weight, dtype=dtype)
        tensors = weight, state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        eps = group["eps"] / (1 - beta2**step)**0.5  # adam() adds it after bias correction

        grad_out = grad_out[live].to(dtype)
        slot, order = slots[live].flatten().sort(stable=True)
        token = order // slots.shape[1]
        weights = weights[live].flatten()[order].to(dtype)
        rows, counts = slot.unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts  # where each row's reads begin
        size = max(1, CHUNK // weight.shape[1]) if weight.is_cpu else 2**16
        ends = [*starts[size::size].tolist(), len(slot)]
        begin = 0
        for row, start, end in zip(rows.long().split(size), starts.split(size), ends, strict=True):
            grad = F.embedding_bag(token[begin:end], grad_out, start - begin, mode="sum",
                                   per_sample_weights=weights[begin:end])  # (rows, dim)
            parts = [tensor.index_select(0, row).to(dtype) for tensor in tensors]
            before = torch.tensor(step - 1.0, device=weight.device)  # adam() adds 1
            adam(parts[:1], [grad], parts[1:2], parts[2:], [], [before], fused=True, amsgrad=False,
                 maximize=False, lr=group["lr"], beta1=beta1, beta2=beta2, eps=eps, weight_decay=0)
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.index_copy_(0, row, part.to(tensor.dtype))
            begin = end

    def load_state_dict(self, state_dict):
        """Load moments as they were saved. torch would cast them to the weight's dtype."""
        super().load_state_dict(state_dict)
        for (weight, state), saved in zip(self.state.items(), state_dict["state"].values()):
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = saved[key].to(weight.device)

    def zero_grad(self, set_to_none=True):
        for table in self.tables:
            table.pending.clear()


def take_reads(table):
    """Take a table's pending reads as (slots, weights, grad_out), or () without any."""
    reads = [torch.cat(parts) for parts in zip(*table.pending, strict=True)]
    table.pending.clear()
    if table.replicated and dist.is_available() and dist.is_initialized():
        reads = join_reads(table.weight, reads)
    return reads


def join_reads(weight, reads):
    """Join the reads of all ranks, for the mean of their losses. Every rank must call it."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    size = torch.tensor(reads[0].shape if reads else (0, 0), device=weight.device)
    dist.all_reduce(size, dist.ReduceOp.MAX)
    tokens, width = size.tolist()
    if not tokens:
        return ()
    kinds = (width, torch.int32), (width, dtype), (weight.shape[1], dtype)
    joined = []
    for n, (columns, kind) in enumerate(kinds):
        own = torch.zeros(tokens, columns, dtype=kind, device=weight.device)  # 0: of weight 0
        if reads:
            own[:len(reads[n])] = reads[n]
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        joined.append(torch.cat(parts))
    slots, weights, grad_out = joined
    return slots, weights / dist.get_world_size(), grad_out
