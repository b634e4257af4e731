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
from lib.corpus import MASKS, ORDER, Corpus, causal_heldout, mask_tokens, masked_heldout
from lib.device import set_up_device
from lib.files import lock
from lib.run import Run
from lib.settings import UserError, check_choice, from_zero, load_settings, run_script, share
from lib.weights import init_from, memory_settings, open_corpus, read_weights
from model import SIZES, BertConfig, LanguageModel, value_tables


@dataclass
class Settings:
    # defaults are the paper's (section 5), or Devlin et al.'s where it says nothing (our reading)
    out: str = ""  # folder of the run; empty: out/<config file's name>
    dataset: str = "wikibooks"  # data/<dataset>, made by prepare_data.py
    seed: int = from_zero(0)  # for weights, data order, masks and dropout
    objective: str = "masked"  # masked or causal: what to predict
    # model; settings of a memory that you do not give are init_from's
    model: str = ""  # demo, distil, base or large: its sizes; empty: init_from's, or base's
    n_layer: int = from_zero(0)  # number of layers; 0: the model's
    n_head: int = from_zero(0)  # attention heads; 0: the model's
    d_model: int = from_zero(0)  # width; 0: the model's
    d_ff: int = from_zero(0)  # width of the FFN; 0: the model's
    dropout: float = share(0.1)  # in embeddings, attention and FFN
    memory_layers: tuple = ()  # with a memory, counted from 1: (4, 8) of 12; 5.1 tries no others
    alpha: float = from_zero(1.0)  # weight of the FFN; 0: the memory replaces it (PKM)
    beta: float = from_zero(1.0)  # weight of the memory; with alpha = 1: residual memory (ResM)
    n_keys: int = 512  # a memory has n_keys^2 slots
    memory_heads: int = 4  # heads of a memory
    topk: int = 32  # slots that each head reads
    key_dim: int = 256  # size of a head's key: two halves of key_dim / 2
    init_values: str = "random"  # of a new memory: random, or zero (the memory starts silent)
    init_from: str = ""  # a run, a Hugging Face folder, or a name: bert-base-uncased
    reinit_ffn: bool = False  # with init_from: new FFNs in memory layers alone (ResM'; our reading)
    # batch: batch_size x accumulation sequences a step
    seq_len: int = 512  # tokens of a sequence, with [CLS] and [SEP] if masked
    batch_size: int = 32  # sequences at a time on the device
    accumulation: int = 32  # batches in a step: 32 x 32 = 1,024 sequences
    # optimization: AdamW; linear warm-up, then linear decay to 0
    max_steps: int = 500_000  # number of updates
    warmup_steps: int = from_zero(10_000)  # updates until the learning rate is highest
    lr: float = 1e-4  # highest learning rate
    keys_lr: float = from_zero(1.0)  # rate of the memory's sub-keys, as a factor of lr
    value_lr: float = from_zero(1e-3)  # rate of the value tables, constant (our reading)
    weight_decay: float = from_zero(0.01)  # biases, norms and memories have none
    grad_clip: float = from_zero(1.0)  # largest norm of the dense gradients (our reading); 0: any
    # watching: evaluations also come at steps 0, 1, 2, 4, ...
    log_interval: int = 10  # steps between log records
    eval_interval: int = 5000  # steps between evaluations
    eval_sequences: int = 1024  # held-out sequences at most; usage counts their reads (our reading)
    usage_interval: int = from_zero(100_000)  # steps between snapshots of slot usage; 0: none
    checkpoint_interval: int = 1000  # steps between checkpoints
    keep_checkpoints: int = 2  # only the newest ones stay
    tensorboard: bool = False  # curves: tensorboard --logdir out
    # machine
    device: str = "auto"  # auto, cuda, mps or cpu
    dtype: str = "auto"  # of matrix products: auto, float32, bfloat16 or float16
    compile: str = "auto"  # on, off, or auto: on CUDA

    # settings that you may change when resuming
    MAY_CHANGE = ("out", "max_steps", "log_interval", "eval_interval", "eval_sequences",
                  "usage_interval", "checkpoint_interval", "keep_checkpoints", "tensorboard",
                  "device", "compile")


