"""
Pretrain BERT with masked language modelling: plain, or with product-key memory in some layers.

$ python pretrain.py configs/demo.py                  # minutes on two CPU cores, no network
$ python pretrain.py configs/demo_resm_init.py        # after it: a residual memory added to that
$ python pretrain.py configs/base_resm_init.py        # the paper's system, on a GPU

The same command goes on where a stopped run left off; --key=value overrides any setting below.
"""
import json
import os
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

import model as bert
import prepare_data
from configs import (
    Failure,
    UserError,
    at_least,
    atomic,
    catch_signals,
    discard,
    keep_freed_memory,
    load,
    run,
    setup,
)
from measure import check_same_run, describe, evaluate, heldout, pack, read_settings, write_usage
from model import check_finite, learning_rate, open_log


@dataclass
class Config:
    # the run; the defaults are the paper's (section 5), or Devlin et al.'s where it is silent
    out: str = ""  # its folder; by default out/<name of the config file>
    dataset: str = "wikibooks"  # data/<dataset>, made by prepare_data.py
    seed: int = 0  # of weights, data order, masks and dropout
    # model
    model: str = "base"  # one of model.SIZES
    dropout: float = 0.1
    memory_layers: tuple = ()  # counted from 1: (4, 8) of 12 layers
    alpha: float = 1.0  # (alpha, beta): (0, 1) replaces the FFN by the memory (PKM),
    beta: float = 1.0  # (1, 1) adds the memory to it (ResM)
    n_keys: int = 512  # n_keys^2 slots
    memory_heads: int = 4
    topk: int = 32
    key_dim: int = 256
    init_from: str = ""  # a run, a folder in Hugging Face layout, or bert-base-uncased and such
    reinit_ffn: bool = False  # with init_from: draw the FFN of memory layers anew (ResM')
    # batch: batch_size x accumulation sequences a step
    seq_len: int = 512
    batch_size: int = 32  # sequences at a time on the device
    accumulation: int = 32  # 32 x 32 = 1,024 sequences
    # optimization: AdamW; linear warm-up, then linear decay to 0
    max_steps: int = 500_000
    warmup_steps: int = 10_000
    lr: float = 1e-4
    value_lr: float = 1e-3  # of the value tables, constant (our reading)
    weight_decay: float = 0.01
    grad_clip: float = 1.0  # norm of all gradients but the value tables'
    # watching; eval also comes at steps 0, 1, 2, 4, 8, ... below eval_interval
    log_interval: int = 10
    eval_interval: int = 5000
    eval_sequences: int = 1024  # held-out sequences at most, evenly spread
    usage_interval: int = 100_000  # steps between usage snapshots (Figure 2); 0: none
    checkpoint_interval: int = 1000
    keep_checkpoints: int = 2
    dry_run: bool = False  # one step and one evaluation, nothing written
    eval_only: bool = False  # evaluate the newest checkpoint or the initial model, no more
    # machine
    device: str = "auto"  # cuda, mps, cpu
    dtype: str = "auto"  # float32, bfloat16, float16
    compile: str = "auto"  # on, off; auto: on CUDA


# A run can be continued under other values of these; the rest make it another run.
MAY_CHANGE = {"out", "max_steps", "log_interval", "eval_interval", "eval_sequences", "device",
              "usage_interval", "checkpoint_interval", "keep_checkpoints", "compile", "dry_run",
              "eval_only"}


class Batches:
    """Training batches: which sequences, in which order, masked where, is a function of
    (seed, step), so a resumed run needs no data position. Every epoch cuts the text at another
    offset and goes through its sequences in another order."""

    def __init__(self, corpus, config, device):
        self.corpus, self.config, self.device = corpus, config, device
        self.tokens = corpus.split("train")
        self.per_epoch = len(self.tokens) // (config.seq_len - 2) - 1  # - 1: room for the offset
        if self.per_epoch < 1:
            raise UserError(f"data/{corpus.name}/train.bin: {len(self.tokens)} tokens are too few "
                            f"for sequences of {config.seq_len}: shorter seq_len, or more text")
        self.epoch = self.starts = None

    def start(self, number):
        """The place in the text of the number-th sequence of the whole training."""
        epoch, i = divmod(int(number), self.per_epoch)
        if epoch != self.epoch:
            rng = np.random.default_rng([self.config.seed, 1, epoch])
            width = self.config.seq_len - 2
            self.starts = rng.permutation(self.per_epoch) * width + rng.integers(width)
            self.epoch = epoch
        return self.starts[i]

    def get(self, step, micro):
        """inputs, positions, labels of one micro-batch (see mask_tokens), on the device."""
        size, corpus = self.config.batch_size, self.corpus
        first = (step * self.config.accumulation + micro) * size
        ids = pack(corpus, self.tokens, [self.start(first + i) for i in range(size)],
                   self.config.seq_len)
        rng = np.random.default_rng([self.config.seed, 2, step, micro])
        batch = bert.mask_tokens(ids, rng, corpus.vocab_size, corpus.special_ids, corpus.mask_id)
        if self.device.type == "cuda":
            return [part.pin_memory().to(self.device, non_blocking=True) for part in batch]
        return [part.to(self.device) for part in batch]


