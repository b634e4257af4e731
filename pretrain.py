"""
Pretrain BERT with masked language modelling: plain, or with product-key memory in some layers. Or
the same network as a causal language model.

$ python pretrain.py configs/demo.py                  # minutes on two CPU cores, no network
$ python pretrain.py configs/demo_resm_init.py        # after it: a residual memory added to that
$ python pretrain.py configs/base_resm_init.py        # the paper's system, on a GPU

The same command goes on where a stopped run left off; --key=value overrides any setting below. One
process at a time trains in a folder.
"""
import json
import shlex
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch

from lib.common.device import choose_device, keep_freed_memory
from lib.common.errors import UserError, need, run_script
from lib.common.files import discard, load_file, lock
from lib.common.settings import at_least, load_settings
from lib.corpus.batches import CausalBatches, Corpus, MaskedBatches, causal_heldout, masked_heldout
from lib.corpus.vocabulary import read_vocab, vocab_hash
from lib.distributed.processes import first_rank_first, get_world_size, run_ranks, set_timeout
from lib.distributed.sharded_values import count_parameters
from lib.slot_usage.evaluation import describe_evaluation, evaluate_language_model
from lib.training.run import check_same_run, open_log, read_settings, write_settings, write_usage
from lib.training.trainer import Trainer, catch_signals, flops_per_token, new_state
from lib.weights.checkpoint import find_checkpoint, find_weights, init_from, load_weights
from model import SIZES, BertConfig, MaskedLM, value_tables


@dataclass
class Config:
    # the run; the defaults are the paper's (section 5), or Devlin et al.'s where it is silent
    out: str = ""  # its folder; by default out/<name of the config file>
    dataset: str = "wikibooks"  # data/<dataset>, made by prepare_data.py
    seed: int = 0  # of weights, data order, masks and dropout
    objective: str = "masked"  # or causal: predict the next token, at every position
    # model
    model: str = "base"  # one of model.SIZES: base, large, distil, demo
    n_layer: int = 0  # 0: as in the named model; so in the next three
    n_head: int = 0  # of self-attention
    d_model: int = 0  # width
    d_ff: int = 0  # width of the FFN
    dropout: float = 0.1  # of embeddings, attention and FFN
    memory_layers: tuple = ()  # counted from 1: (4, 8) of 12 layers
    alpha: float = 1.0  # of the FFN: 0 replaces it by the memory (PKM)
    beta: float = 1.0  # of the memory: with alpha = 1 it is added to the FFN (ResM)
    n_keys: int = 512  # n_keys^2 slots
    memory_heads: int = 4  # heads of the memory
    topk: int = 32  # slots that a head reads
    key_dim: int = 256  # of a head: two sub-keys of half of it
    init_from: str = ""  # a run, a folder in Hugging Face layout, or bert-base-uncased and such
    reinit_ffn: bool = False  # with init_from: draw the FFN of memory layers anew (ResM')
    # batch: batch_size x accumulation sequences a step
    seq_len: int = 512  # tokens; of a masked model with [CLS] and [SEP]
    batch_size: int = 32  # sequences at a time on the device
    accumulation: int = 32  # 32 x 32 = 1,024 sequences; torchrun's ranks share them
    # optimization: AdamW; linear warm-up, then linear decay to 0
    max_steps: int = 500_000  # updates
    warmup_steps: int = 10_000  # of max_steps
    lr: float = 1e-4  # the highest, at the end of the warm-up
    value_lr: float = 1e-3  # of the value tables, constant (our reading)
    weight_decay: float = 0.01  # of matrices; none of biases, norms and memories
    grad_clip: float = 1.0  # norm of all gradients but the value tables'
    # watching; eval also comes at steps 0, 1, 2, 4, 8, ... below eval_interval
    log_interval: int = 10  # steps; here and below
    eval_interval: int = 5000  # on held-out text
    eval_sequences: int = 1024  # held-out sequences at most, evenly spread
    usage_interval: int = 100_000  # steps between usage snapshots (Figure 2); 0: none
    checkpoint_interval: int = 1000  # out/<run>/step_<n>
    keep_checkpoints: int = 2  # the newest ones
    tensorboard: bool = False  # also write its curves: tensorboard --logdir out
    dry_run: bool = False  # one step and one evaluation, nothing written
    eval_only: bool = False  # evaluate the newest checkpoint or the initial model, no more
    # machine
    device: str = "auto"  # cuda, mps, cpu
    dtype: str = "auto"  # float32, bfloat16, float16
    compile: str = "auto"  # on, off; auto: on CUDA
    rank_timeout: int = 600  # seconds that torchrun's processes wait for each other


