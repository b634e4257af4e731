"""
Compute a pretraining step's time on paper: BERT base with product-key memories, on one card.

$ python results/step_on_paper.py --card H100 --tokens 65536

A stage lasts as long as its bytes take at the card's bandwidth, or its operations at the card's
peak, whichever is longer. "Cold": no byte comes from a cache. "L2": what is moved again comes from
the L2 cache if the data that it belongs to fits. If only a part fits, that part does.
"""
import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from configs import base_resm_init as config
from lib.training.flops import PEAK_FLOPS, flops_per_token
from model import BertConfig, MaskedLM

# bytes/s, bytes of the L2 cache, FLOP/s in float32 without tensor cores (data sheets, SXM cards)
CARDS = {"V100": (0.9e12, 6e6, 15.7e12), "A100": (2.04e12, 40e6, 19.5e12),
         "H100": (3.35e12, 50e6, 67e12), "H200": (4.8e12, 50e6, 67e12)}
UTILIZATION = 0.4  # of the peak, in the rest of the step (assumed)
L2_SPEED = 2  # L2's bandwidth in units of the memory's (assumed)


@dataclass
class Stage:
    """Describe one stage of one memory, for all tokens of a step."""

    part: str
    name: str
    ops: int  # of ATen, in eager mode, without views
    once: float  # bytes of the ops' inputs and outputs
    again: tuple = ()  # moved once more: (bytes, bytes of the data that they belong to), ...
    half: float = 0  # operations in bfloat16 or float16
    full: float = 0  # operations in float32

    def bytes(self, cache):
        """Count the bytes that memory moves, beside a cache of this size."""
        return self.once + sum(more * max(0, 1 - cache / data) for more, data in self.again)

    def seconds(self, card, cache, reached=1.0):
        """Compute the time of kernels that reach this share of bandwidth and peak."""
        bandwidth, _, float32 = CARDS[card]
        operations = self.half / PEAK_FLOPS[card] + self.full / float32
        return max(self.bytes(cache) / bandwidth, operations) / reached


