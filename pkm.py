"""
Product-key memory (Lample et al., 2019), as Kim & Jung (2020) put it into BERT.

A memory has n_keys^2 slots, and each slot has a value vector. A token's query is cut into two
halves. Each half is compared with n_keys sub-keys. A slot belongs to a pair of sub-keys, and its
score is the sum of theirs. The softmax of the best scores weighs the values of their slots.

To use a memory in another model, copy this file. It needs nothing but torch:

>>> class Block(nn.Module):
...     def __init__(self, d):
...         super().__init__()
...         self.ffn, self.memory = nn.Linear(d, d), PKM(d, n_keys=64)   # 64 x 64 slots
...     def forward(self, x):
...         return x + self.ffn(x) + self.memory(x)
>>> model = Block(32)
>>> tables = {name: m for name, m in model.named_modules() if isinstance(m, ValueTable)}

memory(x, mask) leaves padded tokens out. List the tables before you call torch.compile, because it
puts "_orig_mod." before their names. If the rest of the model is trained already, let the values
begin at 0: nn.init.zeros_(model.memory.values.weight).
Values have no .grad, and other optimizers and clipping pass them by. LazyAdam updates the rows
that were read, at a constant rate. Query and sub-keys need no weight decay:

>>> dense = torch.optim.AdamW([{"params": model.ffn.parameters()},
...                            {"params": model.memory.parameters(), "weight_decay": 0.0}])
>>> sparse = LazyAdam(tables.values(), lr=1e-3)
>>> scaler = torch.amp.GradScaler("cpu")     # enabled=False: without float16
>>> for step in range(2):
...     for x in torch.randn(4, 2, 16, 32):  # the gradients of 4 batches add up
...         with torch.autocast("cpu", torch.float16):
...             loss = model(x).square().mean() / 4
...         scaler.scale(loss).backward()
...     scaler.unscale_(dense)               # here gradients may be clipped
...     sparse.step_with(dense, scaler)      # without a scaler: dense.step() and sparse.step()
...     dense.zero_grad()
...     sparse.zero_grad()

step_with() makes both steps and calls scaler.update(); after an overflow it makes no step. To save
a training, keep the state_dict() of model, dense, sparse and scaler. A memory also trains under
activation checkpointing, torch.compile (a graph breaks at the values) and DistributedDataParallel
(LazyAdam adds up the gradients of all ranks). Values learn in float32 or float64.

In training the batch norm of the queries sees the whole batch. Hence the output of a causal model
depends a little on later tokens and on other sequences, and a batch of one token is an error. In
evaluation a token's output depends on that token alone.

lib/usage.py is the second file to copy. It shows which slots are in use, and which tokens read one:

>>> from lib.usage import record_reads, usage_metrics       # a copy: from usage
>>> with torch.no_grad(), record_reads(tables) as reads:
...     out = model.eval()(torch.randn(4, 16, 32))          # then model.train()
>>> usage = usage_metrics(**reads["memory.values"].counts)  # usage["top1_mu"]: share in use
>>> for slot in reads["memory.values"].top_slots(10):
...     found = reads["memory.values"].contexts(slot, 5)    # [(weight, token)], token < 4 * 16
"""
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class PKM(nn.Module):
    """Product-key memory with n_keys^2 slots (section 2.1; default sizes: section 5.1).

    Each of `heads` heads reads its topk best slots. The heads share one table of values, and
    their reads are summed. Scores and softmax are in float32 or float64, also under autocast.
    """

    def __init__(self, d_model, n_keys=512, heads=4, topk=32, key_dim=256):
        super().__init__()
        if not 1 <= topk <= n_keys:
            raise ValueError(f"topk = {topk}: expected 1 to n_keys = {n_keys}")
        if key_dim % 2:
            raise ValueError(f"key_dim = {key_dim}: expected an even number, for two halves")
        self.n_keys = n_keys
        self.heads = heads
        self.topk = topk
        self.query = nn.Linear(d_model, heads * key_dim)
        nn.init.xavier_uniform_(self.query.weight)  # our reading; XLM leaves nn.Linear's default
        self.query_norm = MaskedBatchNorm(heads * key_dim)
        half = key_dim // 2
        self.keys = nn.Parameter(torch.empty(heads, 2, n_keys, half))
        nn.init.uniform_(self.keys, -half**-0.5, half**-0.5)
        self.values = ValueTable(n_keys**2, d_model)

    def forward(self, x, mask=None):
        """Read the memory for every token.

        x: (..., d_model). mask: (...), bool or number, nonzero at real tokens. Returns x's
        shape, in autocast's dtype where autocast is on. The output of padded tokens is 0. They
        move no value and do not enter the batch norm's statistics.
        """
        tokens = x.flatten(0, -2)
        if mask is not None:
            mask = mask.reshape(-1, 1).bool()
            tokens = tokens.where(mask, 0)  # NaN at padding would reach the statistics
        query = self.query(tokens)  # (tokens, heads * key_dim)
        dtype = query.dtype  # under autocast its dtype, the same as an FFN's output has
        with torch.autocast(x.device.type, enabled=False):
            query = self.query_norm(query.to(self.keys.dtype), mask)
            slots, weights = self.search(query)
            if mask is not None:
                weights = weights.where(mask[..., None], 0)
            return self.values(slots, weights, dtype).view_as(x)

    def search(self, query):
        """Find each head's topk best slots, exactly, and the softmax of their scores.

        query: (tokens, heads * key_dim). Returns slots (int32) and weights, both
        (tokens, heads, topk), best first. Slot = n_keys * (first sub-key) + (second sub-key).
        """
        heads, _, n_keys, half = self.keys.shape
        # bfloat16 has a significand of 8 bits, which would create ties
        keys = self.keys.to(torch.promote_types(self.keys.dtype, torch.float32))
        query = query.to(keys.dtype).view(-1, heads, 2, half).permute(1, 2, 0, 3)
        scores = query @ keys.mT  # (heads, 2, tokens, n_keys)
        with torch.no_grad():  # choosing has no gradient
            best, index = scores.topk(self.topk)  # (heads, 2, tokens, topk)
            pairs = candidates(self.topk, query.device)
            sums = best[:, 0][..., pairs[0]] + best[:, 1][..., pairs[1]]
            chosen = pairs[:, sums.topk(self.topk).indices]  # (2, heads, tokens, topk)
            index = index.gather(3, chosen.transpose(0, 1))  # (heads, 2, tokens, topk)
            slots = (n_keys * index[:, 0] + index[:, 1]).int()
        score = scores.gather(3, index).sum(1)  # (heads, tokens, topk)
        return slots.transpose(0, 1), score.softmax(2).transpose(0, 1)


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch norm over tokens. In training the real tokens alone make its statistics."""

    def forward(self, x, mask=None):
        """Normalize x (tokens, features). mask: (tokens, 1) bool, True at real tokens, or None."""
        if mask is None or not self.training:
            return super().forward(x)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        count = mask.sum()
        self.num_batches_tracked += count > 1  # one token has no variance
        share = mask.T / count.clamp(min=1).to(x.dtype)  # (1, tokens): 1 / count at real tokens
        mean = share @ x
        var = share @ (x - mean).square()
        with torch.no_grad():
            momentum = self.momentum * (count > 1).to(self.running_mean.dtype)
            unbiased = var * count / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean[0].to(momentum.dtype), momentum)
            self.running_var.lerp_(unbiased[0].to(momentum.dtype), momentum)
        return (x - mean) * (self.weight * (var + self.eps).rsqrt()) + self.bias


def candidates(topk, device):
    """List the pairs of ranks whose sums can be in the top k: (2, pairs).

    Ranks count from 0 in the sorted scores of each half. At least (i+1)(j+1) - 1 other pairs score
    as high as (i, j), hence it is needed only if (i+1)(j+1) <= k. For k = 32, 119 of 1,024 pairs
    remain. Brute force takes O(|K| d) operations, this O((sqrt(|K|) + k^2) d) (Lample et al.).
    """
    count = sum(topk // (i + 1) for i in range(topk))  # nonzero() would wait for the device
    rank = torch.arange(topk, device=device)
    per_rank = topk // (rank + 1)
    i = rank.repeat_interleave(per_rank, output_size=count)
    j = torch.arange(count, device=device) - (per_rank.cumsum(0) - per_rank)[i]
    return torch.stack([i, j])


class ValueTable(nn.Module):
    """The values of a memory: (n_slots, dim) rows, read as weighted sums.

    The table has no .grad: optimizers, clipping and DistributedDataParallel pass it by. It learns
    in three steps:
    1. forward() adds zeros to its output. They require a gradient (see recorder).
    2. loss.backward() gives them grad_out. A hook keeps (slots, weights, grad_out) in `pending`.
    3. LazyAdam.step() takes what is pending. The gradient of row r is the sum, over the reads of r,
       of weight * grad_out[token].
    `learns = False` freezes the table. backward(inputs=...) and torch.autograd.grad() train none.
    """

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
        rows = self.weight.detach()  # someone may have set requires_grad (from_pretrained does)
        out = F.embedding_bag(slots, rows, mode="sum", per_sample_weights=weights.to(rows.dtype))
        out = out.to(dtype or rows.dtype)
        if self.learns and torch.is_grad_enabled():
            out = out + self.recorder(out, slots, weights.detach())
        return out

    @torch.compiler.disable  # a compiled graph reuses its buffers, and cannot keep a read
    def recorder(self, out, slots, weights):
        """Make zeros that record the read when backward() reaches them. They take no memory."""
        def keep(zeros):
            self.pending.append((slots, weights, zeros.grad))
            zeros.grad = None
            if len(self.pending) == 512:  # more than any config accumulates
                warnings.warn("a ValueTable keeps the reads of 512 backward passes: call a "
                              "LazyAdam's step() and zero_grad(), or set learns = False")

        zeros = out.new_zeros(()).expand(out.shape).requires_grad_()
        zeros.register_post_accumulate_grad_hook(keep)
        return zeros


class LazyAdam(torch.optim.Optimizer):
    """Adam for ValueTables that updates only the rows read since the last step.

    The other rows keep their values and moments, as in SparseAdam. There is no weight decay. A
    step with a gradient that is not finite is left out. zero_grad() drops pending reads.
    """

    def __init__(self, tables, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.tables = list(dict.fromkeys(tables)) if hasattr(tables, "__iter__") else [tables]
        for table in self.tables:
            if not isinstance(table, ValueTable):
                raise TypeError("LazyAdam takes a list of ValueTables, such as "
                                f"[model.memory.values], not a {type(table).__name__}")
            table.weight.requires_grad_(False)
        weights = [table.weight for table in self.tables]
        super().__init__([{"params": weights}], {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None, grad_scale=1.0):
        """Update once. grad_scale: what the loss was multiplied by."""
        with torch.enable_grad():
            loss = closure() if closure else None
        parameters = self.param_groups[0]["params"]
        for table, parameter in zip(self.tables, parameters, strict=True):  # before any moves
            assert table.weight is parameter, "a table has a new weight: make a new LazyAdam"
            assert table.weight.dtype in (torch.float32, torch.float64), (
                f"values in {table.weight.dtype} lose small updates: keep them in float32, "
                "under autocast")
        reads = [take_reads(table) for table in self.tables]
        finite = all(grad_out.isfinite().all() for *_, grad_out in filter(None, reads))
        if several_ranks() and parameters:  # all update, or none
            flag = torch.tensor(finite, dtype=torch.uint8, device=parameters[0].device)
            dist.all_reduce(flag, dist.ReduceOp.MIN)
            finite = flag.item()
        if finite:
            for parameter, read in zip(parameters, reads, strict=True):
                sums = sum_rows(parameter, read, grad_scale)
                if several_ranks():
                    sums = mean_over_ranks(parameter, sums)
                self.update(parameter, sums)
        return loss

    def step_with(self, dense, scaler, grad_scale=1.0):
        """Step `dense`, the optimizer of all other weights, and this one under a GradScaler.

        It also calls scaler.update(). If the scaler leaves out the dense step, because a gradient
        is not finite, the values stay, too. grad_scale: what else the loss was multiplied by.
        """
        scale = scaler.get_scale()
        scaler.step(dense)
        scaler.update()
        if scaler.get_scale() >= scale:  # it falls where a step was left out
            self.step(grad_scale=scale * grad_scale)

    def update(self, weight, sums):
        """Apply Adam to the rows that were read. sums: see sum_rows."""
        for number, (row, grad) in enumerate(sums):
            state = self.state[weight]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(weight)
                state["exp_avg_sq"] = torch.zeros_like(weight)
            if number == 0:
                state["step"] += 1
            adam(weight, row, grad, state, self.param_groups[0])

    def __getstate__(self):
        """Keep the tables in a copy or a pickle. torch's optimizers keep no attribute of ours."""
        return {**super().__getstate__(), "tables": self.tables}

    def zero_grad(self, set_to_none=True):
        """Drop the pending reads."""
        for table in self.tables:
            table.pending.clear()


