"""
Speed, measured as the paper did, beside honest baselines in the same run.

$ python bench.py                          # Table 1: batches/s of a classifier at batch size 1
$ python bench.py inference --slots        # latency by number of slots, product and flat keys
$ python bench.py layer                    # one memory layer, stage by stage
$ python bench.py train                    # a pretraining step of base, +PKM and +ResM; torchrun
$ python bench.py causal                   # 12 layers, 24, and 12 with a memory (Lample et al.)
$ python bench.py causal --slots           # latency of the last by number of slots
$ python bench.py against_transformers     # ours and Hugging Face's, in turn

What is compared is timed in turn, in one process: figures are medians with [lowest, highest],
ratios medians over the rounds. The last line is JSON; --out results/NAME.json keeps it.
"""
import functools
import itertools
import json
import os
import platform
import resource
import sys
import time
from statistics import median

import numpy as np
import torch
from torch import nn

import pkm
from lib.common.device import choose_device, keep_freed_memory
from lib.common.errors import UserError, need, out_of_memory
from lib.common.files import write_text
from lib.common.progress import Progress, markdown
from lib.common.settings import Parser, whole_number
from lib.common.torchrun import first_rank
from lib.corpus.batches import mask_tokens
from lib.corpus.vocabulary import Specials
from lib.distributed.gradients import distribute, sum_gradients
from lib.distributed.processes import get_world_size, is_distributed, run_ranks
from lib.distributed.sharded_values import count_parameters
from lib.training.flops import flops_per_token, peak_flops
from lib.training.trainer import optimizer_groups, to_device
from lib.weights.checkpoint import check_objective, read_weights
from model import SIZES, BertConfig, Classifier, MaskedLM, value_tables

SYSTEMS = {"plain": {}, "+PKM": {"alpha": 0.0}, "+ResM": {"alpha": 1.0}}
LAYERS = {"base": (4, 8), "large": (8, 16), "distil": (2, 4), "demo": (2, 3)}
TABLE_1 = {"base +PKM": 61.4 / 79.8, "base +ResM": 59.3 / 79.8,  # batches/s by those of plain
           "large +PKM": 37.2 / 43.1, "large +ResM": 36.1 / 43.1}


class PlainPKM(pkm.PKM):
    """The memory as it is usually written, which every ratio is against: all k * k sums and slots
    of a head, nn.EmbeddingBag with a sparse gradient. Its state dict is pkm.PKM's."""

    def __init__(self, *sizes, **more):
        super().__init__(*sizes, **more)
        self.values = nn.EmbeddingBag.from_pretrained(
            self.values.weight.detach(), freeze=False, mode="sum", sparse=True)

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
    """A memory with a whole key for every slot, all of them compared: what product keys avoid."""

    def __init__(self, d_model, n_keys=512, heads=4, topk=32, key_dim=256):
        super().__init__(d_model, n_keys, heads, topk, key_dim)
        self.keys = nn.Parameter(torch.empty(heads, n_keys**2, key_dim))
        nn.init.uniform_(self.keys, -key_dim**-0.5, key_dim**-0.5)

    def search(self, query):
        query = query.view(len(query), len(self.keys), -1).transpose(0, 1)
        score, slots = (query @ self.keys.mT).topk(self.topk)  # (heads, tokens, topk)
        return slots.transpose(0, 1), score.softmax(2).transpose(0, 1)


def in_turn(what, functions, args, more=1, warmup=2):
    """Time {name: function} in turn, so that a busy moment of the machine slows all of them.
    Returns {name: seconds of each of `more` times --rounds calls}. The `warmup` rounds, which
    compile, are not in them; their time is printed."""
    synchronize = getattr(torch, args.device.type).synchronize
    times = {name: [] for name in functions}
    for _ in Progress(range(warmup + more * args.rounds), what):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            times[name].append(time.perf_counter() - start)
    if first_rank():
        print(f"{what}: warm-up "
              f"{sum(sum(seconds[:warmup]) for seconds in times.values()):.1f} s", file=sys.stderr)
    return {name: seconds[warmup:] for name, seconds in times.items()}