def main(argv):
    if not argv:
        raise UserError("which config? python pretrain.py configs/demo.py; --help lists settings")
    settings = load_settings(Settings, argv)
    name = next((Path(arg).stem for arg in argv if arg.endswith(".py")), "pretrain")
    run = Run(settings.out or f"out/{name}")
    with lock(run.folder, "trains there"):
        checkpoint = ranks.of_first_rank(run.newest_checkpoint())
        path = checkpoint or settings.init_from
        initial = read_weights(path)["config"] if path else None
        memory = memory_settings(initial)
        if checkpoint:  # init_from's memory gave the settings when the run began
            memory = run.settings().get("init_memory", {})
        settings = inherit(settings, memory)
        config = bert_config(settings, initial=initial)
        check_fit(settings, config, memory)
        device, dtype = set_up_device(settings.device, settings.dtype,
                                      memory=config.memory_layers)
        settings = replace(settings, device=str(device), dtype=str(dtype).removeprefix("torch."))
        state, signals = train(settings, config, run, checkpoint)
    return report(settings, run, state, signals, argv)


def set_up(settings, config, run, checkpoint):
    """Open the text, make the model and what trains it, and open the run.

    config: a BertConfig, for any vocabulary. checkpoint: where the run goes on, or None. Returns
    the training batches, the held-out batches, the model, and what training.prepare() returns.
    """
    if settings.dataset == "docs" and ranks.first_rank() and not Path("data/docs").exists():
        run_script("prepare_data.py", "docs")
    ranks.barrier()  # the other ranks wait until it is there
    initial = checkpoint or settings.init_from
    corpus = open_corpus(settings.dataset, initial) if initial else Corpus(settings.dataset)
    if checkpoint:
        run.check_settings(settings, corpus.meta["sha256"])
    causal = settings.objective == "causal"
    batches = CausalBatches(corpus, settings) if causal else MaskedBatches(corpus, settings)
    cut = causal_heldout if causal else masked_heldout
    heldout = cut(corpus, "val", settings.seq_len, settings.batch_size, settings.eval_sequences)

    torch.manual_seed(settings.seed)
    model = LanguageModel(replace(config, vocab_size=corpus.vocab_size))
    if settings.init_values == "zero":
        for table in value_tables(model).values():
            torch.nn.init.zeros_(table.weight)
    origin = {"init_checkpoint": "", "init_memory": {}, "first_step": 0, "pooler_trained": False,
              "trained_on": []}
    if checkpoint:
        model.load_state_dict(read_weights(checkpoint)["weights"])
    elif settings.init_from:
        origin = init_from(model, settings.init_from, settings.reinit_ffn)
    if corpus.text not in origin["trained_on"]:
        origin["trained_on"].append(corpus.text)
    tokens = corpus.meta["tokens"]
    print(f"corpus {corpus.name}: {tokens['train']:,} training tokens, {tokens['val']:,} held out, "
          f"vocabulary {corpus.vocab_size:,}\n"
          f"unigram perplexity of the held-out text: {corpus.meta['unigram_perplexity']:.2f}\n"
          f"model of {config.n_layer} layers of width {config.d_model}: "
          f"{training.count_parameters(model):,} parameters\n"
          f"{settings.max_steps:,} steps of {settings.batch_size} x {settings.accumulation} "
          f"sequences, {batches.size:,} tokens: {batches.epochs(settings.max_steps):.1f} epochs")
    net, optimizers, state = training.prepare(model, settings, checkpoint)
    if state["step"] < settings.max_steps:
        run.open(settings, corpus.folder / "vocab.txt", origin, corpus.meta["sha256"],
                 state["step"])
    return batches, heldout, model, net, optimizers, state


