"""
Pretrain BERT by masked language modelling, with or without product-key memory in some layers.

$ python pretrain.py configs/demo.py                  # minutes on two CPU cores, no network
$ python pretrain.py configs/demo_resm_init.py        # run demo.py first; gives its model a memory
$ python pretrain.py configs/base_resm_init.py        # the paper's system, on a GPU

The same command goes on where a stopped run left off. --key=value overrides any setting below. Only
one process at a time trains in a folder.
"""
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from lib import training as warn
from lib.corpus import CausalBatches, MaskedBatches, causal_heldout, masked_heldout
from lib.device import duration, use_device
from lib.distributed import (
    count_parameters,
    first_rank_first,
    my_micro_batches,
    run_ranks,
)
from lib.errors import UserError, need, run_script
from lib.files import lock
from lib.run import Run
from lib.settings import load_settings
from lib.training import State, Trainer, catch_signals, flops_per_token, status_after
from lib.usage import describe_evaluation, evaluate_language_model, open_corpus
from lib.weights import init_from, load_weights, read_weights
from model import SIZES, BertConfig, LanguageModel, value_tables


@dataclass
class Config:
    # defaults are the paper's (section 5), or Devlin et al.'s where the paper says nothing
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
    memory_layers: tuple = ()  # layers with a memory, counted from 1: (4, 8) of 12
    alpha: float = 1.0  # weight of the FFN; 0: the memory replaces it (PKM)
    beta: float = 1.0  # weight of the memory; with alpha = 1: residual memory (ResM)
    n_keys: int = 512  # a memory has n_keys^2 slots
    memory_heads: int = 4  # heads of a memory
    topk: int = 32  # slots that each head reads
    key_dim: int = 256  # size of a head's key: two halves of key_dim / 2
    values: str = "random"  # initial values: random, or zero (the memory starts silent)
    init_from: str = ""  # a run, a Hugging Face folder, or a name: bert-base-uncased
    reinit_ffn: bool = False  # with init_from: draw memory layers' FFNs anew (ResM')
    # batch: batch_size x accumulation sequences a step
    seq_len: int = 512  # tokens of a sequence, with [CLS] and [SEP] if masked
    batch_size: int = 32  # sequences at a time on the device
    accumulation: int = 32  # batches per step: 32 x 32 = 1,024 sequences
    # optimization: AdamW; linear warm-up, then linear decay to 0
    max_steps: int = 500_000  # number of updates
    warmup_steps: int = 10_000  # updates until the learning rate is highest
    lr: float = 1e-4  # highest learning rate
    keys_lr: float = 1.0  # rate of the memory's sub-keys, as a factor of lr
    value_lr: float = 1e-3  # rate of the value tables, constant (our reading)
    weight_decay: float = 0.01  # biases, norms and memories have none
    grad_clip: float = 1.0  # largest norm of all gradients except the value tables'
    # watching: evaluations also come at steps 0, 1, 2, 4, ...
    log_interval: int = 10  # steps between log records
    eval_interval: int = 5000  # steps between evaluations
    eval_sequences: int = 1024  # held-out sequences at most
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
    names = [Path(arg).stem for arg in argv if arg.endswith(".py") and not arg.startswith("--")]
    run = Run(config.out or f"out/{(names or ['pretrain'])[0]}")
    with lock(run.folder, "trains there"):
        return prepare_and_train(config, run, argv)


def prepare_and_train(config, run, argv):
    """Prepare corpus, model and trainer, then train. Returns the exit status."""
    device, dtype = use_device(config.device, config.dtype)
    torch.manual_seed(config.seed)  # of the weights
    config = replace(config, device=str(device), dtype=str(dtype).removeprefix("torch."))
    checkpoint = run.newest_checkpoint()
    with first_rank_first():
        if config.dataset == "docs" and not Path("data/docs").exists():
            run_script("prepare_data.py", "docs", "--if_missing")
    start = run.folder if checkpoint else config.init_from
    corpus = open_corpus(config.dataset, *([start] if start else []))
    data = corpus.meta["sha256"]
    if checkpoint:
        run.check_settings(config, data)
    model, origin = make_model(config, corpus, checkpoint)
    causal = config.objective == "causal"
    make_batches = CausalBatches if causal else MaskedBatches
    make_heldout = causal_heldout if causal else masked_heldout
    held_out = make_heldout(corpus, "val", config.seq_len, config.batch_size,
                            config.eval_sequences)
    trainer = Trainer(config, model, make_batches(corpus, config), device, dtype,
                      flops_per_token(model, config.seq_len), keep=config.keep_checkpoints)
    print_sizes(config, corpus, trainer)

    state = trainer.restore(checkpoint) if checkpoint else State()
    if state.step >= config.max_steps:
        print(f"{run.folder} is at step {state.step:,} of {config.max_steps:,}: nothing to do; "
              "--max_steps=N goes on, --out=out/NAME starts anew")
        return 0
    if not checkpoint and run.last_step() >= config.checkpoint_interval:
        raise UserError(f"{run.folder}: its log has {run.last_step():,} steps, but no checkpoint "
                        "is left: start anew with --out=out/NAME")
    run.open(state.step, tensorboard=config.tensorboard)
    run.begin(config, corpus.folder / "vocab.txt", origin, data)
    signals = catch_signals()
    train(config, run, trainer, held_out, state, signals)
    if signals and state.step < config.max_steps:
        print(f"saved {run.newest_checkpoint()}; go on with: python pretrain.py {shlex.join(argv)}")
        return status_after(signals)
    print(f"done, {duration(state.elapsed)} of training: {run.newest_checkpoint()}")
    return 0