def start_model(config, sizes, corpus, checkpoint):
    """A model with the checkpoint's weights, with init_from's, or with random ones. Returns it and
    what config.json keeps of where the run started: init_checkpoint, a path or '', and first_step,
    the steps that the initial model had been trained for."""
    model = bert.MaskedLM(bert.BertConfig(**{**sizes, "vocab_size": corpus.vocab_size}))
    if checkpoint:
        weights = bert.load_file(checkpoint / "model.pt")["weights"]
        bert.load_weights(model, weights, checkpoint)
        before = read_settings(checkpoint.parent)
        return model, {key: before[key] for key in ("init_checkpoint", "first_step")}
    if not config.init_from:
        return model, {"init_checkpoint": "", "first_step": 0}
    initial, vocab = bert.find_weights(config.init_from)
    check_vocabulary(config.init_from, vocab, corpus)
    bert.init_from(model, initial, config.reinit_ffn)
    origin = {"init_checkpoint": str(initial), "first_step": 0}
    if (initial / "state.pt").is_file():  # a run of ours
        before, steps = read_settings(initial.parent), bert.load_file(initial / "state.pt")["step"]
        origin["first_step"] = before["first_step"] + steps
        if steps < before["max_steps"]:
            print(f"warning: {initial} is of an unfinished run: {steps:,} of "
                  f"{before['max_steps']:,} steps")
    return model, origin


def check_vocabulary(source, vocab, corpus):
    """Weights mean nothing under another vocabulary than the one they were trained with."""
    if prepare_data.vocab_hash(prepare_data.read_vocab(vocab)) != corpus.tokenizer_hash:
        raise UserError(f"{source} was trained with another vocabulary than data/{corpus.name}'s: "
                        f"prepare the corpus with --vocab {vocab}, or start from weights of its "
                        "vocabulary with --init_from")