def train(settings, config, run, checkpoint):
    """Train to the last step, or to the first signal. Returns the state then, and the signals."""
    batches, heldout, model, net, optimizers, state = set_up(settings, config, run, checkpoint)
    signals = training.catch_signals()
    peak_share = training.share_of_peak(model, settings)
    if state["step"] == 0:
        evaluate(0, model, heldout, settings, run)

    model.train()
    recent, start = [], time.perf_counter()  # what step() returned since the last record
    for step in range(state["step"], settings.max_steps):
        training.set_rate(optimizers, settings, step)
        recent.append(training.step(step, net, batches, optimizers, settings))

        done = step + 1  # updates
        stopped = ranks.any_signalled(signals)
        log = training.is_due(done, settings.log_interval, settings)
        snapshot = settings.usage_interval and training.is_due(done, settings.usage_interval,
                                                               settings)
        early = done < settings.eval_interval and done & (done - 1) == 0  # 1, 2, 4, 8, ...
        assess = early or snapshot or training.is_due(done, settings.eval_interval, settings)
        save = stopped or training.is_due(done, settings.checkpoint_interval, settings)
        if not (log or assess or save):
            continue

        norm = training.take_stock(recent, state, settings, done, start)
        if log:
            training.log_training(run, state, settings, batches, norm, peak_share)
        if assess:
            counts = evaluate(done, model, heldout, settings, run)
            if snapshot and counts:  # a model without memory has none
                run.write_usage(done, counts)
        if save:
            files = training.checkpoint_files(model, (), optimizers, state)
            run.save_checkpoint(done, files, settings.keep_checkpoints)
        if stopped:
            break
        recent, start = [], time.perf_counter()
    return state, signals


def report(settings, run, state, signals, argv):
    """Print where the run is now. Returns the exit status."""
    saved = run.newest_checkpoint()
    if state["step"] < settings.max_steps:
        print(f"saved {saved}; go on with: python pretrain.py {shlex.join(argv)}")
        return training.status_after(signals)
    print(f"done, {training.duration(state['elapsed'])} of training: {saved} (--max_steps=N goes "
          "on at a longer schedule's rate, --out=out/NAME starts anew)")
    return 0


def evaluate(step, model, heldout, settings, run):
    """Evaluate, log and print. Returns the counts of the slots' reads."""
    results, counts = training.evaluate_language_model(
        model, heldout, torch.device(settings.device), getattr(torch, settings.dtype))
    run.log({"kind": "eval", "step": step, **results})
    print(f"step {step:,}: perplexity {results['perplexity']:.2f}, "
          f"accuracy {results['accuracy']:.1%}")
    for layer, m in results["layers"].items():
        print(f"  layer {layer}: top-1 MU {m['top1_mu']:.1%} (uniform use: "
              f"{m['top1_mu_uniform']:.1%}), KL_u {m['kl_u']:.2f}, KL_w {m['kl_w']:.2f}, "
              f"{m['accesses']:,} accesses", flush=True)
    return counts


class MaskedBatches:
    """Make training batches for a masked language model.

    The text is cut into sequences without a gap, across the ends of documents (our reading). Every
    epoch cuts at another offset, and reads the sequences in another order.
    """

    unit = "tokens"
    added = 2  # tokens of a sequence that are not from the text: [CLS] and [SEP]

    def __init__(self, corpus, settings):
        self.corpus = corpus
        self.settings = settings
        self.sequences = settings.accumulation * settings.batch_size  # of a step
        self.size = self.sequences * settings.seq_len  # tokens of a step
        self.tokens = corpus.split("train")
        self.length = settings.seq_len - self.added  # tokens of the text in a sequence
        self.per_epoch = len(self.tokens) // self.length - 1  # - 1: room for the offset
        if self.per_epoch < 1:
            raise UserError(f"data/{corpus.name}/train.bin: {len(self.tokens)} tokens are too few "
                            f"for sequences of {settings.seq_len}: shorter seq_len, or more text")

    def epochs(self, steps):
        """Return how often `steps` steps go through the text."""
        return steps * self.sequences / self.per_epoch

    def get(self, step, micro):
        """Return a micro-batch and its weight in the step's loss.

        The batch has arrays ids, positions and labels by name (see mask_tokens).
        """
        rng = np.random.default_rng([self.settings.seed, MASKS, step, micro])
        text = self.read(step, micro)[:, :-1]
        batch = mask_tokens(self.corpus.enclose(text), rng, self.corpus)
        return batch, 1 / self.settings.accumulation

    def read(self, step, micro):
        """Return the text of a micro-batch, and a token more: int64 (batch, length + 1)."""
        rows = []
        size = self.settings.batch_size
        first = step * self.sequences + micro * size
        for number in range(first, first + size):
            epoch, place = divmod(number, self.per_epoch)
            order, offset = draw_epoch(self.settings.seed, epoch, self.per_epoch, self.length)
            start = offset + order[place] * self.length
            rows.append(self.tokens[start:start + self.length + 1])
        return np.array(rows, np.int64)


