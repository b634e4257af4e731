"""
Speed, measured as the paper did, beside honest baselines in the same run.

$ python bench.py                          # Table 1: batches/s of a classifier at batch size 1
$ python bench.py layer                    # one memory layer, and where its time goes
$ python bench.py train                    # a pretraining step of base, +PKM and +ResM; torchrun
$ python bench.py causal                   # 12 layers, 24, and 12 with a memory (Lample et al.)
$ python bench.py causal --slots           # latency of the last by number of slots
$ python bench.py against_transformers     # ours and Hugging Face's, in turn

Tables show the median time with [lowest, highest], and its ratio to a baseline: the median over
the rounds. The last line is JSON.

`layer` also measures the bandwidth of a large copy: bytes read and written per second. "Of copy
bandwidth" divides the rate of reading rows by it: tokens x 128 x bytes of a row / time of a forward
pass. "Reads alone" leaves out the search. Above 1 the caches answer: many tokens read few rows.
"""
import itertools
import json
import sys
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import nn

import pkm
from lib.corpus import mask_tokens
from lib.device import autocast, choose_device, keep_freed_memory, to_device
from lib.distributed import (
    count_parameters,
    distribute,
    get_world_size,
    is_distributed,
    run_ranks,
    sum_gradients,
)
from lib.errors import UserError, need
from lib.huggingface import SETTINGS
from lib.settings import DTYPES, ON_OFF, Parser, whole_number
from lib.timing import (
    copy_bandwidth,
    fits,
    machine_facts,
    peak_bytes,
    print_times,
    time_in_turn,
)
from lib.tokenizer import Specials
from lib.training import flops_per_token, optimizer_groups, peak_flops
from lib.weights import check_objective, read_weights
from model import SIZES, BertConfig, build_model, value_tables
from values import LazyAdam

SYSTEMS = {"plain": {}, "+PKM": {"alpha": 0.0}, "+ResM": {"alpha": 1.0}}
LAYERS = {"base": (4, 8), "large": (8, 16), "distil": (2, 4), "demo": (2, 3)}
TABLE_1 = {("base", "+PKM"): 61.4 / 79.8, ("base", "+ResM"): 59.3 / 79.8,  # relative batches/s
           ("large", "+PKM"): 37.2 / 43.1, ("large", "+ResM"): 36.1 / 43.1}


class PlainPKM(pkm.PKM):
    """The baseline: a memory as it is usually written. It has the state dict of pkm.PKM."""

    def __init__(self, *sizes, **more):
        super().__init__(*sizes, **more)
        self.values = nn.EmbeddingBag.from_pretrained(
            self.values.weight.detach(), freeze=False, mode="sum", sparse=True)

    def forward(self, x):
        """x: (tokens, d_model). Returns the same shape."""
        query = self.query_norm(self.query(x)).view(len(x), self.heads, 2, -1)
        (first, i), (second, j) = (
            torch.einsum("thd,hkd->thk", query[:, :, half], self.keys[:, half]).topk(self.topk)
            for half in (0, 1))
        sums = (first[..., :, None] + second[..., None, :]).flatten(2)  # (tokens, heads, topk^2)
        slots = (i[..., :, None] * self.n_keys + j[..., None, :]).flatten(2)
        best, winners = sums.topk(self.topk)
        slots = slots.gather(2, winners)
        return self.values(slots.flatten(1), per_sample_weights=best.softmax(2).flatten(1))


def build(args, head, size, system="plain", device=None, **settings):
    """Make a model with random weights. settings: BertConfig's, over the size's and args'."""
    memory = {**SYSTEMS[system], "memory_layers": LAYERS[size]} if SYSTEMS[system] else {}
    config = BertConfig(**{**SIZES[size], **memory, "n_keys": args.n_keys,
                           "dropout": args.dropout, **settings})
    with torch.device(device or args.device):
        return build_model(config, head, labels=("no", "yes"))


def compare(args, what, functions, more=1, **settings):
    """Time functions (see time_in_turn) in `more` times --rounds rounds."""
    return time_in_turn(what, functions, args.device, more * args.rounds, **settings)


def random_ids(args, batch, length, vocab_size=30000):
    """Draw token ids: (batch, length)."""
    return torch.randint(5, vocab_size, (batch, length), device=args.device)


