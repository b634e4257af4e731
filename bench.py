"""
Speed, measured as the paper did, beside honest baselines in the same run.

$ python bench.py                          # Table 1: batches/s of a classifier at batch size 1
$ python bench.py inference --slots        # latency by number of slots, product and flat keys
$ python bench.py layer                    # one memory layer, and where its time goes
$ python bench.py train                    # a pretraining step of base, +PKM and +ResM; torchrun
$ python bench.py causal                   # 12 layers, 24, and 12 with a memory (Lample et al.)
$ python bench.py causal --slots           # latency of the last by number of slots
$ python bench.py against_transformers     # ours and Hugging Face's, in turn

Tables show the median time with [lowest, highest], and its ratio to a baseline: the median over
the rounds. The last line is JSON; --out results/NAME.json keeps it.
"""
import functools
import itertools
import json
import sys
from statistics import median

import numpy as np
import torch
from torch import nn

import pkm
from lib.common.device import choose_device, keep_freed_memory
from lib.common.errors import UserError, need, out_of_memory
from lib.common.files import write_text
from lib.common.settings import DTYPES, Parser, whole_number
from lib.common.timing import fits, machine_facts, peak_bytes, print_times, time_in_turn
from lib.corpus.batches import mask_tokens
from lib.corpus.vocabulary import Specials
from lib.distributed.gradients import distribute, sum_gradients
from lib.distributed.processes import get_world_size, is_distributed, run_ranks
from lib.distributed.sharded_values import count_parameters
from lib.training.flops import flops_per_token, peak_flops
from lib.training.trainer import autocast, optimizer_groups, to_device
from lib.weights.checkpoint import check_objective, read_weights
from lib.weights.huggingface import SETTINGS
from model import SIZES, BertConfig, Classifier, MaskedLM, value_tables
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


class FlatPKM(pkm.PKM):
    """A memory that compares a query with one whole key for every slot."""

    def __init__(self, d_model, n_keys=512, heads=4, topk=32, key_dim=256):
        super().__init__(d_model, n_keys, heads, topk, key_dim)
        self.keys = nn.Parameter(torch.empty(heads, n_keys**2, key_dim))
        nn.init.uniform_(self.keys, -key_dim**-0.5, key_dim**-0.5)

    def search(self, query):
        query = query.view(len(query), len(self.keys), -1).transpose(0, 1)
        score, slots = (query @ self.keys.mT).topk(self.topk)  # (heads, tokens, topk)
        return slots.transpose(0, 1), score.softmax(2).transpose(0, 1)


def compare(args, what, functions, more=1, **settings):
    """Time functions (see time_in_turn) in `more` times --rounds rounds."""
    return time_in_turn(what, functions, args.device, more * args.rounds, **settings)


def build(args, head, size, system, device=None, **settings):
    """Make a model with random weights. settings: BertConfig's, over the size's and args'."""
    memory = {**SYSTEMS[system], "memory_layers": LAYERS[size]} if SYSTEMS[system] else {}
    config = BertConfig(**{**SIZES[size], **memory, "n_keys": args.n_keys,
                           "dropout": args.dropout, **settings})
    with torch.device(device or args.device):
        return head(config, 2) if head is Classifier else head(config)


def random_ids(args, batch, length, vocab_size=30000):
    """Draw token ids: (batch, length)."""
    return torch.randint(5, vocab_size, (batch, length), device=args.device)


def forward(args, model, *inputs, **more):
    """Make a function that calls the model in evaluation mode, without gradients."""
    model.eval()

    @torch.no_grad()
    @autocast(args.device, args.dtype)
    def call():
        model(*inputs, **more)
    return call


