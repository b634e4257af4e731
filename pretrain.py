"""
Pretrain BERT by masked language modelling, with or without product-key memory in some layers.

$ python pretrain.py configs/demo.py                  # minutes on two CPU cores, no network
$ python pretrain.py configs/demo_resm_init.py        # run demo.py first; gives its model a memory
$ python pretrain.py configs/base_resm_init.py        # the paper's system, on a GPU

The same command goes on where a stopped run left off. --key=value overrides any setting below.
"""
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from lib import distributed, training
from lib.corpus import CausalBatches, Corpus, MaskedBatches, causal_heldout, masked_heldout
from lib.device import autocast, duration, to_device, use_device, wants_compile
from lib.errors import UserError, run_script
from lib.files import first_rank, lock
from lib.run import Run
from lib.settings import check_choice, load_settings
from lib.usage import describe_evaluation, evaluate_language_model, open_corpus
from lib.weights import init_from, load_weights, read_weights
from model import SIZES, BertConfig, LanguageModel, value_tables


@dataclass
class Config:
    # defaults are the paper's (section 5), or Devlin et al.'s where it says nothing (our reading)
    out: str = ""  # folder of the run; empty: out/<config file's name>
    dataset: str = "wikibooks"  # data/<dataset>, made by prepare_data.py
    seed: int = 0  # for weights, data order, masks and dropout
    objective: str = "masked"  # masked or causal: what to predict
    # model
    model: str = "base"  # demo, distil, base or large: names for the four sizes below
    n_layer: int = 0  # number of layers; 0: that of the named model
    n_head: int = 0  # attention heads; 0: those of the named model
    d_model: int = 0  # width; 0: that of the named model
    d_ff: int = 0  # width of the FFN; 0: that of the named model
    dropout: float = 0.1  # in embeddings, attention and FFN
    memory_layers: tuple = ()  # with a memory, counted from 1: (4, 8) of 12; 5.1 tries no others
    alpha: float = 1.0  # weight of the FFN; 0: the memory replaces it (PKM)
    beta: float = 1.0  # weight of the memory; with alpha = 1: residual memory (ResM)
    n_keys: int = 512  # a memory has n_keys^2 slots
    memory_heads: int = 4  # heads of a memory
    topk: int = 32  # slots that each head reads
    key_dim: int = 256  # size of a head's key: two halves of key_dim / 2
    values: str = "random"  # initial values: random, or zero (the memory starts silent)
    init_from: str = ""  # a run, a Hugging Face folder, or a name: bert-base-uncased
    reinit_ffn: bool = False  # with init_from: new FFNs in memory layers alone (ResM'; our reading)
    # batch: batch_size x accumulation sequences a step
    seq_len: int = 512  # tokens of a sequence, with [CLS] and [SEP] if masked
    batch_size: int = 32  # sequences at a time on the device
    accumulation: int = 32  # batches per step: 32 x 32 = 1,024 sequences
    # optimization: AdamW; linear warm-up, then linear decay to 0
    max_steps: int = 500_000  # number of updates
    warmup_steps: int = 10_000  # updates until the learning rate is highest
    lr: float = 1e-4  # highest learning rate
    keys_lr: float = 1.0  # rate of the memory's sub-keys, as a factor of lr (our reading)
    value_lr: float = 1e-3  # rate of the value tables, constant (our reading)
    weight_decay: float = 0.01  # biases, norms and memories have none
    grad_clip: float = 1.0  # largest norm without the values' (our reading; XLM clips theirs)
    # watching: evaluations also come at steps 0, 1, 2, 4, ...
    log_interval: int = 10  # steps between log records
    eval_interval: int = 5000  # steps between evaluations
    eval_sequences: int = 1024  # held-out sequences at most; usage counts their reads (our reading)
    usage_interval: int = 100_000  # steps between snapshots of slot usage; 0: none
    checkpoint_interval: int = 1000  # steps between checkpoints
    keep_checkpoints: int = 2  # only the newest ones stay
    tensorboard: bool = False  # curves: tensorboard --logdir out
    # machine
    device: str = "auto"  # auto, cuda, mps or cpu
    dtype: str = "auto"  # of matrix products: auto, float32, bfloat16 or float16
    compile: str = "auto"  # on, off, or auto: on CUDA

    # what may be another when a run goes on
    MAY_CHANGE = ("out", "max_steps", "log_interval", "eval_interval", "eval_sequences",
                  "usage_interval", "checkpoint_interval", "keep_checkpoints", "tensorboard",
                  "device", "compile")


