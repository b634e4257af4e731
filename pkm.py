"""
Product-key memory (Lample et al., 2019), as Kim & Jung (2020) put it into BERT.

n_keys^2 slots, each a value vector, are addressed by pairs of sub-keys. A token's query is cut
into two halves, each half is compared with n_keys sub-keys, and the best `topk` sums of a pair of
scores are the best slots among all n_keys^2. The softmax of their scores weighs their values.

>>> memory = PKM(d_model=768)                       # 512 x 512 slots, 4 heads, top-32
>>> y = memory(x)                                   # (batch, time, 768) -> the same
>>> y.square().mean().backward()                    # the value table has no .grad, but
>>> memory.values.step(lr=1e-3)                     # Adam on the rows that were read
"""
import math
import platform

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

X86 = platform.machine() in ("x86_64", "AMD64")


def topk(scores, k):
    """scores.topk(k) of finite scores: the k largest of the last dimension, best first, and their
    indices.

    On few x86 cores numpy finds them: its partition is vectorized there, 4.6 times faster a thread
    at 32 of 512. A float32 leaves 29 bits of a float64 free: there the index travels with its
    score, and decides only between equal ones.
    """
    n = scores.shape[-1]
    if (torch.compiler.is_compiling() or not scores.is_cpu or scores.dtype != torch.float32
            or torch.get_num_threads() > 4 or not X86):
        return scores.topk(k)
    rows = scores.detach().numpy().reshape(-1, n)
    best = np.empty((len(rows), k))
    for at in range(0, len(rows), 512):  # 2 MB: in cache
        packed = rows[at:at + 512].astype(np.float64)
        packed.view(np.int64)[:] |= np.arange(n)
        packed.partition(n - k)
        best[at:at + 512] = packed[:, n - k:]
    best.sort()
    best = best[:, ::-1].view(np.int64).reshape(*scores.shape[:-1], k)
    index = best & (2**29 - 1)
    values = (best - index).view(np.float64).astype(np.float32)
    return torch.from_numpy(values), torch.from_numpy(index)