def train(config, run, trainer, held_out, state, signals):
    """Train to the end, and evaluate on the way."""
    usage_interval = config.usage_interval if value_tables(trainer.model) else 0

    def is_due(every, step):
        return every and (step % every == 0 or step == config.max_steps)

    def due(step):
        early = step < config.eval_interval and step & (step - 1) == 0  # 1, 2, 4, 8, ...
        tasks = {"log": is_due(config.log_interval, step),
                 "evaluate": (early or is_due(config.eval_interval, step)
                              or is_due(usage_interval, step)),
                 "save": is_due(config.checkpoint_interval, step)}
        return {task for task, now in tasks.items() if now}

    def evaluate(step):
        results, counts = evaluate_language_model(trainer.model, held_out, trainer.device,
                                                  trainer.dtype)
        run.log({"step": step, **results})
        print(f"step {step:,}: " + "\n  ".join(describe_evaluation(results)), flush=True)
        warn(run, config.max_steps)
        if step and is_due(usage_interval, step):
            run.write_usage(step, counts)

    if state.step == 0:
        evaluate(0)
    trainer.train(run, state, due, evaluate, signals)


def make_model(config, corpus, checkpoint):
    """Make a model with the checkpoint's weights, with init_from's, or with random ones. Returns
    the model and the run's origin (see init_from)."""
    model = LanguageModel(BertConfig(**model_sizes(config), vocab_size=corpus.vocab_size))
    if checkpoint:
        load_weights(model, read_weights(checkpoint)["weights"], checkpoint)
        return model, Run(checkpoint.parent).settings()
    if config.values == "zero":
        for table in value_tables(model).values():
            torch.nn.init.zeros_(table.weight)
    if config.init_from:
        return model, init_from(model, config.init_from, config.reinit_ffn)
    return model, {"init_checkpoint": "", "first_step": 0, "pooler_trained": False}


def model_sizes(config):
    """Return BertConfig's arguments: the named model's sizes, overridden by settings."""
    names = BertConfig.__dataclass_fields__.keys() & asdict(config).keys()
    given = {name: getattr(config, name) for name in names}
    own = {name: given[name] for name in ("n_layer", "n_head", "d_model", "d_ff") if given[name]}
    sizes = given | SIZES[config.model] | own | {"causal": config.objective == "causal"}
    if sizes["d_model"] != SIZES[config.model]["d_model"]:  # see model.SIZES
        sizes["init_std"] = 0.02 * (768 / sizes["d_model"]) ** 0.5
    return sizes


def check_config(config):
    """Raise UserError for settings that do not fit together, before anything is written."""
    if config.reinit_ffn and not config.init_from:
        raise UserError("reinit_ffn = True needs init_from: without it every FFN is new")
    if config.warmup_steps > config.max_steps:
        raise UserError(f"warmup_steps = {config.warmup_steps} is longer than max_steps = "
                        f"{config.max_steps}: the rate would rise to the end: add "
                        f"--warmup_steps={config.max_steps // 10}, or take more steps")
    my_micro_batches(config.accumulation, config.batch_size)  # raises if ranks cannot share them
    max_len = BertConfig(**model_sizes(config)).max_len  # raises for sizes that do not fit together
    if config.seq_len > max_len:
        raise UserError(f"seq_len = {config.seq_len}: {config.model} has {max_len} positions")
    if config.tensorboard:
        need("tensorboard", "tensorboard = True")


def print_sizes(config, corpus, trainer):
    """Print the sizes of corpus, model, batch and training, for a person to check."""
    tokens, per_step = corpus.meta["tokens"], trainer.batches.size
    print(f"corpus {corpus.name}: {tokens['train']:,} training tokens, {tokens['val']:,} held out, "
          f"vocabulary {corpus.vocab_size:,}\n"
          f"unigram perplexity of the held-out text: {corpus.meta['unigram_perplexity']:.2f}\n"
          f"model {config.model}: {count_parameters(trainer.model):,} parameters\n"
          f"{config.max_steps:,} steps of {config.batch_size} x {config.accumulation} sequences, "
          f"{per_step:,} tokens: {trainer.batches.epochs(config.max_steps):.1f} epochs")


if __name__ == "__main__":
    run_ranks(lambda: main(sys.argv[1:]))