def main(argv):
    if not argv:
        raise UserError("which config? python pretrain.py configs/demo.py; --help lists settings")
    config = load_settings(Config, argv)
    check_config(config)
    name = next((Path(arg).stem for arg in argv if arg.endswith(".py")), "pretrain")
    run = Run(config.out or f"out/{name}")
    with lock(run.folder, "trains there"):
        return train(config, run, argv)


def train(config, run, argv):
    """Train a new run, or go on with a stopped one. Returns the exit status."""
    device, dtype = use_device(config.device, config.dtype)
    config = replace(config, device=str(device), dtype=str(dtype).removeprefix("torch."))

    # the text
    with distributed.first_rank_first():
        if config.dataset == "docs" and not Path("data/docs").exists():
            run_script("prepare_data.py", "docs")
    checkpoint = run.newest_checkpoint()
    initial = run.folder if checkpoint else config.init_from
    corpus = open_corpus(config.dataset, initial) if initial else Corpus(config.dataset)
    if checkpoint:
        run.check_settings(config, corpus.meta["sha256"])
    split = corpus, "val", config.seq_len, config.batch_size, config.eval_sequences
    if config.objective == "causal":
        batches = CausalBatches(corpus, config)
        held_out = causal_heldout(*split)
    else:
        batches = MaskedBatches(corpus, config)
        held_out = masked_heldout(*split)

    # the model
    torch.manual_seed(config.seed)
    model = LanguageModel(BertConfig(**model_sizes(config), vocab_size=corpus.vocab_size))
    if config.values == "zero":
        for table in value_tables(model).values():
            torch.nn.init.zeros_(table.weight)
    origin = {"init_checkpoint": "", "first_step": 0, "pooler_trained": False}
    if checkpoint:
        origin = run.settings()
        load_weights(model, read_weights(checkpoint)["weights"], checkpoint)
    elif config.init_from:
        origin = init_from(model, config.init_from, config.reinit_ffn)
    tokens = corpus.meta["tokens"]
    print(f"corpus {corpus.name}: {tokens['train']:,} training tokens, {tokens['val']:,} held out, "
          f"vocabulary {corpus.vocab_size:,}\n"
          f"unigram perplexity of the held-out text: {corpus.meta['unigram_perplexity']:.2f}\n"
          f"model {config.model}: {training.count_parameters(model):,} parameters\n"
          f"{config.max_steps:,} steps of {config.batch_size} x {config.accumulation} sequences, "
          f"{batches.size:,} tokens: {batches.epochs(config.max_steps):.1f} epochs")
    distributed.distribute(model)  # over the ranks, if torchrun started several
    model.to(device)
    # not with mode="reduce-overhead": a replayed CUDA graph keeps no reads of the memory
    compiled = torch.compile(model) if wants_compile(config.compile, device) else model

    # the optimizers
    dense, sparse = training.make_optimizers(model, config, device)  # sparse: of the value tables
    dense_parameters = [p for group in dense.param_groups for p in group["params"]]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    state = {"step": 0, "elapsed": 0.0, "seconds": 0.0, "losses": []}
    if checkpoint:
        state = training.restore(checkpoint, dense, sparse, scaler)
    if state["step"] >= config.max_steps:
        print(f"{run.folder} is at step {state['step']:,} of {config.max_steps:,}: nothing to do; "
              "--max_steps=N goes on, --out=out/NAME starts anew")
        return 0

    run.start(config, corpus.folder / "vocab.txt", origin, corpus.meta["sha256"], state["step"])
    signals = training.catch_signals()
    micro_batches = distributed.my_micro_batches(config.accumulation)
    peak_share = training.share_of_peak(model, config.seq_len, device, dtype)
    if state["step"] == 0:
        evaluate(0, config, model, held_out, device, dtype, run)

    model.train()
    recent = []  # (loss, norm) of the steps since the last look, still on the device
    start = time.perf_counter()
    for step in range(state["step"], config.max_steps):
        training.set_rate(dense, training.learning_rate(config, step))
        loss = 0.0
        for micro in micro_batches:
            training.seed_dropout(config.seed, step, micro)
            batch = to_device(batches.get(step, micro), device)
            with autocast(device, dtype):
                part = compiled(**batch) * (1 / config.accumulation)
            scaler.scale(part).backward()
            loss += part.detach()
        loss = distributed.sum_gradients(model, loss, len(micro_batches))

        scaler.unscale_(dense)
        norm = torch.nn.utils.clip_grad_norm_(dense_parameters, config.grad_clip)
        scale = scaler.get_scale()
        scaler.step(dense)
        scaler.update()
        if scaler.get_scale() >= scale:  # else a gradient had an inf: the dense step was left out
            sparse.step(grad_scale=scale)
        dense.zero_grad()
        sparse.zero_grad()

        recent.append((loss, norm))
        done = step + 1  # updates
        stopped = distributed.any_signalled(signals)
        log = training.is_due(done, config.log_interval, config)
        snapshot = config.usage_interval and training.is_due(done, config.usage_interval, config)
        early = done < config.eval_interval and done & (done - 1) == 0  # 1, 2, 4, 8, ...
        look = early or snapshot or training.is_due(done, config.eval_interval, config)
        save = stopped or training.is_due(done, config.checkpoint_interval, config)
        if not (log or look or save):
            continue

        recent = [(loss.item(), norm.item()) for loss, norm in recent]  # waits for the device
        training.check_finite(recent, config, done)
        state["step"] = done
        state["seconds"] += time.perf_counter() - start
        state["losses"] += [loss for loss, _ in recent]
        if log:
            state["elapsed"] += state["seconds"]
            training.log_training(run, state, config, batches, recent[-1][1], peak_share)
            state["losses"], state["seconds"] = [], 0.0
        if look:
            counts = evaluate(done, config, model, held_out, device, dtype, run)
            if snapshot and counts:  # a model without memory has none
                run.write_usage(done, counts)
        if save:
            files = training.checkpoint_files(model, (), dense, sparse, scaler, state)
            saved = run.save_checkpoint(done, files, config.keep_checkpoints)
        if stopped:
            break
        recent = []
        start = time.perf_counter()

    if state["step"] < config.max_steps:
        print(f"saved {saved}; go on with: python pretrain.py {shlex.join(argv)}")
        return training.status_after(signals)
    print(f"done, {duration(state['elapsed'])} of training: {saved}")
    return 0


