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
Values have no .grad, and other optimizers and clipping pass them by. They learn by a LazyAdam,
which updates the rows that were read. Query and sub-keys need no weight decay:

>>> dense = torch.optim.AdamW([{"params": model.ffn.parameters()},
...                            {"params": model.memory.parameters(), "weight_decay": 0.0}])
>>> sparse = LazyAdam(tables.values(), lr=1e-3)
>>> schedule = torch.optim.lr_scheduler.LambdaLR(sparse, lambda step: 1.0)  # none: constant, too
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
...     schedule.step()

To save a training, keep the state_dict() of model, dense, sparse and scaler. Values are in float32
or float64, and train under activation checkpointing and torch.compile, too (a graph breaks there).
LazyAdam takes the mean of the ranks' gradients, under DistributedDataParallel or
fully_shard(model, ignored_params={table.weight for table in tables.values()}).

In training the batch norm of the queries sees the whole batch. Hence the output of a causal model
depends a little on later tokens and on other sequences, and a batch of one token is an error. In
evaluation a token's output depends on it alone. lib/usage.py is the second file to copy: it shows
which slots are in use, and which tokens read one.
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
        self.query = Query(d_model, heads * key_dim)
        self.query_norm = MaskedBatchNorm(heads * key_dim)
        self.keys = nn.Parameter(torch.empty(heads, 2, n_keys, key_dim // 2))
        self.reset_parameters()
        self.values = ValueTable(n_keys**2, d_model)

    def reset_parameters(self):
        half = self.keys.shape[3]
        nn.init.uniform_(self.keys, -half**-0.5, half**-0.5)

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


class Query(nn.Linear):
    """Draws its weight Xavier-uniform, which is our reading. XLM leaves nn.Linear's default."""

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.xavier_uniform_(self.weight)


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
    rank = torch.arange(1, topk + 1, device=device)
    per_rank = torch.full_like(rank, topk) // rank  # torch.onnx refuses topk // rank
    ends = per_rank.cumsum(0)
    pair = torch.arange(count, device=device)
    i = torch.bucketize(pair, ends, right=True)
    return torch.stack([i, pair - (ends - per_rank)[i]])


class ValueTable(nn.Module):
    """The values of a memory: (n_slots, dim) rows, read as weighted sums.

    Optimizers, clipping and DistributedDataParallel pass it by, for it has no .grad. How it learns:
    1. forward() adds zeros to its output. They require a gradient (see recorder).
    2. loss.backward() gives them grad_out. A hook keeps (slots, weights, grad_out) in `pending`.
    3. LazyAdam.step() takes what is pending. The gradient of row r is the sum, over the reads of r,
       of weight * grad_out[token].
    `learns = False` freezes the table. backward(inputs=...) and torch.autograd.grad() train none.
    """

    def __init__(self, n_slots, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_slots, dim), requires_grad=False)
        self.reset_parameters()
        self.learns = True
        self.pending = []  # reads of the backward passes since the last update
        self.optimized = self.warned = False  # whether a LazyAdam takes the reads

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def __getstate__(self):
        return {**self.__dict__, "pending": [], "optimized": False}  # a copy has no LazyAdam yet

    def forward(self, slots, weights, dtype=None):
        """Sum the rows at `slots`, weighted by `weights`.

        slots (int) and weights: (tokens, heads, topk). Returns (tokens, dim) in `dtype`, by
        default the table's. A token whose weights are 0 moves no row.
        """
        slots, weights = slots.flatten(1), weights.flatten(1)
        rows = self.weight.detach()  # someone may have set requires_grad (from_pretrained does)
        shares = weights.to(rows.dtype)
        if torch.onnx.is_in_onnx_export():  # its embedding_bag is a loop, and refuses int32
            out = (shares[:, None] @ rows[slots.long()]).squeeze(1)
        else:
            out = F.embedding_bag(slots, rows, mode="sum", per_sample_weights=shares)
        out = out.to(dtype or rows.dtype)
        if self.learns and torch.is_grad_enabled():
            out = out + self.recorder(out, slots, weights.detach())
        return out

    @torch.compiler.disable  # a compiled graph reuses its buffers, and cannot keep a read
    def recorder(self, out, slots, weights):
        """Make zeros that record the read when backward() reaches them. They take no memory."""
        def keep(zeros):
            if self.optimized:
                self.pending.append((slots, weights, zeros.grad))
            zeros.grad = None
            # the paper's 1,024 sequences make at most 1,024 reads a step
            neglected = not self.optimized or len(self.pending) > 1024
            if neglected and not self.warned:
                self.warned = True
                warnings.warn("values do not learn: make a LazyAdam of their ValueTables and call "
                              "its step() and zero_grad(), or set learns = False to freeze a table")

        zeros = out.new_zeros(()).expand(out.shape).requires_grad_()
        zeros.register_post_accumulate_grad_hook(keep)
        return zeros


def adam(weight, row, grad, state, group):
    """Apply Adam (Kingma and Ba, 2014) to some rows of a weight, given their gradient.

    state: a dict of the weight's own, which has `step`. group: a dict of settings.
    """
    if "exp_avg" not in state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
    beta1, beta2 = group["betas"]
    step = int(state["step"])
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    exp_avg = state["exp_avg"].index_select(0, row).lerp_(grad, 1 - beta1)
    exp_avg_sq = state["exp_avg_sq"].index_select(0, row).mul_(beta2)
    exp_avg_sq.addcmul_(grad, grad, value=1 - beta2)
    state["exp_avg"].index_copy_(0, row, exp_avg)
    state["exp_avg_sq"].index_copy_(0, row, exp_avg_sq)
    step_size = group["lr"] * bias2**0.5 / bias1
    weight.index_add_(0, row, exp_avg.div_(exp_avg_sq.sqrt_().add_(group["eps"])), alpha=-step_size)


class LazyAdam(torch.optim.Optimizer):
    """Adam for ValueTables that updates only the rows read since the last step.

    The other rows keep their values and moments, as in SparseAdam. There is no weight decay. A
    step with a gradient that is not finite is left out. Another rule is a function like adam().
    """

    def __init__(self, tables, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, rule=adam):
        self.tables, self.rule = [], rule
        super().__init__([{"params": tables}], {"lr": lr, "betas": betas, "eps": eps})

    def add_param_group(self, group):
        """Add {"params": tables}, with settings of their own."""
        tables = group["params"]
        tables = list(dict.fromkeys(tables)) if hasattr(tables, "__iter__") else [tables]
        for table in tables:
            if not isinstance(table, ValueTable):
                raise TypeError("LazyAdam takes a list of ValueTables, such as "
                                f"[model.memory.values], not a {type(table).__name__}")
            table.weight.requires_grad_(False)
            table.optimized = True
        super().add_param_group({**group, "params": [table.weight for table in tables]})
        self.tables += tables

    @torch.no_grad()
    def step(self, closure=None, grad_scale=1.0):
        """Update once. grad_scale: what the loss was multiplied by."""
        with torch.enable_grad():
            loss = closure() if closure else None
        parameters = [(p, group) for group in self.param_groups for p in group["params"]]
        for table, (parameter, _) in zip(self.tables, parameters, strict=True):  # before any moves
            assert table.weight is parameter, "a table has a new weight: make a new LazyAdam"
            dtype = table.weight.dtype
            assert dtype in (torch.float32, torch.float64), f"keep values in float32, not {dtype}"
        several_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        finite = all(grad_out.isfinite().all() for table in self.tables
                     for *_, grad_out in table.pending)
        if several_ranks and parameters:  # all update, or none
            flag = torch.tensor(finite, dtype=torch.uint8, device=parameters[0][0].device)
            dist.all_reduce(flag, dist.ReduceOp.MIN)
            finite = flag.item()
        if finite:
            for table, (parameter, group) in zip(self.tables, parameters, strict=True):
                sums = sum_rows(parameter, table.pending, grad_scale)
                if several_ranks:
                    sums = mean_over_ranks(parameter, sums)
                for number, (row, grad) in enumerate(sums):
                    state = self.state[parameter]
                    if number == 0:  # once, and only if the table was read
                        # a tensor, because torch.distributed.checkpoint loads no int
                        state["step"] = state.get("step", torch.tensor(0)) + 1
                    self.rule(parameter, row, grad, state, group)
        self.zero_grad()
        return loss

    def step_with(self, dense, scaler, grad_scale=1.0):
        """Step `dense`, the optimizer of all other weights, and this one under a GradScaler.

        It also calls scaler.update(). After an overflow neither optimizer moves a weight.
        grad_scale: what else the loss was multiplied by.
        """
        scale = scaler.get_scale()
        scaler.step(dense)
        scaler.update()
        if scaler.get_scale() >= scale:  # it falls where a step was left out
            self.step(grad_scale=scale * grad_scale)

    def load_state_dict(self, state_dict):
        names = {name for group in state_dict["param_groups"] for name in group["params"]}
        if any(isinstance(name, str) for name in names - state_dict["state"].keys()):
            raise ValueError("torch.distributed.checkpoint's set_state_dict leaves out the state "
                             "of values: save and load LazyAdam's state_dict() itself")
        super().load_state_dict(state_dict)

    def __getstate__(self):
        return {**super().__getstate__(), "tables": self.tables, "rule": self.rule}

    def __setstate__(self, state):
        super().__setstate__(state)
        for table in self.tables:
            table.optimized = True

    def zero_grad(self, set_to_none=True):
        """Drop the pending reads."""
        for table in self.tables:
            table.pending.clear()


def chunk_rows(weight):
    """Return how many rows are updated at once: 1 MB of them on a CPU, for its cache."""
    return max(1, 2**18 // weight.shape[1]) if weight.is_cpu else 2**16


def sum_rows(weight, pending, grad_scale=1.0):
    """Sum up the gradients of the rows that were read.

    pending: a list of (slots, weights, grad_out): two (tokens, reads), and (tokens, dim). Yields
    (row, grad), some rows at a time: their numbers (rows,) and gradients (rows, dim).
    """
    if not pending:
        return
    slots, weights, grad_out = map(torch.cat, zip(*pending, strict=True))
    live = grad_out.any(1) & weights.any(1)  # the loss sees the token, and it is no padding
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


def mean_over_ranks(weight, sums):
    """Take the mean of all ranks' gradients. All ranks must call it.

    sums: see sum_rows. Yields (row, grad) of the rows that any rank read. Takes a table's memory.
    """
    total = torch.zeros_like(weight)
    read = torch.zeros(len(weight), dtype=torch.uint8, device=weight.device)
    for row, grad in sums:
        total[row] = grad
        read[row] = 1
    dist.all_reduce(total)
    dist.all_reduce(read, dist.ReduceOp.MAX)
    rows = read.nonzero().squeeze(1)
    for row in filter(len, rows.split(chunk_rows(weight))):  # without rows there is an empty part
        yield row, total[row] / dist.get_world_size()
