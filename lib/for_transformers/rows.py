"""
Find the rows of a memory that a text reads and ordinary text hardly does.

>>> tables = add_memory(model, layers=(3, 5), values="zero", freeze=True)
>>> ordinary = calibrate(model, batches)            # ids of ordinary text, each (batch, time)
>>> rows = specific_rows(count_reads(model, ids), ordinary, len(batches), top=3000)
>>> values = LazyAdam([{"params": [tables[n]], "rows": rows[n]} for n in tables], lr=0.3)

Lin et al., 2025 (Continual Learning via Sparse Memory Finetuning), choose rows by tf-idf in every
step. Their model was trained with its memory. Here the queries and sub-keys are random.
"""
import torch
from torch import nn

from lib.for_transformers.adapter import find_memories
from lib.for_transformers.facts import take


class Enough(Exception):
    """All memories have been read: the layers above them need not run."""


@torch.no_grad()
def calibrate(model, batches):
    """Give the queries mean 0 and variance 1 on ordinary text, and count its reads.

    Changes the query's weights, in place of the batch norm that a memory in training has. batches:
    token ids, each (batch, time), without padding. Returns ordinary_reads. ValueError if the
    memory has a batch norm, or values that were trained on other queries.
    """
    memories = find_memories(model)
    if not memories or sum(ids.numel() for ids in batches) < 2:
        raise ValueError("calibrate() needs a model with memory, and ordinary text")
    for n, memory in memories.items():
        if not isinstance(memory.query_norm, nn.Identity) or memory.values.weight.any():
            raise ValueError(f"layer {n}: calibrate() expects a new memory: add_memory(model, "
                             'layers, values="zero", freeze=True)')
    queries = {n: [] for n in memories}
    hooks = [memory.query.register_forward_hook(
                 lambda _, args, query, n=n: queries[n].append(query.flatten(0, -2)))
             for n, memory in memories.items()]
    try:
        ordinary_reads(model, batches)
    finally:
        for hook in hooks:
            hook.remove()
    for n, memory in memories.items():
        var, mean = torch.var_mean(torch.cat(queries[n]).float(), 0)
        std = (var + 1e-5).sqrt()
        memory.query.weight.div_(std[:, None])
        memory.query.bias.sub_(mean).div_(std)
    return ordinary_reads(model, batches)


def ordinary_reads(model, batches):
    """Count how many of the batches read each row: {layer: (n_slots,)}."""
    total = {}
    for ids in batches:
        for n, count in count_reads(model, ids).items():
            total[n] = total.get(n, 0) + (count > 0).long()
    return total


@torch.no_grad()
def count_reads(model, ids, mask=None):
    """Count how often the real tokens of a batch read each row: {layer: (n_slots,)}.

    ids: (batch, time). mask: (batch, time), nonzero at real tokens. The layers above the last
    memory do not run.
    """
    memories, counts = find_memories(model), {}

    def count(n, table, read):
        slots, weights = (tensor.flatten(1) for tensor in read[:2])
        slots = slots[weights.any(1)].flatten().long()  # the weights of padding are 0
        counts[n] = torch.bincount(slots, minlength=len(table.weight))
        if len(counts) == len(memories):
            raise Enough

    hooks = [memory.values.register_forward_hook(
                 lambda table, read, _, n=n: count(n, table, read))
             for n, memory in memories.items()]
    try:
        model(ids, attention_mask=mask)
    except Enough:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return counts


def choose_rows(model, data, ordinary, batches, top, **score):
    """Choose rows to train that no other lesson uses: {layer: rows}.

    data: what encode returned for the facts. ordinary, batches, top: see specific_rows. score: its
    `power` and `tf`."""
    reads = dict.fromkeys(ordinary, 0)
    for pick in torch.arange(len(data[0])).split(32):
        ids, mask, _ = take(data, pick, model.device)
        for n, count in count_reads(model, ids, mask).items():
            reads[n] = reads[n] + count
    for n, memory in find_memories(model).items():
        reads[n] = reads[n].where(~memory.values.weight.any(1), 0)
    return specific_rows(reads, ordinary, batches, top, **score)


def specific_rows(reads, ordinary, batches, top, power=4, tf=torch.log1p):
    """Choose the rows that a text reads and ordinary text hardly does: {layer: rows}.

    They have the highest tf(reads) * log((batches + 1) / (ordinary + 1))^power, at most `top` a
    layer. reads: {layer: (n_slots,) reads of the text}. ordinary: {layer: (n_slots,) how many of so
    many `batches` of ordinary text read the row}. With power 1 and tf(n) = n this is tf-idf, which
    also chooses rows that both texts read often: other texts suffer more (results/teach.md).
    """
    rows = {}
    for n, count in reads.items():
        idf = torch.log((batches + 1) / (ordinary[n] + 1.0)).clamp(min=0)
        score = tf(count.float()) * idf ** power
        best = score.topk(min(top, len(score)))
        rows[n] = best.indices[best.values > 0]
    return rows