def inference(args):
    """Table 1: batches/s of a classification model at batch size 1"""
    if args.slots is not None:
        model = build(args, Classifier, "base", "+ResM", n_keys=32)
        run = forward(args, model, random_ids(args, 1, args.lengths[0]))
        return by_slots(args, model, run, {"product": pkm.PKM, "flat": FlatPKM})
    modes, results = {"eager": lambda model: model}, []
    if args.compile:
        modes["compiled"] = torch.compile
        if args.device.type == "cuda":
            modes["graphs"] = functools.partial(torch.compile, mode="reduce-overhead")
    for size in args.sizes:
        models = {}
        for system in SYSTEMS:
            parameters = count_parameters(build(args, Classifier, size, system, device="meta"))
            if fits(f"{size} {system}", 4 * parameters, args.device):
                models[system] = build(args, Classifier, size, system)
                for table in value_tables(models[system]).values():
                    table.to(getattr(torch, args.values_dtype))
        for length, mode in itertools.product(args.lengths, modes):
            torch.compiler.reset()  # it compiles only so many versions
            ids = random_ids(args, 1, length)
            calls = {system: forward(args, modes[mode](m), ids) for system, m in models.items()}
            what = f"{size}, 1 x {length}, {mode}"
            for record in compare(args, what, calls, more=5, warmup=3):
                system = record["system"]
                results.append({
                    **record, "parameters": count_parameters(models[system]),
                    "batches/s": 1 / median(record["seconds"]),
                    "relative_batches/s": 1 / record["times_plain"],
                    "paper's": TABLE_1.get((size, system))})
    return results


def by_slots(args, model, run, kinds):
    """Time run(), which calls the model, by number of slots (the poster's last figure)."""
    layers = [layer for layer in model.bert.layers if layer.beta]
    if not layers:
        raise UserError("--slots: the last model has no memory")

    def run_with(memory):
        for layer in layers:  # all layers share one memory, to make room for more slots
            layer.memory = memory
        run()

    width, calls = model.bert.config.d_model, {}
    for name, n in itertools.product(kinds, args.slots or [64, 128, 256, 512, 1024]):
        of_keys = 4 * (256 + args.lengths[0]) if name == "flat" else 0  # 4 heads: key and scores
        if fits(f"{n}^2 slots, {name} keys", 4 * n**2 * (width + of_keys), args.device):
            with torch.device(args.device):
                memory = kinds[name](width, n).eval()
            memory.values.to(getattr(torch, args.values_dtype))
            calls[f"{n}^2 slots, {name} keys"] = functools.partial(run_with, memory)
    return compare(args, "latency", calls, more=3)


