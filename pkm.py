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

import torch
import torch.nn.functional as F
from torch import nn


class QueryNorm(nn.BatchNorm1d):
    """Batch norm over the features of queries; padded tokens stay out of the statistics."""

    def forward(self, x, mask=None):
        """x: (tokens, features); mask: (tokens,) bool, True at real tokens, or None: all are."""
        if mask is None or not self.training:
            return super().forward(x)
        real = mask.to(x.dtype)[:, None]  # (tokens, 1): sums with it keep every shape static
        count = real.sum().clamp(min=1)
        mean = (x * real).sum(0) / count
        var = ((x - mean).square() * real).sum(0) / count
        with torch.no_grad():  # as BatchNorm1d: the running variance is the unbiased one
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1).clamp(min=1), self.momentum)
            self.num_batches_tracked += 1
        return (x - mean) * (var + self.eps).rsqrt() * self.weight + self.bias


class ValueTable(nn.Module):
    """The values of a memory: (n_slots, dim) rows, what was read of them, and their Adam.

    The table's gradient never exists. For row r it is the sum, over the reads of r, of
    weight * grad_out[token]: an embedding bag itself. So backward only keeps (slots, weights,
    grad_out) in `reads`, over any number of micro-batches, and step() sorts them by slot, bags
    them and applies Adam, a chunk of rows at a time, while the chunk is in cache.
    weight.requires_grad_(False) freezes the table.
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
        if torch.is_grad_enabled():
            return self._read_and_keep(slots.flatten(1), weights.flatten(1), dtype)
        return self._read(slots.flatten(1), weights.flatten(1), dtype)

    def _read(self, slots, weights, dtype):
        table = self.weight.detach()  # its gradient is not autograd's business
        out = F.embedding_bag(slots, table, per_sample_weights=weights.to(table.dtype), mode="sum")
        return out.to(dtype or out.dtype)

    @torch.compiler.disable  # a compiled graph would lose the hook
    def _read_and_keep(self, slots, weights, dtype):
        trained, kept = self.weight.requires_grad, weights.detach()
        if trained and not weights.requires_grad:  # where all but the table is frozen
            weights = weights.detach().requires_grad_()  # backward has to come by all the same
        out = self._read(slots, weights, dtype)
        if trained:
            out.register_hook(lambda grad: self.reads.append((slots, kept, grad.detach())))
        return out

    @torch.no_grad()
    def step(self, lr, betas=(0.9, 0.999), eps=1e-8, grad_scale=1.0, chunk=None):
        """One step of lazy Adam (torch.optim.SparseAdam's formula) on the rows read since the
        last one; no other row, nor its moments, moves. grad_scale divides the gradient (a
        GradScaler's scale); chunk: rows at a time, by default 1 MB of them on a CPU."""
        if not self.reads:
            return
        slots, weights, grad_out = (torch.cat(parts) for parts in zip(*self.reads, strict=True))
        self.reads.clear()
        seen = grad_out.any(1)  # padding, and all else that the loss does not see, moves no row
        slots, weights, grad_out = slots[seen], weights[seen], grad_out[seen]
        if not len(slots):
            return
        table, per_token = self.weight, slots.shape[1]
        if self.exp_avg is None:
            self.exp_avg, self.exp_avg_sq = torch.zeros_like(table), torch.zeros_like(table)
        self.steps += 1
        corrections = [1 - beta**self.steps for beta in betas]
        step_size = lr * math.sqrt(corrections[1]) / corrections[0]

        grad_out = grad_out.to(table.dtype)  # (tokens, dim)
        slots, order = slots.flatten().sort(stable=True)  # (reads,): a row's reads side by side
        weights = weights.to(table.dtype).flatten()[order] / grad_scale
        tokens = order // per_token  # the row of grad_out behind each read
        rows, counts = slots.unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts  # of each row's reads
        chunk = chunk or (2**16 if table.is_cuda else max(1, 2**18 // table.shape[1]))
        bounds = [*starts[::chunk].tolist(), len(slots)]  # waits for the device, once
        for start, stop, row, offsets in zip(bounds, bounds[1:], rows.long().split(chunk),
                                             starts.split(chunk), strict=False):
            grad = F.embedding_bag(tokens[start:stop], grad_out, offsets - start, mode="sum",
                                   per_sample_weights=weights[start:stop])  # (rows, dim)
            exp_avg = self.exp_avg[row].lerp_(grad, 1 - betas[0])
            exp_avg_sq = self.exp_avg_sq[row].mul_(betas[1])
            exp_avg_sq.addcmul_(grad, grad, value=1 - betas[1])
            self.exp_avg[row] = exp_avg
            self.exp_avg_sq[row] = exp_avg_sq
            table[row] = table[row].addcdiv_(exp_avg, exp_avg_sq.sqrt_().add_(eps),
                                             value=-step_size)

    def optimizer_state(self):
        """What step() needs to go on: plain tensors and an int."""
        return {"steps": self.steps, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def load_optimizer_state(self, state):
        self.steps = state["steps"]
        for name in ("exp_avg", "exp_avg_sq"):
            moment = state[name]
            setattr(self, name, None if moment is None else moment.to(self.weight.device))


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
        self.query_norm = QueryNorm(heads * key_dim)
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
        in autocast's dtype where that is on. Padded tokens get an output too, but leave the batch
        norm's statistics alone."""
        flat = x.flatten(0, -2)  # (tokens, d_model)
        query = self.query(flat)
        dtype = query.dtype  # autocast's: the output has it, as an FFN's would
        with torch.autocast(x.device.type, enabled=False):  # 8 bits of a score: neighbours tie
            query = query.to(torch.promote_types(dtype, torch.float32))
            query = self.query_norm(query, None if mask is None else mask.flatten())
            slots, weights = self.search(query)
            return self.values(slots, weights, dtype).view_as(x)

    def search(self, query):
        """The exact topk slots of each head and the softmax of their scores.

        query: (tokens, heads * key_dim). Returns slots (int32) and weights, both
        (tokens, heads, topk), best first; slot = n_keys * (index of sub-key 1) + (of sub-key 2).
        """
        heads, _, n_keys, half = self.keys.shape
        query = query.view(-1, heads, 2, half).permute(1, 2, 0, 3)  # (heads, 2, tokens, half)
        scores = query @ self.keys.transpose(2, 3)  # (heads, 2, tokens, n_keys)
        with torch.no_grad():  # which slots: a choice, no gradient
            best, index = scores.topk(self.topk)  # (heads, 2, tokens, topk), sorted
            candidates = best[:, 0][..., self.pairs[0]] + best[:, 1][..., self.pairs[1]]
            rank = self.pairs[:, candidates.topk(self.topk).indices].transpose(0, 1)
            index = index.gather(3, rank)  # (heads, 2, tokens, topk): the winners' sub-keys
        score = scores.gather(3, index).sum(1)  # (heads, tokens, topk)
        slots = (index[:, 0] * n_keys + index[:, 1]).int()
        return slots.transpose(0, 1), score.softmax(2).transpose(0, 1)
