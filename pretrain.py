"""
Pretrain BERT by masked language modelling, with or without product-key memory in some layers.

$ python pretrain.py configs/demo.py                  # minutes on two CPU cores, no network
$ python pretrain.py configs/demo_resm_init.py        # run demo.py first; gives its model a memory
$ python pretrain.py configs/base_resm_init.py        # the paper's system, on a GPU

The same command goes on where a stopped run left off. --key=value overrides any setting below.
"""
import functools
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lib import ranks, training
from lib.corpus import (
    MASKS,
    ORDER,
    Corpus,
    causal_heldout,
    mask_tokens,
    masked_heldout,
    open_corpus,
)
from lib.device import autocast, to_device, use_device, wants_compile
from lib.files import lock
from lib.run import Run
from lib.settings import UserError, check_choice, load_settings, run_script
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
    model: str = ""  # demo, distil, base or large: its sizes; empty: init_from's, or base's
    n_layer: int = 0  # number of layers; 0: the model's
    n_head: int = 0  # attention heads; 0: the model's
    d_model: int = 0  # width; 0: the model's
    d_ff: int = 0  # width of the FFN; 0: the model's
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
    grad_clip: float = 1.0  # largest norm without the values' (our reading); 0: any
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

    MAY_BE_ZERO = ("seed", "n_layer", "n_head", "d_model", "d_ff", "dropout", "alpha", "beta",
                   "warmup_steps", "keys_lr", "value_lr", "weight_decay", "grad_clip",
                   "usage_interval")
    AT_MOST_ONE = ("dropout",)
    # settings that you may change when resuming
    MAY_CHANGE = ("out", "max_steps", "log_interval", "eval_interval", "eval_sequences",
                  "usage_interval", "checkpoint_interval", "keep_checkpoints", "tensorboard",
                  "device", "compile")


def main(argv):
    if not argv:
        raise UserError("which config? python pretrain.py configs/demo.py; --help lists settings")
    config = load_settings(Config, argv)
    name = next((Path(arg).stem for arg in argv if arg.endswith(".py")), "pretrain")
    run = Run(config.out or f"out/{name}")
    initial = run.folder if run.newest_checkpoint() else config.init_from
    sizes = check_config(config, read_weights(initial)["config"] if initial else None)
    with lock(run.folder, "trains there"):
        return train(config, run, sizes, argv)


