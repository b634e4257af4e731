"""
Time models, beside honest baselines in the same run.

$ python bench.py                           # Table 1: batches/s of a classifier at batch size 1
$ python bench.py layer                     # one memory layer: forward, training step
$ python bench.py train                     # a training step of base, base_pkm and base_resm
$ python bench.py train configs/demo.py     # a training step of other configs
$ python bench.py causal                    # 12 layers, 24, and 12 with PKM or ResM (Lample et al.)
$ python bench.py causal --slots            # the last model: product keys and flat keys, by size

The paper's Table 1 is of one V100, and names neither length nor precision: --lengths and --dtype
are our reading. On CUDA the models run twice, eager and compiled with CUDA graphs. The paper's
numbers of parameters fit "mlm_parameters": those with a masked-LM head, not the timed classifier.

A table shows the median time with [lowest, highest], and its ratio to a baseline: the median over
the rounds. The last line is JSON. All weights and tokens are random.

`train` takes settings as pretrain.py does. On a CPU time a small step: --accumulation=1
--batch_size=2. "What" shows its micro-batches x sequences x tokens. "Hours" are the time of
max_steps steps, without evaluations. If the timed batch is smaller than the config's, they are
scaled up, which is too much: a larger batch takes less time a token. "Peak bytes" are the memory
of the first rank's process; on a CPU they never fall.
"""
import copy
import itertools
import json
import os
import platform
import re
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import pkm
from lib import ranks, training
from lib.corpus import MASKED, Corpus
from lib.device import autocast, set_up_device, wants_compile
from lib.files import markdown
from lib.settings import Parser, Progress, at_least, load_settings
from lib.weights import check_objective, check_sizes, memory_settings, read_weights
from model import build_model
from pkm import LazyAdam
from pretrain import Settings, bert_config, check_fit, inherit

TRAINED = ["configs/base.py", "configs/base_pkm.py", "configs/base_resm.py"]
CAUSAL = ["configs/causal_12.py", "configs/causal_24.py", "configs/causal_12_pkm.py",
          "configs/causal_12_memory.py"]


class PlainPKM(pkm.PKM):
    """The baseline: a memory as it is usually written, for values whose weight has a gradient."""

    def forward(self, x):
        """Read the memory. x: (tokens, d_model). Returns the same shape."""
        query = self.query_norm(self.query(x)).view(len(x), self.heads, 2, -1)
        scores = torch.einsum("thsd,hskd->sthk", query, self.keys)  # s: the half
        (first, second), (i, j) = scores.topk(self.topk)
        sums = (first[..., :, None] + second[..., None, :]).flatten(2)  # (tokens, heads, topk^2)
        slots = (i[..., :, None] * self.n_keys + j[..., None, :]).flatten(2)
        best, winners = sums.topk(self.topk)
        slots = slots.gather(2, winners).flatten(1)
        weights = best.softmax(2).flatten(1)
        return F.embedding_bag(slots, self.values.weight, per_sample_weights=weights, mode="sum",
                               sparse=True)


class FlatPKM(pkm.PKM):
    """The baseline with flat keys: each head has a key for every slot of the ValueTable."""

    def __init__(self, values, d_model, heads, topk, key_dim):
        super().__init__(d_model, topk, heads, topk, key_dim)
        self.keys = nn.Parameter(torch.randn(heads, len(values.weight), key_dim))
        self.values = values

    def search(self, query):
        """Score all slots. query: (tokens, heads * key_dim). Returns what PKM.search() does."""
        query = query.view(len(query), self.heads, -1).unbind(1)
        # a head at a time, for (tokens, slots) scores are large
        found = [(q @ keys.T).topk(self.topk) for q, keys in zip(query, self.keys)]
        best, slots = (torch.stack(parts, 1) for parts in zip(*found))  # (tokens, heads, topk)
        return slots.int(), best.softmax(2)


def config_of(path, *changes):
    """Read a config, and make its BertConfig. UserError as in pretrain.py."""
    settings = load_settings(Settings, [path, *changes])
    config = bert_config(settings)
    check_fit(settings, config)
    return config


def build(args, config, head=None):
    """Build the model of a BertConfig, with random weights."""
    with torch.device(args.device):
        return build_model(config, head, labels=("no", "yes"))


def forward(args, model, x, compiled=False, **more):
    """Make a function that calls the model in evaluation mode, without gradients."""
    model.eval()
    if compiled:
        model = torch.compile(model, mode="reduce-overhead")  # on CUDA with graphs

    @torch.no_grad()
    def call():
        with autocast(args.device, args.dtype):
            model(x, **more)
    return call