def causal(args):
    """Causal models of n layers, 2n, and n with a memory: the next token, a training step"""
    n, configs = args.layers, {}
    shared = {**SIZES[args.size], "causal": True, "dropout": args.dropout, "n_keys": args.n_keys}
    for name, layers, memories in ((f"{n} layers", n, ()), (f"{2 * n} layers", 2 * n, ()),
                                   (f"{n} layers, memory", n, (n // 2,))):
        configs[name] = {**shared, "n_layer": layers, "memory_layers": memories}
    if args.runs:
        configs = {run: read_weights(run)["config"] for run in args.runs}
        for run, config in configs.items():
            check_objective(run, config, causal=True)
    with torch.device(args.device):
        models = {name: MaskedLM(BertConfig(**config)) for name, config in configs.items()}
    runs = {name: torch.compile(m) if args.compile else m for name, m in models.items()}
    vocab_size, results = min(m.bert.config.vocab_size for m in models.values()), []
    for length in args.lengths:
        ids = random_ids(args, 1, length, vocab_size)
        last = torch.tensor([[length - 1]], device=args.device)
        calls = {name: forward(args, run, ids, positions=last) for name, run in runs.items()}
        if args.slots is not None:
            name, model = models.popitem()
            return by_slots(args, model, calls[name], {"product": pkm.PKM})
        results += compare(args, f"inference, 1 x {length}", calls, more=5, bases=2)
    ids, steps = random_ids(args, args.batch_size or 8, args.length + 1, vocab_size), {}
    for name, model in models.items():
        values = LazyAdam(value_tables(model).values())
        loss = functools.partial(runs[name].train(), ids[:, :-1], labels=ids[:, 1:])
        groups = optimizer_groups(model, 0.01)
        steps[name] = training_step(args, model, groups, values, loss)
    results += compare(args, f"training step, {len(ids)} x {args.length}", steps, bases=2)
    return [{**record, "parameters": count_parameters(models[record["system"]])}
            for record in results]


def layer(args):
    """One memory layer by number of tokens, against the plain baseline, and where its time goes"""
    width, results = SIZES["base"]["d_model"], []
    with torch.device(args.device):
        plain, ours, bf16 = (kind(width, args.n_keys) for kind in (PlainPKM, pkm.PKM, pkm.PKM))
    for memory in (ours, bf16):
        memory.load_state_dict(plain.state_dict())
    bf16.values.to(torch.bfloat16)
    optimizers = {plain: torch.optim.SparseAdam(plain.values.parameters(), lr=1e-3),
                  ours: LazyAdam([ours.values])}

    def train_layer(memory, x, grad):
        memory.train()(x).backward(grad)
        optimizers[memory].step()
        optimizers[memory].zero_grad()
        memory.zero_grad()

    for tokens in args.tokens:
        x, grad = torch.randn(2, tokens, width, device=args.device)
        memories = {"plain": plain, "ours": ours, "bf16": bf16}
        # the baseline's gradient has a row for every read, and a copy to coalesce it
        size = 12 * tokens * ours.heads * ours.topk * width
        if not fits(f"plain baseline, {tokens} tokens", size, args.device):
            del memories["plain"]
        calls = {name: forward(args, memory, x) for name, memory in memories.items()}
        results += compare(args, f"{tokens} tokens, forward", calls, more=3)
        steps = {name: functools.partial(train_layer, memory, x, grad)
                 for name, memory in memories.items() if memory in optimizers}
        results += compare(args, f"{tokens} tokens, training step", steps)
        with torch.profiler.profile() as profile:
            steps["ours"]()
        where = "device" if args.device.type == "cuda" else "cpu"
        print(f"{tokens} tokens, a training step by operation")
        print(profile.key_averages().table(f"self_{where}_time_total", row_limit=12))
    return results


def training_step(args, model, parameters, values, loss):
    """Make a function that does a training step with the gradients of loss().

    parameters: the model's, for fused AdamW. values: a LazyAdam. Under torchrun the ranks add up
    their gradients.
    """
    dense = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    clipped = [p for group in dense.param_groups for p in group["params"]]

    def step():
        with autocast(args.device, args.dtype):
            value = loss()
        value.backward()
        sum_gradients(model, value.detach(), count=1)
        torch.nn.utils.clip_grad_norm_(clipped, 1.0)
        for optimizer in (dense, values):
            optimizer.step()
            optimizer.zero_grad()
    return step


def masked_batch(args, batch):
    """Draw `batch` sequences and mask them. Returns ids, positions and labels by name."""
    ids = random_ids(args, batch, args.length).cpu().numpy()
    masked = mask_tokens(ids, np.random.default_rng(0), 30522, Specials(0, 100, 101, 102, 103))
    return to_device(masked, args.device)


def train(args):
    """A pretraining step of plain BERT, +PKM and +ResM (the paper: 2.8 and 5.1 days)"""
    models, tables = {}, {}
    for system in args.systems:
        model = models[system] = build(args, MaskedLM, args.size, system)
        distribute(model)
        tables = tables or value_tables(model)
        for n in value_tables(model):  # all systems share the tables, to make room for them
            model.bert.layers[n - 1].memory.values = tables[n]
    values = LazyAdam(tables.values())
    batch, results = args.batch_size or (8 if args.device.type == "cpu" else 128), []
    while not results:
        torch.compiler.reset()  # or torch.compile would make a smaller batch's size dynamic
        data, steps = masked_batch(args, batch), {}
        for system, model in models.items():
            model.zero_grad()
            loss = functools.partial(torch.compile(model) if args.compile else model, **data)
            groups = optimizer_groups(model, 0.01)
            steps[system] = training_step(args, model, groups, values, loss)
        try:
            results = compare(args, f"{args.size}, {batch} x {args.length}", steps)
        except RuntimeError as error:
            if not out_of_memory(error) or batch == 1 or is_distributed():
                raise
            if args.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            values.zero_grad()
            batch //= 2
    tokens = get_world_size() * batch * args.length
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
    ours, our_lm = (build(args, head, args.size, "plain") for head in (Classifier, MaskedLM))
    config = transformers.BertConfig(attention_probs_dropout_prob=args.dropout, **{
        theirs: getattr(ours.bert.config, key) for key, theirs in SETTINGS["bert"].items()})
    with torch.device(args.device):
        theirs = transformers.BertForSequenceClassification(config)
        their_lm = transformers.BertForMaskedLM(config).train()
    results, data = [], masked_batch(args, args.batch_size or 8)
    for length in args.lengths:
        ids = random_ids(args, 1, length)
        results += compare(args, f"inference, 1 x {length}", {
            "theirs": forward(args, theirs, ids), "ours": forward(args, ours, ids)}, more=9)
    labels = torch.full_like(data["ids"], -100).scatter(1, data["positions"], data["labels"])
    no_tables = LazyAdam([])
    results += compare(args, f"MLM training step, {len(labels)} x {args.length}", {
        "theirs": training_step(args, their_lm, their_lm.parameters(), no_tables,
                                lambda: their_lm(data["ids"], labels=labels).loss),
        "ours": training_step(args, our_lm, optimizer_groups(our_lm, 0.01), no_tables,
                              lambda: our_lm(**data))})
    return [{**record, "their_version": transformers.__version__} for record in results]


def parse(argv):
    parser = Parser(description=__doc__)
    option = parser.commands(inference, layer, train, causal, against_transformers)
    every = "inference layer train causal against_transformers"
    steps = "train causal against_transformers"
    whole, n_keys = whole_number, functools.partial(whole_number, least=32)  # a head's topk
    option(every, "--device", default="auto", help="cuda, mps or cpu")
    option("inference", "--dtype", choices=DTYPES, default="float32",
           help="(float32, as in the paper)")
    option("layer", "--dtype", choices=["float32"], default="float32")
    option(steps, "--dtype", choices=["auto", "float32", "bfloat16"], default="auto",
           help="(bfloat16 on CUDA)")
    option(every, "--rounds", type=whole, default=7, help="timed rounds, after two of warm-up")
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
    option("inference causal", "--slots", type=n_keys, nargs="*", metavar="N", help="time only the "
           "latency with N^2 slots, by product and flat keys (64 128 256 512 1024)")
    option("causal", "--layers", type=functools.partial(whole, least=2), default=12)
    option("causal", "--runs", nargs="+", metavar="RUN", help="time the models of runs instead")
    option("layer", "--tokens", type=whole, nargs="+", default=[128, 512, 2048, 8192, 32768, 65536])
    option(steps, "--size", choices=list(SIZES), default="base")
    option(steps, "--length", type=whole, default=512, help="tokens a sequence")
    option(steps, "--batch_size", type=whole, help="sequences (8; train on CUDA: what fits)")
    option(steps, "--dropout", type=float, default=0.1)
    option("train", "--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.set_defaults(compile=False, n_keys=512, dropout=0.0)
    return parser.parse_args(argv)


def main():
    argv = sys.argv[1:]
    if not argv or argv[0].startswith("--") and argv[0] != "--help":
        argv = ["inference", *argv]
    args = parse(argv)
    if is_distributed() and args.command != "train":
        raise UserError(f"{args.command} runs in one process: start it with python bench.py; "
                        "torchrun is for train")
    args.device, args.dtype, line = choose_device(args.device, args.dtype)
    print(line)
    torch.manual_seed(0)
    if args.dtype == torch.float16 and args.command in ("train", "causal", "against_transformers"):
        raise UserError("dtype = 'float16': training is timed in float32 and bfloat16")
    if args.keep_freed or args.command in ("train", "causal"):
        keep_freed_memory(args.device)
    args.compile |= args.device.type == "cuda"
    facts = {"command": " ".join(["python bench.py", *argv]), **machine_facts(args.device),
             "ranks": get_world_size(), "dtype": str(args.dtype)[6:], "rounds": args.rounds}
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    results = args.call(args)
    print_times(results)
    line = json.dumps({**facts, "results": results})
    if args.out:
        write_text(args.out, line + "\n")
    print(line)


if __name__ == "__main__":
    run_ranks(main)