def adam(weight, row, grad, state, group):
    """Apply Adam (Kingma and Ba, 2014) to some rows of a weight, given their gradient."""
    beta1, beta2 = group["betas"]
    bias1, bias2 = 1 - beta1**state["step"], 1 - beta2**state["step"]
    exp_avg = state["exp_avg"].index_select(0, row).lerp_(grad, 1 - beta1)
    exp_avg_sq = state["exp_avg_sq"].index_select(0, row).mul_(beta2)
    exp_avg_sq.addcmul_(grad, grad, value=1 - beta2)
    state["exp_avg"].index_copy_(0, row, exp_avg)
    state["exp_avg_sq"].index_copy_(0, row, exp_avg_sq)
    step_size = group["lr"] * bias2**0.5 / bias1
    weight.index_add_(0, row, exp_avg.div_(exp_avg_sq.sqrt_().add_(group["eps"])), alpha=-step_size)


def take_reads(table):
    """Take a table's pending reads: [slots, weights, grad_out], or [] without any."""
    reads = [torch.cat(parts) for parts in zip(*table.pending, strict=True)]
    table.pending.clear()
    return reads


def chunk_rows(weight):
    """Return how many rows are updated at once: 1 MB of them on a CPU, for its cache."""
    return max(1, 2**18 // weight.shape[1]) if weight.is_cpu else 2**16


def sum_rows(weight, read, grad_scale=1.0):
    """Sum up the gradients of the rows that were read.

    read: see take_reads; slots and weights (tokens, reads), grad_out (tokens, dim). Yields
    (row, grad), some rows at a time: their numbers (rows,) and gradients (rows, dim).
    """
    if not read:
        return
    slots, weights, grad_out = read
    # padded tokens have weights of 0, and tokens that the loss does not see no gradient
    live = grad_out.any(1) & weights.any(1)
    if not live.any():
        return
    grad_out = grad_out[live].to(weight.dtype)
    slot, order = slots[live].flatten().sort(stable=True)
    token = order // slots.shape[1]
    weights = (weights[live] / grad_scale).flatten()[order].to(weight.dtype)
    rows, counts = slot.unique_consecutive(return_counts=True)
    starts = counts.cumsum(0) - counts  # where each row's reads begin
    size = chunk_rows(weight)
    ends = [*starts[size::size].tolist(), len(slot)]
    begin = 0
    for row, start, end in zip(rows.long().split(size), starts.split(size), ends, strict=True):
        grad = F.embedding_bag(token[begin:end], grad_out, start - begin, mode="sum",
                               per_sample_weights=weights[begin:end])  # (rows, dim)
        yield row, grad
        begin = end


def several_ranks():
    """Tell whether this process shares the training with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def mean_over_ranks(weight, sums):
    """Take the mean of all ranks' gradients. All ranks must call it.

    sums: see sum_rows. Yields (row, grad), too, for the rows that any rank has read. It needs as
    much memory as the table.
    """
    total = torch.zeros_like(weight)
    read = torch.zeros(len(weight), dtype=torch.uint8, device=weight.device)
    for row, grad in sums:
        total[row] = grad
        read[row] = 1
    dist.all_reduce(total)
    dist.all_reduce(read, dist.ReduceOp.MAX)
    rows, size = read.nonzero().squeeze(1), chunk_rows(weight)
    for begin in range(0, len(rows), size):
        row = rows[begin:begin + size]
        yield row, total[row] / dist.get_world_size()