@functools.lru_cache(maxsize=1)
def draw_epoch(seed, epoch, sequences, length):
    """Draw the order of an epoch's sequences, and the offset of its cuts."""
    rng = np.random.default_rng([seed, ORDER, epoch])
    return rng.permutation(sequences), rng.integers(length)


class CausalBatches(MaskedBatches):
    """Make training batches for a causal language model, as in Lample et al. (2019).

    A sequence is seq_len tokens as they stand in the text. Attention goes across documents.
    """

    added = 0

    def get(self, step, micro):
        """Return a micro-batch and its weight in the step's loss.

        The batch has ids and labels (the next tokens), int64 (batch, seq_len).
        """
        rows = self.read(step, micro)
        return {"ids": rows[:, :-1], "labels": rows[:, 1:]}, 1 / self.settings.accumulation


def bert_config(settings, vocab_size=30522, initial=None):
    """Make the BertConfig: the sizes of a model, overridden by settings.

    The model is the one that the settings name, else that of the BertConfig `initial`, else base.
    UserError if the sizes do not fit together.
    """
    check_choice("objective", settings.objective, ("masked", "causal"))
    check_choice("model", settings.model or "base", SIZES)
    model = initial or BertConfig()
    if settings.model:
        model = BertConfig(**SIZES[settings.model])
    given = {"causal": settings.objective == "causal", "vocab_size": vocab_size}
    for name, value in asdict(settings).items():
        if hasattr(model, name) and (value or name not in SIZES["base"]):
            given[name] = value
    try:
        config = replace(model, **given)
        with torch.device("meta"):
            LanguageModel(config)
    except ValueError as error:
        raise UserError(str(error)) from None
    if config.d_model != model.d_model:  # see model.SIZES
        config.init_std = 0.02 * (768 / config.d_model) ** 0.5
    return config


def inherit(settings, memory):
    """Take from a trained memory what was not given. memory: see memory_settings."""
    return replace(settings, **{name: memory[name] for name in memory.keys() - settings.given})


def check_fit(settings, config, memory=None):
    """Raise UserError for settings that do not fit together, or not the model's BertConfig.

    memory: see memory_settings; of the initial model.
    """
    check_choice("init_values", settings.init_values, ("random", "zero"))
    trained = set(memory["memory_layers"]) if memory else set()
    if settings.init_values == "zero" and trained and trained.issuperset(config.memory_layers):
        raise UserError("init_values = zero is for a new memory: init_from's keeps its values")
    if settings.reinit_ffn and not settings.init_from:
        raise UserError("reinit_ffn = True needs init_from: without it every FFN is new")
    if settings.warmup_steps > settings.max_steps:
        raise UserError(f"warmup_steps = {settings.warmup_steps} is longer than max_steps = "
                        f"{settings.max_steps}: add --warmup_steps=N")
    ranks.check_accumulation(settings)
    if not 3 <= settings.seq_len <= config.max_len:  # [CLS], a token, [SEP]
        raise UserError(f"seq_len = {settings.seq_len}: expected 3 to {config.max_len}, the "
                        "positions of the model")


if __name__ == "__main__":
    ranks.run_ranks(lambda: main(sys.argv[1:]))
