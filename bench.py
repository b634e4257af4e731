"""
Speed, measured as the paper did, beside honest baselines in the same run.

$ python bench.py                          # Table 1: batches/s of a classifier at batch size 1
$ python bench.py inference --slots        # latency by number of slots, product and flat keys
$ python bench.py layer                    # one memory layer, stage by stage
$ python bench.py train                    # a pretraining step of base, +PKM and +ResM
$ python bench.py against_transformers     # ours and Hugging Face's, in turn

What is compared is timed in turn, in one process: figures are medians with [lowest, highest],
ratios medians over the rounds. The last line is JSON; --out results/NAME.json keeps it.
"""
import argparse
import json
import os
import platform
import resource
import shlex
import sys
import time
from statistics import median

import numpy as np
import torch
from torch import nn

import pkm
from configs import Parser, UserError, atomic, keep_freed_memory, need, run, setup, whole
from model import (
    SIZES,
    BertConfig,
    Classifier,
    MaskedLM,
    flops_per_token,
    mask_tokens,
    optimizer_groups,
    peak_flops,
    value_tables,
)

SYSTEMS = {"plain": {}, "+PKM": {"alpha": 0.0}, "+ResM": {"alpha": 1.0}}
LAYERS = {"base": (4, 8), "large": (8, 16), "distil": (2, 4), "demo": (2, 3)}
TABLE_1 = {"base": (79.8, 61.4, 59.3), "large": (43.1, 37.2, 36.1)}  # batches/s on a V100


