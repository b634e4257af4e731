"""
Product-key memory (Lample et al., 2019), as Kim & Jung (2020) put it into BERT.

A memory has n_keys^2 slots, and each slot has a value vector. A token's query is cut into two
halves. Each half is compared with n_keys sub-keys. A slot belongs to a pair of sub-keys, and its
score is the sum of theirs. The softmax of the best scores weighs the values of their slots.

To use a memory in another model, copy this file and values.py. They need nothing but torch:

>>> class Block(nn.Module):
...     def __init__(self, d):
...         super().__init__()
...         self.ffn, self.memory = nn.Linear(d, d), PKM(d, n_keys=64)   # 64 x 64 slots
...     def forward(self, x):
...         return x + self.ffn(x) + self.memory(x)
>>> model = Block(32)
>>> dense = torch.optim.AdamW(model.parameters())     # skips the values: they have no .grad
>>> sparse = LazyAdam([model.memory.values], lr=1e-3)  # updates the rows that were read
>>> model(torch.randn(4, 16, 32)).square().mean().backward()
>>> for optimizer in (dense, sparse):
...     optimizer.step()
...     optimizer.zero_grad()

It trains under autocast, gradient accumulation, activation checkpointing and torch.compile (a
training graph breaks at the values), and under DistributedDataParallel, where LazyAdam joins the
reads of all ranks. With a GradScaler call sparse.step(grad_scale=scaler.get_scale()).
"""
import torch
from torch import nn

from values import LazyAdam, ValueTable

__all__ = ["PKM", "LazyAdam", "ValueTable"]


class PKM(nn.Module):
    """Product-key memory with n_keys^2 slots (section 2.1; default sizes: section 5.1).

    Each of `heads` heads reads its topk best slots. The heads share one table of values, and
    their reads are summed. Scores and softmax are in float32 or float64, also under autocast.
    """

    def __init__(self, d_model, n_keys=512, heads=4, topk=32, key_dim=256):
        super().__init__()
        assert 1 <= topk <= n_keys, f"topk = {topk}: expected 1 to n_keys = {n_keys}"
        assert key_dim % 2 == 0, f"key_dim = {key_dim}: expected an even number, for two halves"
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
        self.num_batches_tracked += 1
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        count = mask.sum()
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