def ratio(times, name, base):
    """How many times as long `name` takes as `base`, the median over the rounds; None where one of
    them was not timed."""
    if name in times and base in times:
        return median(a / b for a, b in zip(times[name], times[base], strict=True))


def show(records):
    """Print records as tables, one for each set of keys. Times, lists of seconds, are in them as
    median [lowest, highest]."""
    def text(value):
        if isinstance(value, list):
            times = (1e3 * seconds for seconds in (median(value), min(value), max(value)))
            return "{:.4g} [{:.4g}, {:.4g}] ms".format(*times)
        form = {int: "{:,}", float: "{:.4g}"}.get(type(value))
        return form.format(value) if form else value

    for keys, group in itertools.groupby(records, key=list):
        header = [key.replace("_", " ") for key in keys]
        print(markdown(header, [map(text, record.values()) for record in group]))


def proc(file, key):
    """The value of the first `key` in /proc/<file>; None where there is none, as on macOS."""
    if os.path.exists(f"/proc/{file}"):
        with open(f"/proc/{file}") as lines:
            return next((line.split(":")[1].strip() for line in lines if key in line), None)


def fits(what, size, device):
    """Whether `size` bytes are free on the device, as far as is known; if not, print that `what`
    is skipped."""
    available = proc("meminfo", "MemAvailable") or "inf"
    free = 1024 * float(available.split()[0])
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    if size > 0.9 * free:
        print(f"skipped: {what}, {size / 1e9:.1f} GB, as {free / 1e9:.1f} GB are free")
    return size <= 0.9 * free


def build(head, size, system, device, n_keys=512, dropout=0.0):
    """A model with random weights."""
    config = BertConfig(**SIZES[size], **SYSTEMS[system], dropout=dropout, n_keys=n_keys,
                        memory_layers=LAYERS[size] if SYSTEMS[system] else ())
    with torch.device(device):
        return head(config, 2) if head is Classifier else head(config)


@torch.no_grad()
def inference(args):
    """Table 1: batches/s of a classification model at batch size 1"""
    if args.slots is not None:
        model = build(Classifier, "base", "+ResM", args.device, n_keys=32).eval()
        ids = torch.randint(1000, 30000, (1, args.lengths[0]), device=args.device)
        return by_slots(args, model, functools.partial(model, ids), (pkm.PKM, FlatPKM))
    modes, results = {"eager": lambda model: model}, []
    if args.compile:
        modes["compiled"] = torch.compile
        if args.device.type == "cuda":
            modes["graphs"] = functools.partial(torch.compile, mode="reduce-overhead")
    for size in args.sizes:
        models, parameters = {}, {}
        for system in SYSTEMS:
            shapes = build(Classifier, size, system, "meta", args.n_keys)
            parameters[system] = sum(p.numel() for p in shapes.parameters())
            if fits(f"{size} {system}", 4 * parameters[system], args.device):
                models[system] = build(Classifier, size, system, args.device, args.n_keys).eval()
                for table in value_tables(models[system]).values():
                    table.to(getattr(torch, args.values_dtype))
        for length in args.lengths:
            ids = torch.randint(1000, 30000, (1, length), device=args.device)
            torch.compiler.reset()  # or what was compiled before counts towards its limit
            times = in_turn(f"{size}, {length} tokens", {
                (system, mode): args.autocast(functools.partial(compiled(model), ids))
                for system, model in models.items() for mode, compiled in modes.items()},
                args, more=5, warmup=3)
            for (system, mode), seconds in times.items():
                name, speed = f"{size} {system}", ratio(times, ("plain", mode), (system, mode))
                results.append({"model": name, "parameters": parameters[system], "length": length,
                                "mode": mode, "seconds": seconds, "batches/s": 1 / median(seconds),
                                "ratio_to_plain": speed, "paper's_ratio": TABLE_1.get(name)})
    return results