class PlainPKM(nn.Module):
    """The memory as it is usually written, which every ratio is against: all k * k sums and slots
    of a head, nn.EmbeddingBag with a sparse gradient. Its state dict is pkm.PKM's."""

    def __init__(self, d_model, n_keys=512, heads=4, topk=32, key_dim=256):
        super().__init__()
        self.n_keys, self.heads, self.topk = n_keys, heads, topk
        self.query = nn.Linear(d_model, heads * key_dim)
        self.query_norm = nn.BatchNorm1d(heads * key_dim)
        self.keys = nn.Parameter(torch.empty(heads, 2, n_keys, key_dim // 2))
        nn.init.uniform_(self.keys, -(key_dim // 2)**-0.5, (key_dim // 2)**-0.5)
        self.values = nn.EmbeddingBag(n_keys**2, d_model, mode="sum", sparse=True)

    def forward(self, x):
        """(tokens, d_model) to the same."""
        query = self.query_norm(self.query(x)).view(len(x), self.heads, 2, -1)
        (first, i), (second, j) = (
            torch.einsum("thd,hkd->thk", query[:, :, half], self.keys[:, half]).topk(self.topk)
            for half in (0, 1))
        sums = (first[..., :, None] + second[..., None, :]).flatten(2)  # (tokens, heads, k * k)
        slots = (i[..., :, None] * self.n_keys + j[..., None, :]).flatten(2)
        best, winners = sums.topk(self.topk)
        slots = slots.gather(2, winners)
        return self.values(slots.flatten(1), per_sample_weights=best.softmax(2).flatten(1))


class FlatPKM(pkm.PKM):
    """A memory with one whole key a slot, all of them compared: what product keys spare."""

    def __init__(self, d_model, n_keys=512, heads=4, topk=32, key_dim=256):
        super().__init__(d_model, n_keys, heads, topk, key_dim)
        self.keys = nn.Parameter(torch.empty(heads, n_keys**2, key_dim))
        nn.init.uniform_(self.keys, -key_dim**-0.5, key_dim**-0.5)

    def search(self, query):
        query = query.view(len(query), len(self.keys), -1).transpose(0, 1)
        score, slots = (query @ self.keys.mT).topk(self.topk)  # (heads, tokens, topk)
        return slots.transpose(0, 1), score.softmax(2).transpose(0, 1)


def synchronize(device):
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def in_turn(what, functions, args, more=1, warmup=2):
    """Time {name: function} in turn, so that a busy moment of the machine meets them all.
    Returns {name: seconds of each of `more` times --rounds}; the rounds before, which compile and
    warm up, are not among them: what they took is printed."""
    times, begin = {name: [] for name in functions}, time.perf_counter()
    rounds, device = more * args.rounds, args.device
    for done in range(warmup + rounds):
        if done == warmup:
            print(f"{what}: warm-up {time.perf_counter() - begin:.1f} s", file=sys.stderr)
            begin = time.perf_counter()
        for name, function in functions.items():
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            times[name].append(time.perf_counter() - start)
        if done >= warmup and sys.stderr.isatty():
            timed = done + 1 - warmup
            left = (time.perf_counter() - begin) * (rounds / timed - 1)
            print(f"\r{what}: {timed}/{rounds}, ETA {left:.0f} s  ", file=sys.stderr,
                  end="\n" if timed == rounds else "", flush=True)
    return {name: seconds[warmup:] for name, seconds in times.items()}


def times_as_long(times, name, base):
    """By how much `name` takes longer than `base`, in the median round."""
    return median(a / b for a, b in zip(times[name], times[base], strict=True))


def spread(seconds):
    """'median [lowest, highest]' in milliseconds."""
    return seconds and "{:.4g} [{:.4g}, {:.4g}]".format(
        *(1e3 * value for value in (median(seconds), min(seconds), max(seconds))))


def show(header, rows):
    """A table, its columns aligned; a float has two decimals, None is an empty cell."""
    rows = [["" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell)
             for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def machine(device):
    """The hardware's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            name = next((line.split(":")[1].strip() for line in file if "model name" in line), name)
    return f"{name}, {torch.get_num_threads()} threads"


def fits(what, size, device):
    """Whether the device has `size` bytes free; if not, a line says that `what` is skipped."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as file:
            free = next(1024 * int(line.split()[1]) for line in file if "MemAvailable" in line)
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > 0.9 * free:
        print(f"skipped: {what}, {size / 1e9:.1f} GB, as {free / 1e9:.1f} GB are free")
    return size <= 0.9 * free


def build(head, size, system, device, n_keys=512, dropout=0.0):
    """A model with random weights."""
    config = BertConfig(**SIZES[size], **SYSTEMS[system], dropout=dropout, n_keys=n_keys,
                        memory_layers=LAYERS[size] if SYSTEMS[system] else ())
    with torch.device(device):
        return head(config, 2) if head is Classifier else head(config)


def quietly(args, function, *inputs):
    """function(*inputs) without gradients, under autocast, to be called later."""
    @torch.no_grad()
    def call():
        with torch.autocast(args.device.type, args.dtype, enabled=args.dtype != torch.float32):
            return function(*inputs)
    return call


def words(args, batch, length):
    return torch.randint(1000, 30000, (batch, length), device=args.device)


def inference(args):
    """Table 1: batches/s of a classification model at batch size 1"""
    if args.slots is not None:
        return by_slots(args, args.slots or [64, 128, 256, 512, 1024])
    modes = {"eager": lambda model: model}
    if args.compile:
        modes["compiled"] = torch.compile
        if args.device.type == "cuda":
            modes["graphs"] = lambda model: torch.compile(model, mode="reduce-overhead")
    rows, results = [], []
    for size in args.sizes:
        models = {}
        for system in SYSTEMS:
            need = sum(4 * p.numel() for p in
                       build(Classifier, size, system, "meta", args.n_keys).parameters())
            if fits(f"{size} {system}", need, args.device):
                models[system] = build(Classifier, size, system, args.device, args.n_keys).eval()
                for table in value_tables(models[system]).values():
                    table.to(getattr(torch, args.values_dtype))
        for length in args.lengths:
            ids = words(args, 1, length)
            torch.compiler.reset()  # or what was compiled before counts towards its limit
            times = in_turn(f"{size}, {length} tokens", {
                (system, mode): quietly(args, fast(model), ids) for system, model in models.items()
                for mode, fast in modes.items()}, args, 5, warmup=3)
            for (system, mode), seconds in times.items():
                number = sum(p.numel() for p in models[system].parameters())
                relative = (1 / times_as_long(times, (system, mode), ("plain", mode))
                            if "plain" in models else None)
                paper = dict(zip(SYSTEMS, TABLE_1.get(size, ()), strict=False))
                rows.append((f"{size} {system}", f"{number / 1e6:.1f}", length, mode,
                             spread(seconds), 1 / median(seconds), relative and f"{relative:.3f}",
                             f"{paper[system] / paper['plain']:.3f}" if paper else None))
                results.append({"model": f"{size} {system}", "parameters": number, "length": length,
                                "mode": mode, "seconds": seconds, "ratio": relative})
    show(("model", "M parameters", "tokens", "mode", "ms", "batches/s", "ratio to plain",
          "paper's ratio"), rows)
    return results


def by_slots(args, sides):
    """The poster's last figure: latency of base +ResM with n^2 slots, by product and flat keys."""
    model = build(Classifier, "base", "+ResM", args.device, 32).eval()
    call = quietly(args, model, words(args, 1, args.lengths[0]))
    width, memories, results = model.bert.config.d_model, {}, []
    for name, kind in (("product", pkm.PKM), ("flat", FlatPKM)):
        for n in sides:
            keys = 4 * (256 + args.lengths[0]) if kind is FlatPKM else 0  # and their scores
            if fits(f"{n}^2 slots with {name} keys", 4 * n**2 * (width + keys), args.device):
                with torch.device(args.device):
                    memories[name, n] = kind(width, n).eval()
                memories[name, n].values.to(getattr(torch, args.values_dtype))

    def with_memory(memory):
        def function():
            for n in LAYERS["base"]:  # the same in both: twice the slots fit
                model.bert.layers[n - 1].memory = memory
            call()
        return function

    times = in_turn("slots", {key: with_memory(m) for key, m in memories.items()}, args, 3)
    first = next(iter(times))
    for name, n in times:
        relative = times_as_long(times, (name, n), first)
        results.append({"keys": name, "slots": n * n, "seconds": times[name, n], "ratio": relative})
    show(("keys", "slots", "ms", f"times {first[0]} keys, {first[1]}^2 slots"),
         [(r["keys"], f"{r['slots']:,}", spread(r["seconds"]), f"{r['ratio']:.3f}")
          for r in results])
    return results


def layer(args):
    """One memory layer by number of tokens, against the plain baseline; and where its time goes"""
    width, device, rows, stages, results = SIZES["base"]["d_model"], args.device, [], [], []
    with torch.device(device):
        ours, half, plain = (kind(width, args.n_keys) for kind in (pkm.PKM, pkm.PKM, PlainPKM))
    for other in (half, plain):
        other.load_state_dict(ours.state_dict())
    half.values.to(torch.bfloat16)
    sparse_adam = torch.optim.SparseAdam(plain.values.parameters(), lr=1e-3)
    block = torch.empty(2, 2**26, device=device)
    copy = in_turn("copy", {0: lambda: block[0].copy_(block[1])}, args)[0]
    copy = 2 * block[0].nbytes / median(copy)  # bytes/s, read and written

    for tokens in args.tokens:
        x, grad = torch.randn(2, tokens, width, device=device)
        models = {"ours": ours, "bf16": half, "plain": plain}
        reads = tokens * ours.heads * ours.topk
        if not fits(f"plain baseline, {tokens} tokens", 12 * reads * width, device):
            del models["plain"]  # its gradient is a row a read, and is copied to be coalesced
        forward = in_turn(f"{tokens} tokens, forward", {
            name: quietly(args, model.eval(), x) for name, model in models.items()}, args, 3)
        parts = stage_times(args, ours, x)
        functions = training_phases("ours", ours, x, grad, lambda: ours.values.step(1e-3))
        if "plain" in models:
            functions |= training_phases("plain", plain, x, grad, sparse_adam.step)
        phases = in_turn(f"{tokens} tokens, training step", functions, args)
        steps = {name: [sum(part) for part in zip(*(seconds for (of, _), seconds in phases.items()
                                                    if of == name), strict=True)]
                 for name in models if name != "bf16"}
        parts |= {phase: phases["ours", phase] for phase in ("forward", "backward", "update")}
        faster = {"forward": times_as_long(forward, "plain", "ours"),
                  "bf16": times_as_long(forward, "plain", "bf16"),
                  "step": times_as_long(steps, "plain", "ours")} if "plain" in models else {}
        rows.append((tokens, *(spread(forward.get(name)) for name in ("ours", "bf16", "plain")),
                     faster.get("forward"), faster.get("bf16"),
                     spread(steps["ours"]), spread(steps.get("plain")), faster.get("step")))
        moved = bytes_moved(ours, x)
        for name, seconds in parts.items():
            rate = moved[name] / median(seconds) if name in moved else None
            stages.append((tokens, name, spread(seconds), rate and f"{moved[name] / 1e6:.0f}",
                           rate and f"{rate / 1e9:.1f}", rate and f"{rate / copy:.0%}"))
        results.append({"tokens": tokens, "times_faster": faster, "forward": forward,
                        "step": steps, "stages": parts, "bytes": moved, "copy": copy})
    show(("tokens", "forward, ms", "bf16 values", "plain", "times faster", "bf16",
          "training step, ms", "plain", "times faster"), rows)
    print(f"a copy moves {copy / 1e9:.1f} GB/s, read and written")
    show(("tokens", "stage", "ms", "MB", "GB/s", "of a copy"), stages)
    return results


@torch.no_grad()
def stage_times(args, memory, x):
    """{stage of inference: seconds}; candidates are what a search takes beyond its sub-keys."""
    query = memory.query_norm(memory.query(x))
    halves = query.view(len(x), *memory.keys.shape[:2], -1).permute(1, 2, 0, 3)
    found = memory.search(query)
    times = in_turn(f"{len(x)} tokens, stages", {
        "query": quietly(args, lambda: memory.query_norm(memory.query(x))),
        "sub-keys": quietly(args, lambda: pkm.topk(halves @ memory.keys.mT, memory.topk)),
        "candidates": quietly(args, memory.search, query),
        "values": quietly(args, memory.values, *found)}, args, 3)
    times["candidates"] = [max(0.0, a - b) for a, b in
                           zip(times["candidates"], times["sub-keys"], strict=True)]
    return times


def training_phases(name, memory, x, grad, update):
    """{(name, phase): function}, to be called in this order: the parts of a training step."""
    outputs = []

    def backward():
        outputs.pop().backward(grad)

    def updates():
        update()
        memory.zero_grad()

    return {(name, "forward"): lambda: outputs.append(memory.train()(x)),
            (name, "backward"): backward, (name, "update"): updates}


@torch.no_grad()
def bytes_moved(memory, x):
    """{stage: bytes}: tables and large tensors, each read or written once a pass over it."""
    slots, _ = memory.search(memory.query_norm(memory.query(x)))
    width, rows, row = memory.query.out_features, slots.unique().numel(), 4 * x.shape[1]
    scores = 4 * len(x) * 2 * memory.heads * memory.n_keys
    return {"query": 4 * len(x) * 3 * width + row * (len(x) + width),
            "sub-keys": 4 * len(x) * width + 4 * memory.keys.numel() + 2 * scores,
            "values": row * (slots.numel() + len(x)),
            "backward": row * (rows + len(x)) + 3 * scores,
            "update": row * (6 * rows + len(x))}  # values and two moments, in and out


def training_step(args, parameters, loss, tables=()):
    """A function: one training step, loss(), backward, clipping, fused AdamW, value tables."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    dense = [p for group in optimizer.param_groups for p in group["params"]]

    def step():
        with torch.autocast(args.device.type, args.dtype, enabled=args.dtype != torch.float32):
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(dense, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for table in tables:
            table.step(1e-3)
    return step


def masked(args, batch):
    """inputs, positions and labels of `batch` sequences of random words."""
    parts = mask_tokens(words(args, batch, args.length).cpu().numpy(), np.random.default_rng(0),
                        30522, (0, 100, 101, 102, 103), 103)
    return [part.to(args.device) for part in parts]


def train(args):
    """A pretraining step of plain BERT, +PKM and +ResM (the paper: 2.8 and 5.1 days)"""
    models, steps, rows, results, device = {}, {}, [], [], args.device
    for system in args.systems:
        models[system] = build(MaskedLM, args.size, system, device, args.n_keys, args.dropout)
        for n, values in value_tables(models.get("+PKM", models[system])).items():
            models[system].bert.layers[n - 1].memory.values = values  # shared, so that all fit
    batch = args.batch_size or (8 if device.type == "cpu" else 128)
    while not steps:
        torch.compiler.reset()  # or a second batch size would be compiled as a dynamic one
        for model in models.values():
            model.zero_grad(set_to_none=True)
            for values in value_tables(model).values():
                values.reads.clear()
        data = masked(args, batch)
        for system, model in models.items():
            fast = torch.compile(model) if args.compile else model
            steps[system] = training_step(
                args, optimizer_groups(model, 0.01), lambda fast=fast, data=data: fast(*data),
                value_tables(model).values())
        try:
            times = in_turn(f"{batch} x {args.length} tokens", steps, args)
        except torch.OutOfMemoryError:
            batch, steps = batch // 2, {}
            if not batch:
                raise
    for system, seconds in times.items():
        model, rate = models[system], batch * args.length / median(seconds)
        peak = peak_flops(device) if args.dtype != torch.float32 else None
        mfu = peak and rate * flops_per_token(model, args.length) / peak
        used = peak_bytes(steps[system], device, alone=len(models) == 1)
        longer = times_as_long(times, system, "plain") if "plain" in times else None
        count = sum(p.numel() for p in model.parameters())
        rows.append((f"{args.size} {system}", f"{count / 1e6:.1f}", spread(seconds), f"{rate:,.0f}",
                     mfu and f"{mfu:.1%}", used and used / 1e9, longer and f"{longer:.3f}",
                     1.82 if SYSTEMS[system] else None))
        results.append({"model": f"{args.size} {system}", "parameters": count,
                        "tokens": batch * args.length, "seconds": seconds, "mfu": mfu,
                        "peak_bytes": used, "times_plain": longer})
    show(("model", "M parameters", f"ms, {batch} x {args.length} tokens", "tokens/s", "MFU",
          "peak GB", "times plain", "paper's"), rows)
    return results


def peak_bytes(step, device, alone):
    """Peak memory of a training process, None where another model lives in it too."""
    if not alone:
        return None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024)


def against_transformers(args):
    """Ours and Hugging Face's BERT in turn: classification at batch size 1, an MLM training step"""
    transformers = need("transformers", "a comparison with it")
    size, results = SIZES[args.size], []
    config = transformers.BertConfig(
        hidden_size=size["d_model"], num_hidden_layers=size["n_layer"],
        num_attention_heads=size["n_head"], intermediate_size=size["d_ff"],
        hidden_dropout_prob=args.dropout, attention_probs_dropout_prob=args.dropout)

    def compare(what, ours, theirs, more=1):
        times = in_turn(what, {"ours": ours, "theirs": theirs}, args, more)
        results.append({"what": what, **times, "ratio": times_as_long(times, "theirs", "ours")})

    with torch.device(args.device):
        theirs = transformers.BertForSequenceClassification(config).eval()
    ours = build(Classifier, args.size, "plain", args.device).eval()
    for length in args.lengths:
        ids = words(args, 1, length)
        compare(f"inference, 1 x {length}", quietly(args, ours, ids), quietly(args, theirs, ids), 9)
    with torch.device(args.device):
        theirs = transformers.BertForMaskedLM(config).train()
    ours = build(MaskedLM, args.size, "plain", args.device, dropout=args.dropout)
    batch = args.batch_size or 8
    inputs, positions, labels = masked(args, batch)
    everywhere = torch.full_like(inputs, -100).scatter(1, positions, labels)
    compare(f"MLM training step, {batch} x {args.length}, dropout {args.dropout}", training_step(
        args, optimizer_groups(ours, 0.01), lambda: ours(inputs, positions, labels)), training_step(
        args, theirs.parameters(), lambda: theirs(inputs, labels=everywhere).loss))
    show((f"BERT {args.size}", "ours, ms", f"transformers {transformers.__version__}, ms",
          "throughput, ours / theirs"),
         [(r["what"], spread(r["ours"]), spread(r["theirs"]), r["ratio"]) for r in results])
    return results


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    options = {}
    for function in (inference, layer, train, against_transformers):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.set_defaults(call=function)
        command.add_argument("--device", default="auto", help="cuda, mps or cpu")
        command.add_argument("--dtype", default="auto", help="float32; of training on CUDA bfloat16")
        command.add_argument("--rounds", type=whole, default=7, help="timed, after two of warm-up")
        command.add_argument("--out", metavar="results/NAME.json", help="keep the JSON line there")
        command.add_argument("--keep_freed", action="store_true",
                             help="keep freed memory as pretrain.py does; train always does")
        options[function.__name__] = command.add_argument
    for name in ("inference", "layer", "train"):
        options[name]("--n_keys", type=side, default=512, help="n_keys^2 slots")
    for name in ("inference", "train"):
        options[name]("--compile", action="store_true", help="on CUDA it is always on")
    for name in ("inference", "against_transformers"):
        options[name]("--lengths", type=whole, nargs="+", default=[128, 512])
    option = options["inference"]
    option("--sizes", nargs="+", choices=list(SIZES), default=["base", "large"])
    option("--values_dtype", choices=["float32", "bfloat16"], default="float32")
    option("--slots", type=side, nargs="*", metavar="N", help="latency at N^2 slots, also with "
           "flat keys, instead (64 128 256 512 1024)")
    options["layer"]("--tokens", type=whole, nargs="+",
                     default=[128, 512, 2048, 8192, 32768, 65536])
    for name in ("train", "against_transformers"):
        options[name]("--size", choices=list(SIZES), default="base")
        options[name]("--length", type=whole, default=512, help="tokens a sequence")
        options[name]("--batch_size", type=whole, help="sequences (8; train on CUDA: fits)")
        options[name]("--dropout", type=float, default=0.1)
    options["train"]("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))

    argv = sys.argv[1:]
    if not argv or argv[0].startswith("--") and argv[0] != "--help":
        argv = ["inference", *argv]
    args = parser.parse_args(argv)
    if args.command in ("inference", "layer") and args.dtype == "auto":
        args.dtype = "float32"  # as the paper; autocast would cast all weights for every batch
    args.device, args.dtype = setup(args.device, args.dtype)
    if args.command == "layer" and args.dtype != torch.float32:
        raise UserError(f"dtype = {args.dtype}: a memory works in float32, under autocast too")
    if args.dtype == torch.float16 and args.command in ("train", "against_transformers"):
        raise UserError("dtype = 'float16': training is timed in float32 and bfloat16")
    if args.keep_freed or args.command == "train":
        keep_freed_memory(args.device)
    args.compile = args.device.type == "cuda" or getattr(args, "compile", False)
    facts = {"command": shlex.join(["python", "bench.py", *argv]), "machine": machine(args.device),
             "torch": torch.__version__, "dtype": str(args.dtype)[6:], "rounds": args.rounds}
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    line = json.dumps({**facts, "results": args.call(args)})
    if args.out:
        with atomic(args.out) as temporary:
            temporary.write_text(line + "\n")
    print(line)


def side(text):
    """Of the square of slots: a head reads 32."""
    return whole(text, least=32)


if __name__ == "__main__":
    run(main)