OBJECTIVES = {"masked": (MaskedBatches, masked_heldout), "causal": (CausalBatches, causal_heldout)}
# Settings that may change when a run is resumed, besides training.NO_EFFECT
MAY_CHANGE = {"max_steps", "eval_interval", "eval_sequences", "usage_interval", "keep_checkpoints",
              "dry_run", "eval_only"}


def start_model(config, sizes, corpus, checkpoint):
    """A model with the checkpoint's weights, with init_from's, or with random ones. Returns it and
    what config.json keeps of where the run started: init_checkpoint, a path or '', and first_step,
    the steps that the initial model had been trained for."""
    model = MaskedLM(BertConfig(**{**sizes, "vocab_size": corpus.vocab_size}))
    if checkpoint:
        weights = load_file(checkpoint / "model.pt", mmap=True)["weights"]
        load_weights(model, weights, checkpoint)
        before = read_settings(checkpoint.parent)
        return model, {key: before[key] for key in ("init_checkpoint", "first_step")}
    if not config.init_from:
        return model, {"init_checkpoint": "", "first_step": 0}
    initial, vocab = find_weights(config.init_from)
    check_vocabulary(config.init_from, vocab, corpus)
    init_from(model, initial, config.reinit_ffn)
    origin = {"init_checkpoint": str(initial), "first_step": 0}
    if (initial / "state.pt").is_file():  # a run of ours
        before = read_settings(initial.parent)
        steps = load_file(initial / "state.pt")["step"]
        origin["first_step"] = before["first_step"] + steps
        if steps < before["max_steps"]:
            print(f"warning: {initial} is of an unfinished run: {steps:,} of "
                  f"{before['max_steps']:,} steps")
    return model, origin


def check_vocabulary(source, vocab, corpus):
    """Weights mean nothing under another vocabulary than the one they were trained with."""
    if vocab_hash(read_vocab(vocab)) != corpus.tokenizer_hash:
        raise UserError(f"{source} was trained with another vocabulary than data/{corpus.name}'s: "
                        f"prepare the corpus with --vocab {vocab}, or start from weights of its "
                        "vocabulary with --init_from")


def train(config, out, trainer, held_out, state):
    """Train to the end, with evaluations; everything is written to the folder `out`. Returns the
    number of the signal that stopped it, or None."""
    def evaluation(step):
        results, counts = evaluate_language_model(trainer.model, held_out, trainer.device, trainer.dtype)
        print(json.dumps({"step": step, **results}), file=log)
        print(f"step {step:,}: " + "\n  ".join(describe_evaluation(results)), flush=True)
        return counts

    signals, log = catch_signals(), open_log(out, state["step"], config.tensorboard)
    has_memory = bool(value_tables(trainer.model))
    if state["step"] == 0:
        evaluation(0)
    for step, todo in trainer.train(out, state, log, lambda step: due(step, config), signals):
        usage_due = "usage" in todo and has_memory
        if "eval" in todo or usage_due:
            counts = evaluation(step)
            if usage_due:
                write_usage(out, step, counts)
    return signals[0] if signals else None


def due(step, config):
    """What is to be done after `step` steps: a set of 'log', 'eval', 'usage', 'save'."""
    every = {"log": config.log_interval, "eval": config.eval_interval,
             "usage": config.usage_interval, "save": config.checkpoint_interval}
    early = {"eval"} if step < config.eval_interval and step & (step - 1) == 0 else set()
    return early | {what for what, n in every.items()
                    if n and (step % n == 0 or step == config.max_steps)}


def report(config, corpus, trainer):
    """What is trained, on what, by how much: the arithmetic that a person wants to check."""
    parameters, tables = count_parameters(trainer.model), value_tables(trainer.model)
    values = get_world_size() * sum(table.weight.numel() for table in tables.values())
    tokens, per_step = corpus.meta["tokens"], trainer.batches.size
    print(f"corpus {corpus.name}: {tokens['train']:,} training tokens, {tokens['val']:,} held out, "
          f"vocabulary {corpus.vocab_size:,}\n"
          f"model {config.model}: {parameters:,} parameters, {values:,} of them in value tables\n"
          f"batch: {config.batch_size} sequences x {config.accumulation} accumulation = "
          f"{config.batch_size * config.accumulation:,} sequences = {per_step:,} tokens a step; "
          f"{config.max_steps:,} steps = {config.max_steps * per_step:,} tokens = "
          f"{trainer.batches.epochs(config.max_steps):.1f} epochs")
    print(f"unigram perplexity of the held-out text: {corpus.meta['unigram_perplexity']:.2f}")