def train(config, run, sizes, argv):
    """Train a new run, or go on with a stopped one. Returns the exit status.

    sizes: a BertConfig, for any vocabulary.
    """
    device, dtype = use_device(config.device, config.dtype)
    config = replace(config, device=str(device), dtype=str(dtype).removeprefix("torch."))

    # the text
    with ranks.first_rank_first():
        if config.dataset == "docs" and not Path("data/docs").exists():
            run_script("prepare_data.py", "docs")
    checkpoint = run.newest_checkpoint()
    initial = run.folder if checkpoint else config.init_from
    corpus = open_corpus(config.dataset, initial) if initial else Corpus(config.dataset)
    if checkpoint:
        run.check_settings(config, corpus.meta["sha256"])
    causal = config.objective == "causal"
    batches = CausalBatches(corpus, config) if causal else MaskedBatches(corpus, config)
    cut = causal_heldout if causal else masked_heldout
    heldout = cut(corpus, "val", config.seq_len, config.batch_size, config.eval_sequences)

    # the model
    torch.manual_seed(config.seed)
    model = LanguageModel(replace(sizes, vocab_size=corpus.vocab_size))
    if config.values == "zero":
        for table in value_tables(model).values():
            torch.nn.init.zeros_(table.weight)
    origin = {"init_checkpoint": "", "first_step": 0, "pooler_trained": False, "trained_on": []}
    if checkpoint:
        origin = run.settings()
        load_weights(model, read_weights(checkpoint)["weights"], checkpoint)
    elif config.init_from:
        origin = init_from(model, config.init_from, config.reinit_ffn)
    if not checkpoint and corpus.text not in origin["trained_on"]:
        origin["trained_on"].append(corpus.text)
    tokens = corpus.meta["tokens"]
    print(f"corpus {corpus.name}: {tokens['train']:,} training tokens, {tokens['val']:,} held out, "
          f"vocabulary {corpus.vocab_size:,}\n"
          f"unigram perplexity of the held-out text: {corpus.meta['unigram_perplexity']:.2f}\n"
          f"model of {sizes.n_layer} layers of width {sizes.d_model}: "
          f"{training.count_parameters(model):,} parameters\n"
          f"{config.max_steps:,} steps of {config.batch_size} x {config.accumulation} sequences, "
          f"{batches.size:,} tokens: {batches.epochs(config.max_steps):.1f} epochs")
    if ranks.get_world_size() > 1:
        from lib import sharding

        sharding.shard(model)
    model.to(device)
    # not with mode="reduce-overhead": a replayed CUDA graph keeps no reads of the memory
    compiled = torch.compile(model) if wants_compile(config.compile, device) else model

    # the optimizers
    dense, sparse = training.make_optimizers(model, config, device)  # sparse: of the value tables
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    state = {"step": 0, "elapsed": 0.0, "seconds": 0.0, "losses": []}
    if checkpoint:
        state = training.restore(checkpoint, dense, sparse, scaler)
    if state["step"] >= config.max_steps:
        print(f"{run.folder} is at step {state['step']:,} of {config.max_steps:,}: nothing to do; "
              "--max_steps=N goes on at a longer schedule's rate, --out=out/NAME starts anew")
        return 0

    run.open(config, corpus.folder / "vocab.txt", origin, corpus.meta["sha256"], state["step"])
    signals = training.catch_signals()
    micro_batches = ranks.my_micro_batches(config.accumulation)
    peak_share = training.share_of_peak(model, config.seq_len, device, dtype)
    if state["step"] == 0:
        evaluate(0, model, heldout, device, dtype, run)

    model.train()
    recent = []  # (loss, norm) of the steps since the last log, still on the device
    start = time.perf_counter()
    for step in range(state["step"], config.max_steps):
        training.set_rate(dense, config, step)
        loss = 0.0
        for micro in micro_batches:
            training.seed_dropout(config.seed, step, micro)
            batch = to_device(batches.get(step, micro), device)
            with autocast(device, dtype):
                part = compiled(**batch) * (1 / config.accumulation)
            scaler.scale(part).backward()
            loss += part.detach()
        if ranks.get_world_size() > 1:
            loss = sharding.merge(model, loss, len(micro_batches))
        norm = training.update(dense, sparse, scaler, config.grad_clip)

        recent.append((loss, norm))
        done = step + 1  # updates
        stopped = ranks.any_signalled(signals)
        log = training.is_due(done, config.log_interval, config)
        snapshot = config.usage_interval and training.is_due(done, config.usage_interval, config)
        early = done < config.eval_interval and done & (done - 1) == 0  # 1, 2, 4, 8, ...
        assess = early or snapshot or training.is_due(done, config.eval_interval, config)
        save = stopped or training.is_due(done, config.checkpoint_interval, config)
        if not (log or assess or save):
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
        if assess:
            counts = evaluate(done, model, heldout, device, dtype, run)
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
    print(f"done, {training.duration(state['elapsed'])} of training: {saved}")
    return 0


def evaluate(step, model, heldout, device, dtype, run):
    """Evaluate, log and print. Returns the counts of the slots' reads."""
    results, counts = training.evaluate_language_model(model, heldout, device, dtype)
    run.log({"step": step, **results})
    lines = training.describe_evaluation(results)
    print(f"step {step:,}: " + "\n  ".join(lines), flush=True)
    return counts