def by_slots(args, model, run, kinds):
    """The poster's last figure: latency of run(), which calls the model, with n_keys^2 slots, by
    product and by flat keys."""
    length, functions = args.lengths[0], {}
    layers = [layer for layer in model.bert.layers if layer.beta]
    if not layers:
        raise UserError("--slots: the last model has no memory")

    @args.autocast
    def run_with(memory):
        for layer in layers:  # the same one in all of them, so that more slots fit
            layer.memory = memory
        run()

    for kind, n in itertools.product(kinds, args.slots or [64, 128, 256, 512, 1024]):
        name, row = "product", model.bert.config.d_model
        if kind is FlatPKM:
            name, row = "flat", row + 4 * (256 + length)  # 4 heads: key and scores of a slot
        if fits(f"{n}^2 slots with {name} keys", 4 * n**2 * row, args.device):
            with torch.device(args.device):
                memory = kind(model.bert.config.d_model, n).eval()
            memory.values.to(getattr(torch, args.values_dtype))
            functions[name, n] = functools.partial(run_with, memory)
    times = in_turn("slots", functions, args, more=3)
    return [{"keys": name, "slots": n * n, "seconds": seconds,
             "times_the_first": ratio(times, (name, n), next(iter(times)))}
            for (name, n), seconds in times.items()]