def validate(config):
    """Refuse settings that cannot work before anything is written. Returns the BertConfig's."""
    lowest = {"seed": 0, "seq_len": 3, "batch_size": 1, "accumulation": 1, "max_steps": 1,
              "warmup_steps": 0, "lr": 0, "value_lr": 0, "weight_decay": 0, "grad_clip": 1e-9,
              "log_interval": 1, "eval_interval": 1, "eval_sequences": 1, "usage_interval": 0,
              "checkpoint_interval": 1, "keep_checkpoints": 1, "n_layer": 0, "n_head": 0,
              "d_model": 0, "d_ff": 0, "rank_timeout": 1}
    at_least(config, lowest)
    if config.reinit_ffn and not config.init_from:
        raise UserError("reinit_ffn = True: it goes with init_from, without it every FFN is new")
    for key, allowed in (("model", SIZES), ("objective", OBJECTIVES)):
        if getattr(config, key) not in allowed:
            raise UserError(f"{key} = {getattr(config, key)!r}: expected one of "
                            f"{', '.join(allowed)}")
    names = BertConfig.__dataclass_fields__.keys() & asdict(config).keys()
    given = {name: getattr(config, name) for name in names}
    sizes = {**given, **SIZES[config.model], "causal": config.objective == "causal",
             **{name: given[name] for name in ("n_layer", "n_head", "d_model", "d_ff")
                if given[name]}}
    if config.d_model:  # the best one goes with 1 / sqrt(width), see model.SIZES
        sizes["init_std"] = 0.02 * (768 / config.d_model) ** 0.5
    with torch.device("meta"):  # costs nothing, and finds what does not fit together
        most = MaskedLM(BertConfig(**sizes)).bert.config.max_len
    if config.seq_len > most:
        raise UserError(f"seq_len = {config.seq_len}: {config.model} has {most} positions")
    return sizes


def main(argv):
    if not argv:
        raise UserError("which config? python pretrain.py configs/demo.py; --help lists settings")
    config = load_settings(Config, argv)
    sizes = validate(config)
    if config.tensorboard:
        need("tensorboard", "tensorboard = True")
    set_timeout(config.rank_timeout)
    names = [Path(arg).stem for arg in argv if arg.endswith(".py") and not arg.startswith("--")]
    out = Path(config.out or f"out/{(names or ['pretrain'])[0]}")
    if out.exists() and not out.is_dir():
        raise UserError(f"out = {out}: a file is there, expected a folder")
    if config.dry_run or config.eval_only:  # nothing is written
        return work(config, sizes, out, argv)
    with lock(out, "trains there"):
        return work(config, sizes, out, argv)


def work(config, sizes, out, argv):
    """What the settings ask for, in the run's folder `out`. Returns the exit status."""
    device, dtype = choose_device(config.device, config.dtype, config.seed)
    keep_freed_memory(device)
    config.device, config.dtype = str(device), str(dtype).removeprefix("torch.")  # resolved
    with first_rank_first():
        if config.dataset == "docs" and not Path("data/docs").exists():
            run_script("prepare_data.py", "docs", "--if_missing")
    corpus = Corpus(config.dataset)
    checkpoint = None if config.dry_run else find_checkpoint(out)
    if checkpoint:
        check_vocabulary(out, out / "vocab.txt", corpus)
        check_same_run(config, out, MAY_CHANGE)
    model, origin = start_model(config, sizes, corpus, checkpoint)
    batches, evaluated = OBJECTIVES[config.objective]
    trainer = Trainer(config, model, batches(corpus, config), device, dtype,
                      flops_per_token(model, config.seq_len))
    held_out = evaluated(corpus, "val", config.seq_len, config.batch_size, config.eval_sequences)
    report(config, corpus, trainer)

    if config.dry_run:
        loss, norm = trainer.step(0)
        print(f"dry run: one step, loss {loss.item():.4f}, gradient norm {norm.item():.2f}")
    if config.dry_run or config.eval_only:
        print("\n  ".join(describe_evaluation(evaluate_language_model(model, held_out, device, dtype)[0])))
        return 0
    state = trainer.restore(checkpoint) if checkpoint else new_state()
    if state["step"] >= config.max_steps:
        print(f"{out} is at step {state['step']:,} of {config.max_steps:,}: nothing to do; "
              "--max_steps=N goes on, --out=out/NAME starts anew")
        return 0
    for file in out.glob("usage/step_*.npz"):
        if int(file.stem[5:]) > state["step"]:
            discard(file)  # of a killed process, after its last checkpoint
    write_settings(out, config, corpus.folder / "vocab.txt", origin)
    number = train(config, out, trainer, held_out, state)
    if number and state["step"] < config.max_steps:
        print(f"saved {find_checkpoint(out)}; go on with: python pretrain.py {shlex.join(argv)}")
        return 128 + number
    elapsed = timedelta(seconds=round(state["elapsed"]))
    print(f"done, {elapsed} of training: {find_checkpoint(out)}")
    return 0


if __name__ == "__main__":
    run_ranks(lambda: main(sys.argv[1:]))