def time_inference(args, models, bases):
    """Time {name: model} at batch size 1, by length. A causal model predicts the next token."""
    results = []
    for length, compiled in itertools.product(args.lengths, args.modes):
        torch.compiler.reset()  # it compiles only so many versions
        ids = torch.randint(1000, (1, length), device=args.device)  # in any vocabulary
        last = torch.tensor([[length - 1]], device=args.device)
        calls = {}
        for name, model in models.items():
            more = {"positions": last} if model.bert.config.causal else {}
            calls[name] = forward(args, model, ids, compiled, **more)
        what = f"inference, 1 x {length}"
        for record in time_in_turn(what, calls, args.device, 5 * args.rounds, bases=bases):
            record["parameters"] = training.count_parameters(models[record["system"]])
            record["compiled"] = compiled
            results.append(record)
    return results


def inference(args):
    """Time a classifier at batch size 1: Table 1."""
    results = []
    for size in args.sizes:
        models, mlm_parameters = {}, {}
        for system, suffix in ("", ""), (" +PKM", "_pkm"), (" +ResM", "_resm"):
            config = config_of(f"configs/{size}{suffix}.py", f"--seq_len={max(args.lengths)}")
            models[size + system] = build(args, config, "classifier")
            with torch.device("meta"):
                mlm_parameters[size + system] = training.count_parameters(build_model(config))
        for record in time_inference(args, models, bases=1):
            record["mlm_parameters"] = mlm_parameters[record["system"]]
            record["batches/s"] = 1 / median(record["seconds"])
            record["relative_batches/s"] = 1 / record[f"times_{size}"]
            results.append(record)
    return results


