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
>>> values = LazyAdam([model.memory.values], lr=1e-3)  # updates the rows that were read
>>> model(torch.randn(4, 16, 32)).square().mean().backward()
>>> for optimizer in (dense, values):
...     optimizer.step()
...     optimizer.zero_grad()

It trains under torch.compile (fullgraph=True, with or without a mask), activation checkpointing,
autocast and DistributedDataParallel, where LazyAdam joins the reads of all ranks. A GradScaler
takes both optimizers, but its unscale_() only the dense one. Threads can share a model in
evaluation; torch.export takes one with a mask. DataParallel, FullyShardedDataParallel and
fully_shard end in an error.
"""
import torch
import torch.nn.functional as F
from torch import nn

from values import LazyAdam, ValueTable

__all__ = ["PKM", "LazyAdam", "ValueTable", "candidates"]


class PKM(nn.Module):
    """Product-key memory with n_keys^2 slots (section 2.1; default sizes: section 5.1).

    Each of `heads` heads reads its topk best slots. The heads share one table of values, and
    their reads are summed. Scores and softmax are in float32 or float64, also under autocast.
    """

    def __init__(self, d_model, n_keys=512, heads=4, topk=32, key_dim=256, query_norm=True):
        super().__init__()
        if not 1 <= topk <= n_keys:
            raise ValueError(f"topk = {topk}: expected 1 to n_keys = {n_keys}, the sub-keys that "
                             "a head can choose from")
        if key_dim < 2 or key_dim % 2:
            raise ValueError(f"key_dim = {key_dim}: expected an even number, for two halves")
        self.n_keys = n_keys
        self.heads = heads
        self.topk = topk
        self.query = nn.Linear(d_model, heads * key_dim)
        nn.init.xavier_uniform_(self.query.weight)
        self.query_norm = nn.BatchNorm1d(heads * key_dim) if query_norm else nn.Identity()
        half = key_dim // 2
        self.keys = nn.Parameter(torch.empty(heads, 2, n_keys, half))
        nn.init.uniform_(self.keys, -half**-0.5, half**-0.5)
        self.values = ValueTable(n_keys**2, d_model)
        self.register_buffer("slot_rows", None)  # the row of each slot; None: one of its own

    def share_rows(self, n_rows):
        """Make a table of n_rows values that the slots share: slot s reads row slot_rows[s].
        Call it before freezing and before a LazyAdam is made."""
        (n_slots, d_model), device = self.values.weight.shape, self.values.weight.device
        self.values = ValueTable(n_rows, d_model).to(device, self.values.weight.dtype)
        self.slot_rows = torch.arange(n_slots, dtype=torch.int32, device=device) % n_rows

    def forward(self, x, mask=None):
        """Read the memory for every token.

        x: (..., d_model). mask: (...), bool or number, nonzero at real tokens. Returns x's
        shape, in autocast's dtype where autocast is on. The output of padded tokens is 0. They
        move no value and do not enter the batch norm's statistics.
        """
        if mask is not None:
            mask = mask.bool()
            if x.is_cpu and not torch.compiler.is_compiling():  # spares the padding's work
                read = self.forward(x[mask])
                return read.new_zeros(x.shape).index_put((mask,), read)
            x = x.where(mask[..., None], 0)
            mask = mask.reshape(-1, 1)
        query = self.query(x.flatten(0, -2))  # (tokens, heads * key_dim)
        dtype = query.dtype  # under autocast its dtype, the same as an FFN's output has
        with torch.autocast(x.device.type, enabled=False):
            query = self.normalize(query.to(self.keys.dtype), mask)
            slots, weights = self.search(query)
            if mask is not None:
                weights = weights.where(mask[..., None], 0)
            rows = slots if self.slot_rows is None else self.slot_rows[slots]
            return self.values(rows, weights, dtype).view_as(x)

    def normalize(self, query, mask=None):
        """Apply the batch norm. In training the real tokens alone make its statistics.

        query: (tokens, heads * key_dim). mask: (tokens, 1) bool, or None. The running statistics
        do not move where activation checkpointing computes a layer again.
        """
        norm = self.query_norm
        if not norm.training or isinstance(norm, nn.Identity):
            return norm(query)
        if not isinstance(norm, nn.BatchNorm1d):
            raise TypeError(f"PKM trains with a BatchNorm1d, found {type(norm).__name__}")
        if len(query) == 1:
            raise ValueError("in training PKM's batch norm needs more than one token")
        # in a backward pass, where activation checkpointing calls forward again
        again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        momentum = 0.0 if again else norm.momentum
        norm.num_batches_tracked.add_(0 if again else 1)
        if mask is None:
            return F.batch_norm(query, norm.running_mean, norm.running_var, norm.weight,
                                norm.bias, True, momentum, norm.eps)
        query = query.to(torch.promote_types(query.dtype, torch.float32))
        count = mask.sum()
        share = mask.T / count.clamp(min=1).to(query.dtype)  # (1, tokens)
        mean = share @ query
        var = share @ (query - mean).square()
        with torch.no_grad():
            momentum = momentum * (count > 1).to(query.dtype)
            unbiased = var * count / (count - 1).clamp(min=1)
            for running, new in ((norm.running_mean, mean), (norm.running_var, unbiased)):
                running.lerp_(new[0].to(running.dtype), momentum.to(running.dtype))
        return (query - mean) * (norm.weight * (var + norm.eps).rsqrt()) + norm.bias

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


def candidates(topk, device):
    """List the pairs of ranks whose sums can be in the top k: (2, pairs).

    Ranks count from 0 in the sorted scores of each half. (i+1)(j+1) - 1 pairs score no less than
    the pair (i, j), so a pair is needed only if (i+1)(j+1) <= k. For k = 32, 119 of 1,024 pairs
    remain. The list is no buffer: a module made on the meta device would lose its content.
    """
    count = sum(topk // (i + 1) for i in range(topk))
    rank = torch.arange(topk, device=device)
    per_rank = topk // (rank + 1)
    i = rank.repeat_interleave(per_rank, output_size=count)
    j = torch.arange(count, device=device) - (per_rank.cumsum(0) - per_rank)[i]
    return torch.stack([i, j])