def stages(c, tokens, micro_batches=1, value=4, grad=4):
    """List a memory's stages. c: BertConfig. value, grad: bytes of a number, 4 or 2, in the values
    that forward and backward read, and in the gradients that the update sums."""
    d, heads, slots = c.d_model, c.memory_heads, c.n_keys**2
    x4, x2 = 4 * tokens * d, 2 * tokens * d  # hidden states, in float32 and in half precision
    q4, q2 = 4 * tokens * heads * c.key_dim, 2 * tokens * heads * c.key_dim  # queries
    w4, keys = 4 * d * heads * c.key_dim, 4 * heads * c.n_keys * c.key_dim  # weights, sub-keys
    rows = 2 * heads * tokens  # of scores: for each token, head and half
    s4 = 4 * rows * c.n_keys  # scores
    n4, n8 = 4 * tokens * heads * c.topk, 8 * tokens * heads * c.topk  # a number for each read
    p4 = 4 * tokens * heads * sum(c.topk // (i + 1) for i in range(c.topk))  # candidate pairs
    read, table = value * n4 // 4 * d, value * slots * d  # all rows that are read, the values
    first = micro_batches * table  # each row's first read of a micro-batch
    cast = micro_batches * (4 * slots * d + table) if value == 2 else 0
    out = value * tokens * d
    convert = out + x2 if value == 4 else 0  # from float32 to the layer's half precision, or back
    grads, summed = grad * tokens * d, grad * n4 // 4 * d  # gradients by token, by read
    updated = min(slots, n4 // 4)  # all slots, if there are enough reads
    u4, chunks = 4 * updated * d, -(-updated // 2**16)  # 2^16: LazyAdam's, on CUDA
    product, search = x2 * heads * c.key_dim, q2 * c.n_keys  # 2 operations for a multiply-add
    if c.n_keys >= 400:  # topk by 4 digits, each counted into 256 bins; a last pass selects
        counts = 256 * rows * 12  # of a digit: 2 bytes are written and read, then their sums, 4
        passes = (4 * s4, s4), (4 * counts, counts)
    else:  # by 16 digits, in one block a row; two passes select
        passes = (17 * s4, 4 * c.n_keys),
    return [
        Stage("forward", "query product", 4, x4 + 2 * x2 + q2 + 2 * w4, half=product),
        Stage("forward", "batch norm", 3, q2 + 3 * q4, ((q4, q4),)),  # statistics first
        Stage("forward", "scores", 1, q4 + keys + s4, full=search),
        Stage("forward", "first topk", 1, s4 + 2 * (n4 + n8),  # it sorts what it selected
              (*passes, (4 * (n4 + n8), 2 * (n4 + n8)))),
        Stage("forward", "candidate sums", 14, 2 * n4 + 5 * p4),
        Stage("forward", "second topk", 1, p4 + n4 + n8,
              ((17 * p4, p4 / tokens / heads), (2 * (n4 + n8), n4 + n8))),
        Stage("forward", "slots", 5, 15 * n8 + n4),
        Stage("forward", "gather, softmax", 3, s4 + 2 * n8 + 7 * n4),
        Stage("forward", "read of values", 6, cast + 7 * n4 + first + out + convert + 2 * x4 + x2,
              ((read - first, table),)),
        Stage("backward", "weights' gradient", 3, x4 + x2 + convert + out + first + 3 * n4,
              ((read - first, table), (read - out, value * d))),  # a token's reads are adjacent
        Stage("backward", "softmax, scores", 3, 5 * n4 + 2 * n8 + 3 * s4),
        Stage("backward", "keys", 2, s4 + q4 + 3 * keys, full=search),
        Stage("backward", "query", 1, s4 + keys + q4, full=search),
        Stage("backward", "batch norm", 3, 6 * q4 + q2, ((2 * q4, q4),)),
        Stage("backward", "query product", 7, 3 * q2 + 3 * x2 + 4 * x4 + 3 * w4, half=2 * product),
        Stage("update", "checks, copies", 27,
              49 * n4 // 4 + 10 * x2 + (x2 + x4 if grad == 4 else 0)),
        Stage("update", "sort of reads", 13, 14 * n4 + 6 * n8 + 32 * slots,  # the sort: 4 passes
              ((8 * (n4 + n8), n4 + n8),)),
        Stage("update", "sums of gradients", 4 * chunks,
              n8 + n4 + grads + grad * u4 // 4 + 40 * updated, ((summed - grads, grads),)),
        Stage("update", "rows out of the table", 3 * chunks, 6 * u4),  # values and two moments
        Stage("update", "Adam", 3 * chunks, 7 * u4),
        Stage("update", "rows into the table", 3 * chunks, 6 * u4)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--card", choices=CARDS, default="H100")
    parser.add_argument("--tokens", type=int, default=65536, help="of a step, on this card")
    parser.add_argument("--micro_batches", type=int, default=4, help="that the tokens come in")
    args = parser.parse_args()
    card, tokens, l2 = args.card, args.tokens, CARDS[args.card][1]
    c = BertConfig(**{name: getattr(config, name) for name in (
        "memory_layers", "n_keys", "memory_heads", "topk", "key_dim")})
    with torch.device("meta"):
        flops = tokens * flops_per_token(MaskedLM(BertConfig()), config.seq_len)
    rest, n = flops / (UTILIZATION * PEAK_FLOPS[card]), len(c.memory_layers)

    now = stages(c, tokens, args.micro_batches)
    print(f"{n} memories, {card}, {tokens:,} tokens | ops | GFLOP | GB cold | GB L2 | ms L2")
    for name, group in [(f"{s.part}: {s.name}", [s]) for s in now] + [("sum", now)]:
        print(name, n * sum(s.ops for s in group),
              f"{n * sum(s.half + s.full for s in group) / 1e9:,.0f}",
              *(f"{n * sum(s.bytes(cache) for s in group) / 1e9:.1f}" for cache in (0, l2)),
              f"{1e3 * n * sum(s.seconds(card, l2) for s in group):.1f}", sep=" | ")
    print(f"the rest of the step | | {flops / 1e9:,.0f} | | | {1e3 * rest:.1f}\n")

    more = 8 * tokens * c.memory_heads * c.topk * (c.d_model // 32 - 1)  # slots and weights again
    changes = {
        "values in bf16": stages(c, tokens, args.micro_batches, value=2),
        "gradients summed in bf16": stages(c, tokens, args.micro_batches, grad=2),
        "both": stages(c, tokens, args.micro_batches, value=2, grad=2),
        # 32 columns of all rows fit into L2: memory gives a row once
        "rows read by 32 columns": [replace(s, once=s.once + more, again=tuple(
            (moved / L2_SPEED, 1e99) if data > l2 else (moved, data) for moved, data in s.again))
            if s.name in ("read of values", "weights' gradient", "sums of gradients") else s
            for s in now],
        "topk that reads once": [replace(s, again=()) if "topk" in s.name else s for s in now],
        "Adam in the table": [s for s in now if "the table" not in s.name]}
    settings = [(cache, reached) for cache in (0, l2) for reached in (1.0, 0.7)]

    def step(parts, setting):
        return rest + n * sum(s.seconds(card, *setting) for s in parts)

    print("step | cold | cold, 70% reached | L2 | L2, 70% reached")
    print("relative to plain BERT", *(f"{step(now, s) / rest:.2f}" for s in settings), sep=" | ")
    for name, parts in changes.items():
        saved = (1 - step(parts, s) / step(now, s) for s in settings)
        print(f"saved by: {name}", *(f"{share:.1%}" for share in saved), sep=" | ")


if __name__ == "__main__":
    main()