def layer(args):
    """Time one memory layer by number of tokens, beside the plain baseline."""
    with torch.device(args.device):
        plain = PlainPKM(768, args.keys)
        ours = pkm.PKM(768, args.keys)
    ours.load_state_dict(plain.state_dict())
    sparse_adam = torch.optim.SparseAdam([plain.values.weight.requires_grad_()])
    lazy_adam = LazyAdam([ours.values])

    def update(memory, optimizer):
        memory.train()(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad()
        memory.zero_grad()

    results = []
    for tokens in args.lengths:
        x, grad = torch.randn(2, tokens, 768, device=args.device)
        calls = {"plain": forward(args, plain, x), "ours": forward(args, ours, x)}
        results += time_in_turn(f"{tokens} tokens, forward", calls, args.device, args.rounds)
        calls = {"plain": partial(update, plain, sparse_adam),
                 "ours": partial(update, ours, lazy_adam)}
        results += time_in_turn(f"{tokens} tokens, training step", calls, args.device, args.rounds)
    return results


def train(args):
    """Time a training step of each config, and compare it with the first."""
    results = [time_config(args, path) for path in args.configs or TRAINED]
    first = median(results[0]["seconds"])
    for record in results:
        record["times_the_first"] = median(record["seconds"]) / first
    return results


def time_config(args, path):
    """Time a training step of a config, as pretrain.py and finetune.py make it."""
    settings, initial = load_settings(Settings, [path, *args.settings]), None
    if settings.init_from and not settings.model:
        initial = read_weights(settings.init_from)["config"]
    memory = memory_settings(initial)
    settings = inherit(settings, memory)
    own_batch = settings.accumulation * settings.batch_size
    settings = replace(settings, accumulation=args.accumulation or settings.accumulation,
                       batch_size=args.batch_size or settings.batch_size, device=str(args.device),
                       dtype=str(args.dtype)[6:], compile="on" if args.compile else "off")
    vocab_size = 30522
    if Path("data", settings.dataset).exists():
        vocab_size = Corpus(settings.dataset).vocab_size
    config = bert_config(settings, vocab_size, initial)
    check_fit(settings, config, memory)
    if initial:
        check_sizes(settings.init_from, initial, config)
    with torch.device("meta"):
        parameters = training.count_parameters(build_model(config))
    # largest batch_size by card: a step keeps its sequences, a tenth of the card stays free
    largest = {}
    for size in (2**n for n in range(own_batch.bit_length())):
        trial = replace(settings, device="cuda", dtype="bfloat16", batch_size=size,
                        accumulation=own_batch // size)
        needed = memory_needed(config, trial, parameters)
        largest |= {card: size for card in (16, 24, 48, 80) if needed < 0.9e9 * card}
    print(f"{path} takes about {memory_needed(config, settings, parameters) / 1e9:.3g} GB. Largest "
          f"batch_size in bf16 by a card's GB: {largest}")
    model = build(args, config)
    model.train()
    net, optimizers, _ = training.prepare(model, settings)
    batches = RandomBatches(vocab_size, settings)
    numbers = itertools.count()

    def step():
        training.step(next(numbers), net, batches, optimizers, settings)

    what = f"{settings.accumulation} x {settings.batch_size} x {settings.seq_len}"
    [record] = time_in_turn(what, {path: step}, args.device, args.rounds, bases=0)
    batch = settings.accumulation * settings.batch_size
    speed = batch * settings.seq_len / median(record["seconds"])
    peak_share = training.share_of_peak(model, settings)
    return record | {
        "tokens/s": round(speed),
        "mfu": peak_share and speed * peak_share,
        "hours": settings.max_steps * own_batch * settings.seq_len / speed / 3600,
        "parameters": parameters,
        "checkpoint_bytes": 12 * parameters,  # weights and two moments in float32
        "peak_bytes": peak_bytes(args.device),
    }


def memory_needed(config, settings, parameters):
    """Compute the highest memory of a training step in one process, in bytes.

    settings: device and dtype are resolved. parameters: how many the model has. The peak is where
    the last micro-batch has gone forward, or where the values are updated.
    """
    tables = len(config.memory_layers) * bool(config.beta)
    dense = parameters - tables * config.n_keys**2 * config.d_model
    tokens = settings.batch_size * settings.seq_len  # of a micro-batch
    number = getattr(torch, settings.dtype).itemsize  # bytes of an activation

    # bytes that a token keeps for the backward pass; a memory's scores are few beside them
    layer = number * (10 * config.d_model + 2 * config.d_ff)
    if settings.device == "cpu" and config.dropout:  # keeps attention's weights three times
        layer += 12 * config.n_head * settings.seq_len
    head = 12 * config.vocab_size * (1 if config.causal else MASKED)
    forward = tokens * (config.n_layer * layer + head)
    forward += 4 * dense * (settings.accumulation > 1)  # gradients of earlier micro-batches
    # slots, weights and gradients stay until the update, which takes four times those of a table
    reads = settings.accumulation * tokens * tables * (
        8 * config.memory_heads * config.topk + number * config.d_model)
    # 12: weights and two moments
    return 12 * parameters + reads + max(forward, 4 * dense + 4 * reads / max(tables, 1))


class RandomBatches:
    """Make micro-batches of random tokens, with as many predictions as in pretrain.py."""

    def __init__(self, vocab_size, settings):
        self.vocab_size = vocab_size
        self.settings = settings

    def get(self, step, micro):
        size = self.settings.batch_size, self.settings.seq_len
        ids = np.random.default_rng([step, micro]).integers(self.vocab_size, size=size)
        batch = {"ids": ids, "labels": ids}
        if self.settings.objective == "masked":
            count = round(MASKED * self.settings.seq_len)
            batch["labels"] = ids[:, :count]
            batch["positions"] = np.tile(np.arange(count), (len(ids), 1))
        return batch, 1 / self.settings.accumulation


def causal(args):
    """Time the next token of causal models, beside the first two."""
    configs = {}
    for path in args.configs or CAUSAL:
        configs[path] = config_of(path, f"--seq_len={max(args.lengths)}")
        check_objective(path, configs[path], causal=True)
    if args.slots is not None:
        return by_slots(args, path)
    models = {name: build(args, config) for name, config in configs.items()}
    return time_inference(args, models, bases=2)


def by_slots(args, path):
    """Time product keys beside flat keys, by number of slots.

    Two models of a size share the values, and all outside the memory. "multiplications" are for
    one search of a head, by the talk's formulas: (sqrt(|K|) + topk^2) d and |K| d.
    """
    models, scores = {}, {}
    for n in args.slots or [128, 256, 512, 1024]:  # torch compiles no more than 8 versions
        config = config_of(path, f"--n_keys={n}")
        product = build(args, config)
        flat = copy.deepcopy(product, {id(p): p for p in product.parameters()})
        for number in config.memory_layers:
            layer = flat.bert.layers[number - 1]
            with torch.device(args.device):
                layer.memory = FlatPKM(layer.memory.values, config.d_model, config.memory_heads,
                                       config.topk, config.key_dim)
        names = f"product keys, {n}^2 slots", f"flat keys, {n}^2 slots"
        models |= zip(names, (product, flat))
        scores |= zip(names, (n + config.topk**2, n**2))
    results = time_inference(args, models, bases=2)
    for record in results:
        record["multiplications"] = scores[record["system"]] * config.key_dim
    return results


def time_in_turn(what, functions, device, rounds, warmup=2, bases=1):
    """Time {name: function} in turn: a busy moment of the machine slows every function.

    Returns a record for each name. "seconds" has the time of each round. "times_NAME" compares with
    function NAME, for the first `bases` functions: the median of the rounds' ratios. Models compile
    in the rounds of warm-up, which do not count.
    """
    synchronize = getattr(torch, device.type).synchronize
    times = {name: [] for name in functions}
    for _ in Progress(range(warmup + rounds), what):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            times[name].append(time.perf_counter() - start)
    records = []
    for name, seconds in times.items():
        record = {"what": what, "system": name, "seconds": seconds[warmup:]}
        for base in list(functions)[:bases]:
            ratios = np.array(seconds) / times[base]
            record[f"times_{base}"] = median(ratios[warmup:].tolist())
        records.append(record)
    return records


def print_times(records):
    """Print a table of the records with the same keys. Times are median [lowest, highest]."""
    tables = {}
    for record in records:
        row = []
        for value in record.values():
            if isinstance(value, list):
                factor, unit = (1e3, "ms") if median(value) < 1 else (1, "s")
                low, middle, high = (factor * f(value) for f in (min, median, max))
                value = f"{middle:.4g} [{low:.4g}, {high:.4g}] {unit}"
            row.append(f"{value:,}" if type(value) is int else value)  # True is an int, too
        tables.setdefault(tuple(record), []).append(row)
    for keys, rows in tables.items():
        print(markdown(keys, rows))


def peak_bytes(device):
    """Return the highest memory use of this process; on CUDA, since the last call."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    import resource  # Windows lacks it

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def machine_facts(device):
    """Return what times depend on: processor, OpenMP's variables, version of torch."""
    names = [platform.machine()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():  # Linux
        names += re.findall("model name.*: (.*)", cpuinfo.read_text())
    if device.type == "cuda":
        names.append(torch.cuda.get_device_name(device))
    openmp = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("OMP_")]
    return {"machine": f"{names[-1]}, {torch.get_num_threads()} threads",
            "openmp": " ".join(openmp), "torch": torch.__version__}


COMMANDS = {"inference": inference, "layer": layer, "train": train, "causal": causal}


def main(argv):
    parser = Parser(description=__doc__)
    option = parser.add_argument
    option("command", nargs="?", choices=COMMANDS, default="inference")
    option("configs", nargs="*", help="train, causal: config files")
    option("--device", default="auto", help="cuda, mps or cpu")
    option("--dtype", default="auto", help="float32, bfloat16, float16 or auto: by the card")
    option("--compile", default="auto", help="off, on (inference: both) or auto: on CUDA")
    option("--batch_size", type=at_least(1), help="train: sequences at a time, not the config's")
    option("--accumulation", type=at_least(1), help="train: batches per step, not the config's")
    option("--rounds", type=at_least(1), default=7, help="timed rounds, after warm-up")
    option("--sizes", nargs="+", default=["base", "large"], help="inference: also demo")
    option("--lengths", type=at_least(3), nargs="+", default=[128, 512],
           help="tokens; not for train")
    option("--keys", type=at_least(32), default=512, help="layer: N^2 slots")  # top-32
    option("--slots", type=at_least(1), nargs="*", help="causal: numbers N of N^2 slots")
    args, args.settings = parser.parse_known_intermixed_args(argv)
    for setting in args.settings:
        if args.command != "train" or "=" not in setting:
            parser.error(f"unknown argument: {setting}; train takes settings, as --max_steps=1000")
    args.device, args.dtype = set_up_device(args.device, args.dtype,
                                            memory=args.command == "train")
    args.compile = wants_compile(args.compile, args.device)
    if args.command == "layer":  # the baseline has neither mixed precision nor compilation
        args.dtype, args.compile = torch.float32, False
    args.modes = [args.compile]
    if args.command == "inference" and args.compile:
        args.modes = [False, True]
    torch.manual_seed(0)
    results = COMMANDS[args.command](args)
    print_times(results)
    facts = {"command": " ".join(["python bench.py", *argv]), **machine_facts(args.device),
             "ranks": ranks.get_world_size(), "dtype": str(args.dtype)[6:], "compiled": args.modes}
    print(json.dumps({**facts, "results": results}))


if __name__ == "__main__":
    ranks.run_ranks(lambda: main(sys.argv[1:]))