def masked_batch(args):
    """Draw a batch of sequences and mask them. Returns ids, positions and labels by name."""
    ids = random_ids(args, args.batch_size, args.length).cpu().numpy()
    masked = mask_tokens(ids, np.random.default_rng(0), 30522, Specials(0, 100, 101, 102, 103))
    return to_device(masked, args.device)


def forward(args, model, *inputs, **more):
    """Make a function that calls the model in evaluation mode, without gradients."""
    model.eval()

    @torch.no_grad()
    @autocast(args.device, args.dtype)
    def call():
        model(*inputs, **more)
    return call


def training_step(args, model, loss, parameters=None, values=None):
    """Make a function that does a training step with the gradients of loss(). parameters: AdamW's,
    by default those of pretraining. values: a LazyAdam, by default of the model's own tables. Under
    torchrun the ranks add up their gradients."""
    dense = torch.optim.AdamW(parameters or optimizer_groups(model, 0.01), lr=1e-4, fused=True)
    values = values or LazyAdam(value_tables(model).values())

    def step():
        with autocast(args.device, args.dtype):
            value = loss()
        value.backward()
        sum_gradients(model, value.detach(), count=1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (dense, values):
            optimizer.step()
            optimizer.zero_grad()
    return step


def inference(args):
    """Table 1: batches/s of a classification model at batch size 1"""
    modes, results = {"eager": lambda model: model}, []
    if args.compile:
        modes["compiled"] = torch.compile
        if args.device.type == "cuda":
            modes["graphs"] = partial(torch.compile, mode="reduce-overhead")
    for size in args.sizes:
        models = {}
        for system in SYSTEMS:
            parameters = count_parameters(build(args, "classifier", size, system, device="meta"))
            if fits(f"{size} {system}", 4 * parameters, args.device):
                models[system] = build(args, "classifier", size, system)
        for length, mode in itertools.product(args.lengths, modes):
            torch.compiler.reset()  # it compiles only so many versions
            ids = random_ids(args, 1, length)
            calls = {system: forward(args, modes[mode](m), ids) for system, m in models.items()}
            records = compare(args, f"{size}, 1 x {length}, {mode}", calls, more=5, warmup=3)
            for record in records:
                system = record["system"]
                record |= {"parameters": count_parameters(models[system]),
                           "batches/s": 1 / median(record["seconds"]),
                           "relative_batches/s": 1 / record["times_plain"],
                           "paper's": TABLE_1.get((size, system))}
            results += records
    return results


def by_slots(args, model, run):
    """Time run(), which calls the model, by the number of its memory's slots."""
    layers = [layer for layer in model.bert.layers if layer.beta]
    if not layers:
        raise UserError("--slots: the last model has no memory")

    def run_with(memory):
        for layer in layers:  # all layers share one memory, to make room for more slots
            layer.memory = memory
        run()

    width, calls = model.bert.config.d_model, {}
    for n in args.slots or [64, 128, 256, 512, 1024]:
        if fits(f"{n}^2 slots", 4 * n**2 * width, args.device):
            with torch.device(args.device):
                calls[f"{n}^2 slots"] = partial(run_with, pkm.PKM(width, n).eval())
    return compare(args, "latency", calls, more=3)


def causal(args):
    """Causal models of n layers, 2n, and n with a memory: the next token, a training step"""
    n = args.layers
    configs = {f"{n} layers": {"n_layer": n}, f"{2 * n} layers": {"n_layer": 2 * n},
               f"{n} layers, memory": {"n_layer": n, "memory_layers": (n // 2,)}}
    if args.runs:
        read = {run: read_weights(run)["config"] for run in args.runs}
        for run, config in read.items():
            check_objective(run, config, causal=True)
        configs = {run: vars(config) for run, config in read.items()}
    models = {name: build(args, None, args.size, **{**config, "causal": True})
              for name, config in configs.items()}
    runs = {name: torch.compile(m) if args.compile else m for name, m in models.items()}
    vocab_size, results = min(m.bert.config.vocab_size for m in models.values()), []
    for length in args.lengths:
        ids = random_ids(args, 1, length, vocab_size)
        last = torch.tensor([[length - 1]], device=args.device)
        calls = {name: forward(args, run, ids, positions=last) for name, run in runs.items()}
        if args.slots is not None:
            name, model = models.popitem()
            return by_slots(args, model, calls[name])
        results += compare(args, f"inference, 1 x {length}", calls, more=5, bases=2)
    ids, steps = random_ids(args, args.batch_size, args.length + 1, vocab_size), {}
    for name, model in models.items():
        loss = partial(runs[name].train(), ids[:, :-1], labels=ids[:, 1:])
        steps[name] = training_step(args, model, loss)
    results += compare(args, f"training step, {len(ids)} x {args.length}", steps, bases=2)
    return [{**record, "parameters": count_parameters(models[record["system"]])}
            for record in results]


def layer(args):
    """Time one memory layer by number of tokens, beside the plain baseline"""
    width, results = SIZES["base"]["d_model"], []
    with torch.device(args.device):
        plain, ours = PlainPKM(width, args.n_keys), pkm.PKM(width, args.n_keys)
    ours.load_state_dict(plain.state_dict())
    optimizers = {plain: torch.optim.SparseAdam(plain.values.parameters(), lr=1e-3),
                  ours: LazyAdam([ours.values])}
    bandwidth = copy_bandwidth(args.device)
    print(f"copy bandwidth: {bandwidth / 1e9:.1f} GB/s")

    def train_layer(memory, x, grad):
        memory.train()(x).backward(grad)
        optimizers[memory].step()
        optimizers[memory].zero_grad()
        memory.zero_grad()

    for tokens in args.tokens:
        x, grad = torch.randn(2, tokens, width, device=args.device)
        # the baseline's gradient has a row for every read, and a copy to coalesce it
        size = 12 * tokens * ours.heads * ours.topk * width
        room = fits(f"plain baseline, {tokens} tokens", size, args.device)
        memories = {"plain": plain, "ours": ours} if room else {"ours": ours}
        calls = {name: forward(args, memory, x) for name, memory in memories.items()}
        with torch.no_grad():
            read = ours.eval().search(ours.normalize(ours.query(x)))
        calls["reads alone"] = forward(args, ours.values, *read)
        steps = {name: partial(train_layer, memory, x, grad) for name, memory in memories.items()}
        read_bytes = tokens * ours.heads * ours.topk * width * ours.values.weight.element_size()
        results += [{**record, "of_copy_bandwidth":
                     read_bytes / median(record["seconds"]) / bandwidth}
                    for record in compare(args, f"{tokens} tokens, forward", calls, more=3)]
        results += compare(args, f"{tokens} tokens, training step", steps)
        with torch.profiler.profile() as profile:
            steps["ours"]()
        where = "device" if args.device.type == "cuda" else "cpu"
        print(f"{tokens} tokens, a training step by operation")
        print(profile.key_averages().table(f"self_{where}_time_total", row_limit=12))
    return results


def train(args):
    """A pretraining step of plain BERT, +PKM and +ResM (the paper: 2.8 and 5.1 days)"""
    models, tables = {}, {}
    for system in args.systems:
        model = models[system] = build(args, None, args.size, system)
        distribute(model)
        tables = tables or value_tables(model)
        for n in value_tables(model):  # all systems share the tables, to make room for them
            model.bert.layers[n - 1].memory.values = tables[n]
    values = LazyAdam(tables.values())
    data, steps = masked_batch(args), {}
    for system, model in models.items():
        loss = partial(torch.compile(model) if args.compile else model, **data)
        steps[system] = training_step(args, model, loss, values=values)
    results = compare(args, f"{args.size}, {args.batch_size} x {args.length}", steps)
    tokens = get_world_size() * args.batch_size * args.length
    peak = None if args.dtype == torch.float32 else peak_flops(args.device)
    for record in results:
        system, model = record["system"], models[record["system"]]
        rate = tokens / median(record["seconds"])
        flops = rate * flops_per_token(model, args.length)
        record |= {"parameters": count_parameters(model), "tokens": tokens,
                   "tokens/s": round(rate), "mfu": peak and flops / (get_world_size() * peak),
                   "peak_bytes": peak_bytes(args.device) if len(models) == 1 else None,
                   "paper's": 1.82 if SYSTEMS[system] else None}
    return results


def against_transformers(args):
    """Ours and Hugging Face's BERT in turn: classification at batch size 1, an MLM training step"""
    transformers = need("transformers", "a comparison with it")
    ours, our_lm = (build(args, head, args.size) for head in ("classifier", None))
    config = transformers.BertConfig(attention_probs_dropout_prob=args.dropout, **{
        theirs: getattr(ours.bert.config, key) for key, theirs in SETTINGS["bert"].items()})
    with torch.device(args.device):
        theirs = transformers.BertForSequenceClassification(config)
        their_lm = transformers.BertForMaskedLM(config).train()
    if (longest := max(*args.lengths, args.length)) > ours.bert.config.max_len:
        raise UserError(f"--length {longest}: {args.size} has {ours.bert.config.max_len} positions")
    results, data = [], masked_batch(args)
    for length in args.lengths:
        ids = random_ids(args, 1, length)
        calls = {"theirs": forward(args, theirs, ids), "ours": forward(args, ours, ids)}
        results += compare(args, f"inference, 1 x {length}", calls, more=9)
    labels = torch.full_like(data["ids"], -100).scatter(1, data["positions"], data["labels"])

    def their_loss():
        return their_lm(data["ids"], labels=labels).loss

    their_step = training_step(args, their_lm, their_loss, their_lm.parameters(), LazyAdam([]))
    our_step = training_step(args, our_lm, partial(our_lm, **data))
    results += compare(args, f"MLM training step, {len(labels)} x {args.length}",
                       {"theirs": their_step, "ours": our_step})
    return [{**record, "their_version": transformers.__version__} for record in results]


def parse(argv):
    parser = Parser(description=__doc__)
    option = parser.commands(inference, layer, train, causal, against_transformers)
    every = "inference layer train causal against_transformers"
    steps = "train causal against_transformers"
    n_keys = partial(whole_number, least=32)  # a head's topk
    option(every, "--device", default="auto", help="cuda, mps or cpu")
    option("inference", "--dtype", choices=DTYPES, default="float32",
           help="(float32, as in the paper)")
    option(steps, "--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    option(every, "--rounds", type=whole_number, default=7, help="timed rounds, after warm-up")
    option("inference layer train causal", "--n_keys", type=n_keys, default=512, help="N^2 slots")
    option("inference train causal", "--compile", choices=ON_OFF, default="auto",
           help="auto: on CUDA")
    option("inference causal against_transformers", "--lengths", type=whole_number, nargs="+",
           default=[128, 512])
    option("inference", "--sizes", nargs="+", choices=list(SIZES), default=["base", "large"])
    option("causal", "--slots", type=n_keys, nargs="*", metavar="N",
           help="time only the latency with N^2 slots (64 128 256 512 1024)")
    option("causal", "--layers", type=partial(whole_number, least=2), default=12)
    option("causal", "--runs", nargs="+", metavar="RUN", help="time the models of runs instead")
    option("layer", "--tokens", type=partial(whole_number, least=2), nargs="+",
           default=[128, 512, 2048, 8192, 32768, 65536])
    option(steps, "--size", choices=list(SIZES), default="base")
    option(steps, "--length", type=whole_number, default=512, help="tokens a sequence")
    option(steps, "--batch_size", type=whole_number, default=8, help="sequences")
    option(steps, "--dropout", type=float, default=0.1)
    option("train", "--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.set_defaults(compile="off", n_keys=512, dropout=0.0, dtype="float32")
    return parser.parse_args(argv)


def main():
    argv = sys.argv[1:]
    if not argv or argv[0].startswith("--") and argv[0] != "--help":
        argv = ["inference", *argv]
    args = parse(argv)
    if getattr(args, "batch_size", 2) * getattr(args, "length", 1) == 1:
        raise UserError("--batch_size 1 --length 1: a batch norm needs two tokens")
    if is_distributed() and args.command != "train":
        raise UserError(f"{args.command} runs in one process: torchrun is for bench.py train")
    args.device, args.dtype, line = choose_device(args.device, args.dtype)
    print(line)
    torch.manual_seed(0)
    if args.dtype == torch.float16 and args.command != "inference":
        raise UserError("dtype = 'float16': training is timed in float32 and bfloat16")
    if args.command in ("train", "causal"):
        keep_freed_memory(args.device)
    args.compile = args.compile == "on" or args.compile == "auto" and args.device.type == "cuda"
    facts = {"command": " ".join(["python bench.py", *argv]), **machine_facts(args.device),
             "ranks": get_world_size(), "dtype": str(args.dtype)[6:], "rounds": args.rounds}
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    results = args.call(args)
    print_times(results)
    print(json.dumps({**facts, "results": results}))


if __name__ == "__main__":
    run_ranks(main)