class Trainer:
    """Model, optimizer and data of a run, and one training step over them."""

    def __init__(self, config, corpus, model, device, dtype):
        self.config, self.model, self.device, self.dtype = config, model.to(device), device, dtype
        self.batches = Batches(corpus, config, device)
        self.tables = bert.value_tables(model).values()
        self.optimizer = bert.adamw(model, config, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.compiled = bert.compiled(model, config.compile, device)

    def step(self, step):
        """One update. Returns the mean loss over its micro-batches, and the gradient norm, as
        tensors on the device: nothing waits for it."""
        config, total = self.config, 0.0
        torch.manual_seed(int(np.random.SeedSequence([config.seed, 3, step]).generate_state(1)[0]))
        for micro in range(config.accumulation):
            inputs, positions, labels = self.batches.get(step, micro)
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                loss = self.compiled(inputs, positions, labels) / config.accumulation
            self.scaler.scale(loss).backward()
            total += loss.detach()
        norm = bert.update(self.optimizer, self.scaler, self.tables, config,
                           learning_rate(step, config))
        return total, norm

    def interval(self, state, norm):
        """The log's record of the steps since the last one."""
        rate = len(state["losses"]) * tokens_per_step(self.config) / state["seconds"]
        record = {"step": state["step"], "loss": sum(state["losses"]) / len(state["losses"]),
                  "lr": learning_rate(state["step"] - 1, self.config), "grad_norm": norm,
                  "tokens_per_s": rate, "elapsed": state["elapsed"] + state["seconds"]}
        peak = bert.peak_flops(self.device)
        if peak and self.dtype != torch.float32:
            record["mfu"] = rate * bert.flops_per_token(self.model, self.config.seq_len) / peak
        return record

    def save(self, out, state):
        state = {**state, "scaler": self.scaler.state_dict()}
        return bert.save_checkpoint(out, state["step"], self.model, self.optimizer, state,
                                    self.config.keep_checkpoints)

    def restore(self, checkpoint):
        """Everything but the weights, which start_model has loaded. Returns the saved state."""
        state = bert.load_optimizer(checkpoint, self.model, self.optimizer)
        self.scaler.load_state_dict(state.pop("scaler"))
        return state


def due(step, config):
    """What is to be done after `step` steps: a set of 'log', 'eval', 'usage', 'save'."""
    every = {"log": config.log_interval, "eval": config.eval_interval,
             "usage": config.usage_interval, "save": config.checkpoint_interval}
    early = {"eval"} if step < config.eval_interval and step & (step - 1) == 0 else set()
    return early | {what for what, n in every.items()
                    if n and (step % n == 0 or step == config.max_steps)}


def train(config, out, trainer, held_out, state):
    """The training loop, from state["step"] on; everything is written to the folder `out`.
    Returns the number of the signal that stopped it, or None."""
    def evaluation(step):
        results, counts = evaluate(trainer.model, held_out, trainer.device, trainer.dtype)
        print(json.dumps({"step": step, **results}), file=log)
        print(f"step {step:,}: " + "\n  ".join(describe(results)), flush=True)
        return counts

    signals, log = catch_signals(), open_log(out, state["step"])
    if state["step"] == 0:
        evaluation(0)
    new, mark = [], time.perf_counter()  # new: (loss, norm) on the device, not looked at yet
    for step in range(state["step"] + 1, config.max_steps + 1):
        new.append(trainer.step(step - 1))
        stopped = signals[:1]
        todo = due(step, config) | ({"save"} if stopped else set())
        if not todo:
            continue
        new = [(loss.item(), norm.item()) for loss, norm in new]  # waits for the device
        check_finite(step, new, config, trainer.dtype)
        state["seconds"] += time.perf_counter() - mark
        state["losses"] += [loss for loss, _ in new]
        state["step"] = step
        if "log" in todo:
            record = trainer.interval(state, norm=new[-1][1])
            print(json.dumps(record), file=log)
            print(progress(record, config), flush=True)
            state.update(losses=[], seconds=0.0, elapsed=record["elapsed"])
        usage_due = "usage" in todo and trainer.tables  # without memory there is none to write
        if "eval" in todo or usage_due:
            counts = evaluation(step)
            if usage_due:
                write_usage(out, step, counts)
        if "save" in todo:
            os.fsync(log.fileno())  # no checkpoint is newer than its log
            trainer.save(out, state)
        if stopped:
            return stopped[0]
        new, mark = [], time.perf_counter()
    return None


def progress(record, config):
    """The line that a person watches."""
    tokens = (config.max_steps - record["step"]) * tokens_per_step(config)
    eta = timedelta(seconds=round(tokens / record["tokens_per_s"]))
    mfu = f" | mfu {record['mfu']:.1%}" if "mfu" in record else ""
    return (f"step {record['step']:,}/{config.max_steps:,} | loss {record['loss']:.4f} | "
            f"{record['tokens_per_s']:,.0f} tokens/s{mfu} | lr {record['lr']:.2e} | eta {eta}")


def tokens_per_step(config):
    return config.batch_size * config.accumulation * config.seq_len


def report(config, corpus, trainer):
    """What is trained, on what, by how much: the arithmetic that a person wants to check."""
    parameters = sum(p.numel() for p in trainer.model.parameters())
    values = sum(table.weight.numel() for table in trainer.tables)
    tokens, sequences = corpus.meta["tokens"], config.batch_size * config.accumulation
    epochs = config.max_steps * sequences / trainer.batches.per_epoch
    print(f"corpus {corpus.name}: {tokens['train']:,} training tokens, {tokens['val']:,} held out, "
          f"vocabulary {corpus.vocab_size:,}\n"
          f"model {config.model}: {parameters:,} parameters, {values:,} of them in value tables\n"
          f"batch: {config.batch_size} sequences x {config.accumulation} accumulation = "
          f"{sequences:,} sequences = {tokens_per_step(config):,} tokens a step; "
          f"{config.max_steps:,} steps = {config.max_steps * tokens_per_step(config):,} tokens = "
          f"{epochs:.1f} epochs")
    print(f"unigram perplexity of the held-out text: {corpus.meta['unigram_perplexity']:.2f}")


def validate(config):
    """Refuse settings that cannot work before anything is written. Returns the BertConfig's."""
    lowest = {"seed": 0, "seq_len": 3, "batch_size": 1, "accumulation": 1, "max_steps": 1,
              "warmup_steps": 0, "lr": 0, "value_lr": 0, "weight_decay": 0, "grad_clip": 1e-9,
              "log_interval": 1, "eval_interval": 1, "eval_sequences": 1, "usage_interval": 0,
              "checkpoint_interval": 1, "keep_checkpoints": 1}
    at_least(config, lowest)
    if config.reinit_ffn and not config.init_from:
        raise UserError("reinit_ffn = True: it goes with init_from, without it every FFN is new")
    if config.model not in bert.SIZES:
        raise UserError(f"model = {config.model!r}: expected one of {', '.join(bert.SIZES)}")
    names = bert.BertConfig.__dataclass_fields__.keys() & asdict(config).keys()
    sizes = {**{name: getattr(config, name) for name in names}, **bert.SIZES[config.model]}
    with torch.device("meta"):  # costs nothing, and finds what does not fit together
        most = bert.MaskedLM(bert.BertConfig(**sizes)).bert.config.max_len
    if config.seq_len > most:
        raise UserError(f"seq_len = {config.seq_len}: {config.model} has {most} positions")
    return sizes


def main(argv):
    if not argv:
        raise UserError("which config? python pretrain.py configs/demo.py; --help lists settings")
    config = load(Config, argv)
    sizes = validate(config)
    name = "pretrain" if argv[0].startswith("--") else Path(argv[0]).stem
    out = Path(config.out or f"out/{name}")
    if out.exists() and not out.is_dir():
        raise UserError(f"out = {out}: a file is there, expected a folder")
    device, dtype = setup(config.device, config.dtype, config.seed)
    keep_freed_memory(device)
    config.device, config.dtype = str(device), str(dtype).removeprefix("torch.")  # resolved
    if config.dataset == "docs" and not Path("data/docs").exists():
        prepare_data.prepare_docs()
    corpus = prepare_data.Corpus(config.dataset)
    checkpoint = None if config.dry_run else bert.find_checkpoint(out)
    if checkpoint:
        check_vocabulary(out, out / "vocab.txt", corpus)
        check_same_run(config, out, MAY_CHANGE)
    model, origin = start_model(config, sizes, corpus, checkpoint)
    trainer = Trainer(config, corpus, model, device, dtype)
    held_out = heldout(corpus, "val", config.seq_len, config.batch_size, config.eval_sequences)
    state = {"step": 0, "elapsed": 0.0, "seconds": 0.0, "losses": []}
    if checkpoint:
        state = trainer.restore(checkpoint)
        print(f"going on from {checkpoint}")
    report(config, corpus, trainer)

    if config.dry_run:
        loss, norm = trainer.step(0)
        print(f"dry run: one step, loss {loss.item():.4f}, gradient norm {norm.item():.2f}")
    if config.dry_run or config.eval_only:
        print("\n  ".join(describe(evaluate(model, held_out, device, dtype)[0])))
        return 0
    if state["step"] >= config.max_steps:
        print(f"{out} is at step {state['step']:,} of {config.max_steps:,}: nothing to do; "
              "--max_steps=N goes on, --out=out/NAME starts anew")
        return 0
    for file in [*out.rglob(".tmp_*"), *out.glob("usage/step_*.npz")]:
        if file.name.startswith(".tmp_") or int(file.stem[5:]) > state["step"]:
            discard(file)  # what a killed process left behind
    with atomic(out / "vocab.txt") as temporary:  # a run can be used without its corpus
        shutil.copyfile(corpus.folder / "vocab.txt", temporary)
    with atomic(out / "config.json") as temporary:
        settings = {**asdict(config), **origin, "tokenizer_hash": corpus.tokenizer_hash}
        temporary.write_text(json.dumps(settings, indent=1))
    number = train(config, out, trainer, held_out, state)
    if number:
        print(f"saved {bert.find_checkpoint(out)}; go on with: python pretrain.py "
              f"{shlex.join(argv)}")
        return 128 + number
    elapsed = timedelta(seconds=round(state["elapsed"]))
    print(f"done, {elapsed} of training: {bert.find_checkpoint(out)}")
    return 0


def script():
    try:
        return main(sys.argv[1:])
    except torch.OutOfMemoryError as error:
        raise Failure(f"{str(error).splitlines()[0]} Halve batch_size and double accumulation: the "
                      "step stays the same") from None


if __name__ == "__main__":
    run(script)