def causal(args):
    """The next token after a text, and a training step, of n layers, 2n, and n with a memory"""
    shared = {**SIZES[args.size], "causal": True, "dropout": args.dropout, "n_keys": args.n_keys}
    n = args.layers
    systems = {f"{n} layers": {"n_layer": n}, f"{2 * n} layers": {"n_layer": 2 * n},
               f"{n} layers, memory": {"n_layer": n, "memory_layers": (n // 2,)}}
    configs = {name: BertConfig(**{**shared, **system}) for name, system in systems.items()}
    saved = {run: read_weights(run)["config"] for run in args.runs or ()}
    for run, config in saved.items():
        check_objective(run, config, causal=True)
    if saved:
        configs = {run: BertConfig(**config) for run, config in saved.items()}
    with torch.device(args.device):
        models = {name: MaskedLM(config) for name, config in configs.items()}
    (first, second, *_), results = [*models, None], []

    def text(batch, length):
        size = min(config.vocab_size for config in configs.values())
        return torch.randint(5, size, (batch, length), device=args.device)

    def add(what, times):
        results.extend({
            "what": what, "model": name, "parameters": sum(p.numel() for p in model.parameters()),
            "seconds": times[name], "times_the_first": ratio(times, name, first),
            "times_the_second": ratio(times, name, second)} for name, model in models.items())

    runs = {name: torch.compile(m) if args.compile else m for name, m in models.items()}
    with torch.no_grad():
        for length in args.lengths:
            last = torch.tensor([[length - 1]], device=args.device)
            calls = {name: args.autocast(functools.partial(
                run.eval(), text(1, length), positions=last)) for name, run in runs.items()}
            if args.slots is not None:
                _, call = calls.popitem()
                return by_slots(args, models.popitem()[1], call, [pkm.PKM])
            add(f"inference, 1 x {length}", in_turn(f"1 x {length}", calls, args, more=5))
    ids, steps = text(args.batch_size or 8, args.length + 1), {}
    for name, run in runs.items():
        steps[name] = training_step(
            args, optimizer_groups(models[name], 0.01),
            pkm.LazyAdam(value_tables(models[name]).values()),
            functools.partial(run.train(), ids[:, :-1], labels=ids[:, 1:]))
    what = f"{len(ids)} x {args.length}"
    add(f"training step, {what}", in_turn(what, steps, args))
    return results


def layer(args):
    """One memory layer by number of tokens, against the plain baseline; and where its time goes"""
    width, device, results, stages = SIZES["base"]["d_model"], args.device, [], []
    with torch.device(device):
        ours, bf16, plain = (kind(width, args.n_keys) for kind in (pkm.PKM, pkm.PKM, PlainPKM))
    for other in (bf16, plain):
        other.load_state_dict(ours.state_dict())
    bf16.values.to(torch.bfloat16)
    optimizers = {"ours": pkm.LazyAdam([ours.values]),
                  "plain": torch.optim.SparseAdam(plain.values.parameters(), lr=1e-3)}
    block = torch.empty(2, 2**26, device=device)
    copy = in_turn("copy", {"copy": lambda: block[0].copy_(block[1])}, args)["copy"]
    copied = 2 * block[0].nbytes  # bytes, read and written

    for tokens in args.tokens:
        x, grad = torch.randn(2, tokens, width, device=device)
        models, functions = {"ours": ours, "bf16": bf16, "plain": plain}, {}
        reads = tokens * ours.heads * ours.topk
        if not fits(f"plain baseline, {tokens} tokens", 12 * reads * width, device):
            del models["plain"]  # its gradient has a row for every read, and a copy to coalesce it
        with torch.no_grad():
            forward = in_turn(f"{tokens} tokens, forward", {
                name: functools.partial(model.eval(), x) for name, model in models.items()},
                args, more=3)
        seconds, moved = stage_times(args, ours, x)
        moved["copy"] = copied
        for name in [name for name in optimizers if name in models]:
            functions |= training_phases(name, models[name], x, grad, optimizers[name])
        phases, steps = in_turn(f"{tokens} tokens, training step", functions, args), {}
        for (name, phase), times in phases.items():
            steps[name] = np.add(steps.get(name, 0), times).tolist()  # the sum of the phases
            seconds |= {phase: times} if name == "ours" else {}
        results.append({
            "tokens": tokens, **{f"forward_{name}": times for name, times in forward.items()},
            "times_faster": ratio(forward, "plain", "ours"),
            "bf16_times_faster": ratio(forward, "plain", "bf16"),
            **{f"step_{name}": times for name, times in steps.items()},
            "step_times_faster": ratio(steps, "plain", "ours")})
        for name, times in {"copy": copy, **seconds}.items():
            rate = moved[name] / median(times) if name in moved else None
            stages.append({"tokens": tokens, "stage": name, "seconds": times,
                           "bytes": moved.get(name), "GB/s": rate and rate / 1e9,
                           "of_a_copy": rate and rate * median(copy) / copied})
    return results + stages


@torch.no_grad()
def stage_times(args, memory, x):
    """{stage of inference: seconds}, and {stage, of training too: bytes}: tables and large tensors,
    each read or written once a pass over it. What the search takes beyond the sub-keys' top k is
    `candidates`."""
    query = memory.query_norm(memory.query(x))
    halves = query.view(len(x), *memory.keys.shape[:2], -1).permute(1, 2, 0, 3)
    slots, weights = memory.search(query)
    times = in_turn(f"{len(x)} tokens, stages", {
        "query": lambda: memory.query_norm(memory.query(x)),
        "sub-keys": lambda: (halves @ memory.keys.mT).topk(memory.topk),
        "candidates": lambda: memory.search(query),
        "values": lambda: memory.values(slots, weights)}, args, more=3)
    times["candidates"] = np.subtract(times["candidates"], times["sub-keys"]).clip(0).tolist()
    width, rows, row = memory.query.out_features, slots.unique().numel(), 4 * x.shape[1]
    scores = 4 * len(x) * 2 * memory.heads * memory.n_keys
    return times, {"query": 4 * len(x) * 3 * width + row * (len(x) + width),
                   "sub-keys": 4 * len(x) * width + 4 * memory.keys.numel() + 2 * scores,
                   "values": row * (slots.numel() + len(x)),
                   "backward": row * (rows + len(x)) + 3 * scores,
                   "update": row * (6 * rows + len(x))}  # values and two moments, in and out


def training_phases(name, memory, x, grad, optimizer):
    """{(name, phase): function}, to be called in this order: the parts of a training step."""
    outputs = []

    def update():
        optimizer.step()
        optimizer.zero_grad()
        memory.zero_grad()

    return {(name, "forward"): lambda: outputs.append(memory.train()(x)),
            (name, "backward"): lambda: outputs.pop().backward(grad), (name, "update"): update}


def training_step(args, parameters, values, loss, model=None):
    """A function that does one training step: loss(), backward, clipping, fused AdamW of the
    parameters, and the step of `values`, a LazyAdam. Of a `model` torchrun's processes add up the
    gradients."""
    dense = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    clipped = [p for group in dense.param_groups for p in group["params"]]

    def step():
        with args.autocast:
            value = loss()
        value.backward()
        if model:
            sum_gradients(model, value.detach(), count=1)
        torch.nn.utils.clip_grad_norm_(clipped, 1.0)
        for optimizer in (dense, values):
            optimizer.step()
            optimizer.zero_grad()
    return step


def masked_batch(args, batch):
    """ids, positions and labels of `batch` sequences of random tokens, by name."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1000, 30000, (batch, args.length))
    batch = mask_tokens(ids, rng, 30522, Specials(0, 100, 101, 102, 103))
    return to_device(batch, args.device)


def train(args):
    """A pretraining step of plain BERT, +PKM and +ResM (the paper: 2.8 and 5.1 days)"""
    models, tables = {}, {}
    for system in args.systems:
        models[system] = build(MaskedLM, args.size, system, args.device, args.n_keys, args.dropout)
        distribute(models[system])
        tables = tables or value_tables(models[system])
        if SYSTEMS[system]:
            for n, table in tables.items():  # shared, so that all systems fit
                models[system].bert.layers[n - 1].memory.values = table
    values = pkm.LazyAdam(tables.values())
    batch, times = args.batch_size or (8 if args.device.type == "cpu" else 128), {}
    while not times:
        torch.compiler.reset()  # or a second batch size would be compiled as a dynamic one
        data, steps = masked_batch(args, batch), {}
        for system, model in models.items():
            model.zero_grad()
            loss = functools.partial(torch.compile(model) if args.compile else model, **data)
            steps[system] = training_step(args, optimizer_groups(model, 0.01), values, loss, model)
        try:
            times = in_turn(f"{batch} x {args.length} tokens", steps, args)
        except RuntimeError as error:
            if not out_of_memory(error) or batch == 1 or is_distributed():
                raise
            values.zero_grad()
            batch //= 2
    results = []
    for system, seconds in times.items():
        tokens = get_world_size() * batch * args.length
        rate = tokens / median(seconds)
        peak = peak_flops(args.device) if args.dtype != torch.float32 else None
        results.append({
            "model": f"{args.size} {system}", "batch": get_world_size() * batch, "tokens": tokens,
            "parameters": count_parameters(models[system]),
            "seconds": seconds, "tokens/s": round(rate),
            "mfu": peak and rate / get_world_size() / peak * flops_per_token(
                models[system], args.length),
            "peak_bytes": peak_bytes(steps[system], args.device) if len(models) == 1 else None,
            "times_plain": ratio(times, system, "plain"),
            "paper's": 1.82 if SYSTEMS[system] else None})
    return results


def peak_bytes(step, device):
    """Peak memory of a training process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


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
        results.append({"model": f"BERT {args.size}", "what": what, **times,
                        "throughput_ratio": ratio(times, "theirs", "ours"),
                        "their_version": transformers.__version__})

    with torch.device(args.device):
        theirs = transformers.BertForSequenceClassification(config).eval()
    models = build(Classifier, args.size, "plain", args.device).eval(), theirs
    for length in args.lengths:
        ids = torch.randint(1000, 30000, (1, length), device=args.device)
        with torch.no_grad():
            compare(f"inference, 1 x {length}", *(
                args.autocast(functools.partial(model, ids)) for model in models), more=9)
    with torch.device(args.device):
        theirs = transformers.BertForMaskedLM(config).train()
    ours = build(MaskedLM, args.size, "plain", args.device, dropout=args.dropout)
    batch, no_tables = args.batch_size or 8, pkm.LazyAdam([])
    data = masked_batch(args, batch)
    everywhere = torch.full_like(data["ids"], -100).scatter(1, data["positions"], data["labels"])
    compare(f"MLM training step, {batch} x {args.length}, dropout {args.dropout}",
            training_step(args, optimizer_groups(ours, 0.01), no_tables, lambda: ours(**data)),
            training_step(args, theirs.parameters(), no_tables,
                          lambda: theirs(data["ids"], labels=everywhere).loss))
    return results


def main():
    parser = Parser(description=__doc__)
    option = parser.commands(inference, layer, train, causal, against_transformers)
    whole = whole_number
    n_keys = functools.partial(whole, least=32)  # the topk of a head
    every = "inference layer train causal against_transformers"
    option(every, "--device", default="auto", help="cuda, mps or cpu")
    option("inference", "--dtype", default="float32", help="(float32, as in the paper)")
    option("layer", "--dtype", choices=["float32"], default="float32")
    option("train causal against_transformers", "--dtype", choices=["auto", "float32", "bfloat16"],
           default="auto", help="(bfloat16 on CUDA)")
    option(every, "--rounds", type=whole, default=7, help="timed, after two of warm-up")
    option(every, "--out", metavar="results/NAME.json", help="keep the JSON line there")
    option(every, "--keep_freed", action="store_true",
           help="keep freed memory as pretrain.py does; train and causal always do")
    option("inference layer train causal", "--n_keys", type=n_keys, default=512,
           help="n_keys^2 slots")
    option("inference train causal", "--compile", action="store_true",
           help="on CUDA it is always on")
    option("inference causal against_transformers", "--lengths", type=whole, nargs="+",
           default=[128, 512])
    option("inference", "--sizes", nargs="+", choices=list(SIZES), default=["base", "large"])
    option("inference causal", "--values_dtype", choices=["float32", "bfloat16"], default="float32")
    option("inference causal", "--slots", type=n_keys, nargs="*", metavar="N", help="instead: "
           "latency at N^2 slots, with product and with flat keys (64 128 256 512 1024)")
    option("causal", "--layers", type=functools.partial(whole, least=2), default=12)
    option("causal", "--runs", nargs="+", metavar="RUN", help="instead: the models of these runs")
    option("layer", "--tokens", type=whole, nargs="+", default=[128, 512, 2048, 8192, 32768, 65536])
    steps = "train causal against_transformers"
    option(steps, "--size", choices=list(SIZES), default="base")
    option(steps, "--length", type=whole, default=512, help="tokens a sequence")
    option(steps, "--batch_size", type=whole, help="sequences (8; train on CUDA: fits)")
    option(steps, "--dropout", type=float, default=0.1)
    option("train", "--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.set_defaults(compile=False)

    argv = sys.argv[1:]
    if not argv or argv[0].startswith("--") and argv[0] != "--help":
        argv = ["inference", *argv]
    args = parser.parse_args(argv)
    if is_distributed() and args.command != "train":
        raise UserError(f"{args.command}: one process does it: python bench.py; torchrun is for "
                        "train")
    args.device, args.dtype, line = choose_device(args.device, args.dtype)
    print(line)
    torch.manual_seed(0)
    if args.dtype == torch.float16 and args.command in ("train", "causal", "against_transformers"):
        raise UserError("dtype = 'float16': training is timed in float32 and bfloat16")
    args.autocast = torch.autocast(args.device.type, args.dtype, args.dtype != torch.float32)
    if args.keep_freed or args.command in ("train", "causal"):
        keep_freed_memory(args.device)
    args.compile |= args.device.type == "cuda"
    if args.device.type == "cuda":
        machine = torch.cuda.get_device_name(args.device)
    else:
        cpu = proc("cpuinfo", "model name") or platform.machine()
        machine = f"{cpu}, {torch.get_num_threads()} threads"
    if is_distributed():
        machine += f", {get_world_size()} ranks"
    facts = {"command": " ".join(["python bench.py", *argv]), "machine": machine,
             "waiting": os.environ.get("OMP_WAIT_POLICY", "default"), "torch": torch.__version__,
             "dtype": str(args.dtype)[6:], "rounds": args.rounds}
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    results = args.call(args)
    show(results)
    line = json.dumps({**facts, "results": results})
    if args.out:
        write_text(args.out, line + "\n")
    print(line)


if __name__ == "__main__":
    run_ranks(main)