class ValueTable(nn.Module):
    """The values of a memory: (n_slots, dim) rows, what was read of them, and their Adam.

    The table's gradient never exists. For row r it is the sum, over the reads of r, of
    weight * grad_out[token]: an embedding bag itself. So backward only keeps (slots, weights,
    grad_out) in `reads`, over any number of micro-batches, and step() sorts them by slot, bags
    them and applies Adam, a chunk of rows at a time, while the chunk is in cache.
    weight.requires_grad_(False) freezes the table; .to(torch.bfloat16) halves what inference reads.
    """

    def __init__(self, n_slots, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_slots, dim))
        nn.init.normal_(self.weight, std=dim**-0.5)
        self.reads = []  # (slots, weights, grad_out) of each backward since the last step
        self.steps = 0
        self.exp_avg = self.exp_avg_sq = None  # made by the first step: inference needs none

    def forward(self, slots, weights, dtype=None):
        """Weighted sum of rows: slots (int) and weights, both (tokens, heads, topk), to
        (tokens, dim) in `dtype` (default: the table's). A forward hook sees every read."""
        read = self._kept if torch.is_grad_enabled() else self._sum
        return read(slots.flatten(1), weights.flatten(1), dtype or self.weight.dtype)

    def _sum(self, slots, weights, dtype):
        table = self.weight.detach()  # its gradient is not autograd's business
        weights = weights.to(table.dtype)
        return F.embedding_bag(slots, table, per_sample_weights=weights, mode="sum").to(dtype)

    @torch.compiler.disable  # a compiled graph has no `reads`
    def _kept(self, slots, weights, dtype):
        return Read.apply(self.weight, slots, weights, self, dtype)

    def _by_row(self, slots, chunk=None):
        """Reads, side by side by the row that they read: their order (reads,), and for each
        `chunk` of rows (by default 1 MB of them on a CPU) which reads of that order are its
        own, a slice; its rows (rows,); and where each row's reads start in the slice (rows,)."""
        slots, order = slots.flatten().sort(stable=True)
        rows, counts = slots.unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts
        chunk = chunk or (max(1, 2**18 // self.weight.shape[1]) if slots.is_cpu else 2**16)
        bounds = [*starts[::chunk].tolist(), len(slots)]  # waits for the device, once
        return order, [(slice(start, stop), row, offsets - start) for start, stop, row, offsets in
                       zip(bounds, bounds[1:], rows.long().split(chunk), starts.split(chunk),
                           strict=False)]

    def weights_grad(self, slots, grad_out, by_row=None):
        """The products of the rows at `slots` (tokens, reads) and grad_out (tokens, dim), in the
        shape of slots. by_row, default on a CPU: each row leaves memory once and meets grad_out
        in the cache, 2.3 times faster than token by token; elsewhere it would wait for a sort."""
        products = torch.ops.aten._embedding_bag_per_sample_weights_backward  # of a bag's backward
        table, grad_out, per_token = self.weight, grad_out.to(self.weight.dtype), slots.shape[1]
        if not (slots.is_cpu if by_row is None else by_row):
            token = torch.arange(len(slots), dtype=slots.dtype, device=slots.device)
            return products(grad_out, table, slots.flatten(), token * per_token,
                            token.repeat_interleave(per_token), 0).view_as(slots)
        order, chunks = self._by_row(slots)
        token = order // per_token
        parts = [products(table.index_select(0, rows), grad_out, token[part], offsets, token[:0], 0)
                 for part, rows, offsets in chunks]  # a row is a bag of tokens
        return torch.empty_like(slots, dtype=table.dtype).put_(order, torch.cat(parts))

    @torch.no_grad()
    def step(self, lr, betas=(0.9, 0.999), eps=1e-8, grad_scale=1.0, chunk=None):
        """One step of lazy Adam (torch.optim.SparseAdam's formula) on the rows read since the
        last one; no other row, nor its moments, moves. grad_scale divides the gradient (a
        GradScaler's scale); chunk: rows at a time."""
        if not self.reads:
            return
        slots, weights, grad_out = (torch.cat(parts) for parts in zip(*self.reads, strict=True))
        self.reads.clear()
        seen = grad_out.any(1)  # padding, and all else that the loss does not see, moves no row
        if not seen.all():
            slots, weights, grad_out = slots[seen], weights[seen], grad_out[seen]
        if not len(slots):
            return
        table = self.weight
        if self.exp_avg is None:
            self.exp_avg, self.exp_avg_sq = torch.zeros_like(table), torch.zeros_like(table)
        self.steps += 1
        count = torch.full((), float(self.steps), device=table.device)
        eps /= math.sqrt(1 - betas[1]**self.steps)  # SparseAdam adds it before the correction

        order, chunks = self._by_row(slots, chunk)
        tokens, grad_out = order // slots.shape[1], grad_out.to(table.dtype)
        weights = weights.to(table.dtype).flatten()[order] / grad_scale
        aligned = table.is_cpu and table[0].nbytes % 16 == 0
        wide = torch.complex128 if aligned else table.dtype  # 16 bytes at a time, not 4
        for reads, rows, offsets in chunks:
            grad = F.embedding_bag(tokens[reads], grad_out, offsets, mode="sum",
                                   per_sample_weights=weights[reads])  # (rows, dim)
            state = (table, self.exp_avg, self.exp_avg_sq)
            value, *moments = new = [tensor.index_select(0, rows) for tensor in state]
            torch._fused_adam_(  # one pass over the chunk, where plain tensor operations take six
                [value], [grad], *([moment] for moment in moments), [], [count], lr=lr,
                beta1=betas[0], beta2=betas[1], weight_decay=0.0, eps=eps, amsgrad=False,
                maximize=False)
            for whole, part in zip(state, new, strict=True):
                whole.view(wide).index_copy_(0, rows, part.view(wide))

    def optimizer_state(self):
        """What step() needs to go on: plain tensors and an int."""
        return {"steps": self.steps, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def load_optimizer_state(self, state):
        self.steps = state["steps"]
        for name in ("exp_avg", "exp_avg_sq"):
            moment = state[name]
            setattr(self, name, None if moment is None else moment.to(self.weight.device))


class Read(torch.autograd.Function):
    """A weighted sum of rows whose backward keeps, for step(), what the table's gradient is of."""

    @staticmethod
    def forward(ctx, table, slots, weights, values, dtype):
        ctx.save_for_backward(slots, weights)
        ctx.values = values
        return values._sum(slots, weights, dtype)  # in dtype: so is the grad_out that is kept

    @staticmethod
    def backward(ctx, grad_out):
        slots, weights = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            ctx.values.reads.append((slots, weights, grad_out))
        grad = ctx.values.weights_grad(slots, grad_out) if ctx.needs_input_grad[2] else None
        return None, None, grad, None, None


class Scores(torch.autograd.Function):
    """The scores of chosen sub-keys, of which the search has the values already.

    Backward's products are dense, over all sub-keys; on a CPU a few tokens at a time, in cache.
    """

    @staticmethod
    def forward(ctx, query, keys, index, score):
        """query: (heads, 2, tokens, half); keys: (heads, 2, n_keys, half); index: (heads, 2,
        tokens, topk); score: (heads, tokens, topk), summed over the halves, returned."""
        ctx.save_for_backward(query, keys, index)
        return score.clone()

    @staticmethod
    def backward(ctx, grad):
        query, keys, index = ctx.saved_tensors
        grad_query, grad_keys = torch.empty_like(query), torch.zeros_like(keys)
        chunk = 256 if grad.is_cpu else max(1, grad.shape[1])
        for at in range(0, grad.shape[1], chunk):
            at = slice(at, at + chunk)
            of_scores = grad.new_zeros(*index[:, :, at].shape[:3], keys.shape[2])
            of_scores.scatter_add_(3, index[:, :, at], grad[:, None, at].expand_as(index[:, :, at]))
            grad_query[:, :, at] = of_scores @ keys
            grad_keys += of_scores.mT @ query[:, :, at]
        return grad_query, grad_keys, None, None


class PKM(nn.Module):
    """Product-key memory with n_keys^2 slots (section 2.1; sizes of section 5.1 by default).

    Each of `heads` heads reads its topk best slots of one shared value table; the heads' reads
    are summed. Scores and softmax are computed in float32 at least, also under autocast.
    """

    def __init__(self, d_model, n_keys=512, heads=4, topk=32, key_dim=256):
        super().__init__()
        if not 1 <= topk <= n_keys:
            raise ValueError(f"topk = {topk}: expected 1 to n_keys = {n_keys}: a head can't find "
                             "more sub-keys than there are")
        if key_dim < 2 or key_dim % 2:
            raise ValueError(f"key_dim = {key_dim}: expected an even number, for two halves")
        self.n_keys, self.heads, self.topk = n_keys, heads, topk
        self.query = nn.Linear(d_model, heads * key_dim)
        nn.init.xavier_uniform_(self.query.weight)
        self.query_norm = nn.BatchNorm1d(heads * key_dim)
        half = key_dim // 2
        self.keys = nn.Parameter(torch.empty(heads, 2, n_keys, half))
        nn.init.uniform_(self.keys, -half**-0.5, half**-0.5)
        self.values = ValueTable(n_keys**2, d_model)
        # With both halves' scores sorted, the pair (i, j) has (i+1)(j+1) - 1 pairs that are at
        # least as good, so only these can be in the top k: 119 of 1,024 for k = 32.
        pairs = [(i, j) for i in range(topk) for j in range(topk) if (i + 1) * (j + 1) <= topk]
        self.register_buffer("pairs", torch.tensor(pairs).T.contiguous(), persistent=False)

    def forward(self, x, mask=None):
        """x: (..., d_model); mask: (...) bool, True at real tokens, or None. Returns x's shape,
        in autocast's dtype where that is on. Padded tokens are not looked up, nor are they in the
        batch norm's statistics; their output is 0."""
        if mask is not None:
            return self._real(x, mask)
        query = self.query(x.flatten(0, -2))  # (tokens, heads * key_dim)
        dtype = query.dtype  # autocast's: the output has it, as an FFN's would
        with torch.autocast(x.device.type, enabled=False):  # 8 bits of a score: neighbours tie
            query = self.query_norm(query.to(torch.promote_types(dtype, torch.float32)))
            return self.values(*self.search(query), dtype).view_as(x)

    @torch.compiler.disable  # the number of real tokens is another one in every batch
    def _real(self, x, mask):
        y = self(x[mask])
        return y.new_zeros(x.shape).index_put((mask,), y)

    def search(self, query):
        """The exact topk slots of each head and the softmax of their scores.

        query: (tokens, heads * key_dim). Returns slots (int32) and weights, both
        (tokens, heads, topk), best first; slot = n_keys * (index of sub-key 1) + (of sub-key 2).
        """
        heads, _, n_keys, half = self.keys.shape
        query = query.view(-1, heads, 2, half).permute(1, 2, 0, 3)  # (heads, 2, tokens, half)
        with torch.no_grad():  # which slots: a choice, no gradient
            scores = query @ self.keys.mT  # (heads, 2, tokens, n_keys)
            best, index = topk(scores, self.topk)  # (heads, 2, tokens, topk)
            candidates = best[:, 0][..., self.pairs[0]] + best[:, 1][..., self.pairs[1]]
            score, winners = topk(candidates, self.topk)  # (heads, tokens, topk)
            rank = self.pairs[:, winners].transpose(0, 1)  # (heads, 2, tokens, topk)
            index = index.gather(3, rank)  # the winners' sub-keys
            slots = (index[:, 0] * n_keys + index[:, 1]).int()
        if torch.is_grad_enabled():
            score = Scores.apply(query, self.keys, index, score)
        return slots.transpose(0, 1), score.softmax(2).transpose(0, 1)