class MaskedBatches:
    """Make training batches for a masked language model.

    The text is cut into sequences without a gap, across the ends of documents (our reading). Every
    epoch cuts at another offset, and reads the sequences in another order.
    """

    unit = "tokens"
    added = 2  # tokens of a sequence that are not from the text: [CLS] and [SEP]

    def __init__(self, corpus, config):
        self.corpus = corpus
        self.config = config
        self.size = config.accumulation * config.batch_size * config.seq_len  # tokens of a step
        self.tokens = corpus.split("train")
        self.width = config.seq_len - self.added
        self.per_epoch = len(self.tokens) // self.width - 1  # - 1: room for the offset
        if self.per_epoch < 1:
            raise UserError(f"data/{corpus.name}/train.bin: {len(self.tokens)} tokens are too few "
                            f"for sequences of {config.seq_len}: shorter seq_len, or more text")

    def epochs(self, steps):
        """Return how often `steps` steps go through the text."""
        return steps * self.config.accumulation * self.config.batch_size / self.per_epoch

    def get(self, step, micro):
        """Return a micro-batch: arrays ids, positions and labels by name (see mask_tokens)."""
        rng = np.random.default_rng([self.config.seed, MASKS, step, micro])
        text = self.read(step, micro)[:, :-1]
        return mask_tokens(self.corpus.enclose(text), rng, self.corpus)

    def read(self, step, micro):
        """Return the text of a micro-batch, and a token more: int64 (batch, width + 1)."""
        rows = []
        first = (step * self.config.accumulation + micro) * self.config.batch_size
        for number in range(first, first + self.config.batch_size):
            epoch, place = divmod(number, self.per_epoch)
            order, offset = draw_epoch(self.config.seed, epoch, self.per_epoch, self.width)
            start = offset + order[place] * self.width
            rows.append(self.tokens[start:start + self.width + 1])
        return np.array(rows, np.int64)


@functools.lru_cache(maxsize=1)
def draw_epoch(seed, epoch, sequences, width):
    """Draw the order of an epoch's sequences, and the offset of its cuts."""
    rng = np.random.default_rng([seed, ORDER, epoch])
    return rng.permutation(sequences), rng.integers(width)


class CausalBatches(MaskedBatches):
    """Make training batches for a causal language model, as in Lample et al. (2019).

    A sequence is seq_len tokens as they stand in the text. Attention goes across documents.
    """

    added = 0

    def get(self, step, micro):
        """Return a micro-batch: ids and labels (the next tokens), int64 (batch, seq_len)."""
        rows = self.read(step, micro)
        return {"ids": rows[:, :-1], "labels": rows[:, 1:]}


def bert_config(config, vocab_size=30522, initial=None):
    """Make the BertConfig: the sizes of a model, overridden by settings.

    The model is the one that the settings name, else that of the BertConfig `initial`, else base.
    """
    model = initial or BertConfig()
    if config.model:
        model = BertConfig(**SIZES[config.model])
    given = {"causal": config.objective == "causal", "vocab_size": vocab_size}
    for name, value in asdict(config).items():
        if hasattr(model, name) and (value or name not in SIZES["base"]):
            given[name] = value
    sizes = replace(model, **given)
    if sizes.d_model != model.d_model:  # see model.SIZES
        sizes.init_std = 0.02 * (768 / sizes.d_model) ** 0.5
    return sizes


def check_config(config, initial=None):
    """Return the BertConfig of the settings. UserError if they do not fit together.

    initial: the BertConfig of the model to start from, or None.
    """
    check_choice("objective", config.objective, ("masked", "causal"))
    check_choice("model", config.model or "base", SIZES)
    check_choice("values", config.values, ("random", "zero"))
    if config.reinit_ffn and not config.init_from:
        raise UserError("reinit_ffn = True needs init_from: without it every FFN is new")
    if config.warmup_steps > config.max_steps:
        raise UserError(f"warmup_steps = {config.warmup_steps} is longer than max_steps = "
                        f"{config.max_steps}: add --warmup_steps=N")
    ranks.check_accumulation(config)
    try:
        sizes = bert_config(config, initial=initial)
        with torch.device("meta"):
            LanguageModel(sizes)
    except AssertionError as error:
        raise UserError(str(error)) from None
    if not 3 <= config.seq_len <= sizes.max_len:  # [CLS], a token, [SEP]
        raise UserError(f"seq_len = {config.seq_len}: expected 3 to {sizes.max_len}, the positions "
                        "of the model")
    return sizes


if __name__ == "__main__":
    ranks.run_ranks(lambda: main(sys.argv[1:]))