def evaluate(step, config, model, held_out, device, dtype, run):
    """Evaluate, log, print, and warn once of a layer's fall of usage. Returns its counts."""
    results, counts = evaluate_language_model(model, held_out, device, dtype)
    run.log({"step": step, **results})
    print(f"step {step:,}: " + "\n  ".join(describe_evaluation(results)), flush=True)
    # from scratch usage can first fall and then return: the first quarter does not count
    first = 0 if config.init_from else config.max_steps / 4
    for layer in results["layers"] if first_rank() else ():
        line = training.usage_warning(run.records(), str(layer), first)
        if line:
            print(f"warning: {line}", flush=True)
            run.log({"step": step, "warning": line, "about": str(layer)})
    return counts


def model_sizes(config):
    """Return BertConfig's arguments: the named model's sizes, overridden by settings."""
    named, given = SIZES[config.model], {}
    for name, value in asdict(config).items():
        if name in BertConfig.__dataclass_fields__ and (value or name not in named):
            given[name] = value
    sizes = {**named, **given, "causal": config.objective == "causal"}
    if sizes["d_model"] != named["d_model"]:  # see model.SIZES
        sizes["init_std"] = 0.02 * (768 / sizes["d_model"]) ** 0.5
    return sizes


def check_config(config):
    """Raise UserError for settings that do not fit together, before anything is written."""
    check_choice("objective", config.objective, ("masked", "causal"))
    check_choice("model", config.model, SIZES)
    check_choice("values", config.values, ("random", "zero"))
    if config.reinit_ffn and not config.init_from:
        raise UserError("reinit_ffn = True needs init_from: without it every FFN is new")
    if config.warmup_steps > config.max_steps:
        raise UserError(f"warmup_steps = {config.warmup_steps} is longer than max_steps = "
                        f"{config.max_steps}: add --warmup_steps={config.max_steps // 10}")
    distributed.check_accumulation(config)
    if config.keep_checkpoints < 1:
        raise UserError(f"keep_checkpoints = {config.keep_checkpoints}: expected 1 or more")
    try:
        sizes = BertConfig(**model_sizes(config))
        with torch.device("meta"):
            LanguageModel(sizes)
    except AssertionError as error:
        raise UserError(str(error)) from None
    if config.seq_len > sizes.max_len:
        raise UserError(f"seq_len = {config.seq_len}: {config.model} has {sizes.max_len} positions")


if __name__ == "__main__":
    distributed.run_ranks(lambda: main(sys.argv[1:]))
