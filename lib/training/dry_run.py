"""
Try two steps on random tokens: how much memory, time and disk a run takes.
"""
import time
from pathlib import Path

import numpy as np
import torch

from lib.common.progress import duration
from lib.common.timing import peak_bytes
from lib.corpus.batches import MASKED, Corpus, tokens_per_step
from lib.distributed.processes import get_world_size
from lib.distributed.sharded_values import Columns, count_parameters, leaves
from lib.training.trainer import State
from model import BertConfig


class RandomBatches:
    """Make training batches of random tokens, in the shapes of MaskedBatches or CausalBatches.

    The vocabulary is as large as data/<dataset>'s, or Google's BERT's if there is no such corpus.
    """

    unit = "tokens"

    def __init__(self, config):
        self.config, self.accumulation = config, config.accumulation
        self.size = tokens_per_step(config)
        prepared = Path("data", config.dataset, "meta.json").is_file()
        self.vocab_size = Corpus(config.dataset).vocab_size if prepared else BertConfig.vocab_size
        self.source = (f"of data/{config.dataset}" if prepared
                       else f"of Google's BERT (no data/{config.dataset})")

    def loss_weight(self, step, micro):
        """Return a micro-batch's weight in the mean loss of its step."""
        return 1 / self.accumulation

    def get(self, step, micro):
        """Return a micro-batch: int64 arrays by argument name of the model."""
        config, rng = self.config, np.random.default_rng([step, micro])
        ids = rng.integers(self.vocab_size, size=(config.batch_size, config.seq_len))
        if config.objective == "causal":
            return {"ids": ids, "labels": ids}
        count = max(1, round(MASKED * config.seq_len))
        positions = np.tile(np.arange(count), (config.batch_size, 1))
        return {"ids": ids, "positions": positions, "labels": ids[:, :count]}


def try_steps(trainer):
    """Make two steps. Print the loss, a step's time, the peak of memory, a checkpoint's size."""
    config, batches = trainer.config, trainer.batches
    print(f"dry run: {count_parameters(trainer.model):,} random weights, random tokens; a "
          f"vocabulary {batches.source}, {batches.vocab_size:,} tokens", flush=True)
    seconds = []
    for step in range(2):
        start = time.perf_counter()
        loss, norm = (x.item() for x in trainer.step(step))  # waits for the device
        seconds.append(time.perf_counter() - start)
    whole = duration(seconds[1] * config.max_steps)
    compiling = " with compiling" if trainer.compiled is not trainer.model else ""
    print(f"loss {loss:.4f}, gradient norm {norm:.2f}\n"
          f"{seconds[1]:.3g} s a step of {batches.size:,} tokens, "
          f"{batches.size / seconds[1]:,.0f} tokens/s (the first step "
          f"took {seconds[0]:.3g} s{compiling})\n"
          f"{config.max_steps:,} steps take {whole}, and evaluations and checkpoints come on top")
    rank = f" of each of {get_world_size()} ranks" if get_world_size() > 1 else ""
    print(f"peak memory{rank}: {peak_bytes(trainer.device) / 1e9:.2f} GB on {trainer.device}\n"
          f"a checkpoint: {checkpoint_bytes(trainer) / 1e9:.3g} GB; the newest "
          f"{config.keep_checkpoints} stay")


def checkpoint_bytes(trainer):
    """Count the bytes of a checkpoint's tensors, whole tables if ranks have parts of them."""
    total = 0
    for leaf in leaves(trainer.checkpoint_files(State())):
        if isinstance(leaf, Columns):
            total += leaf.own.nbytes * get_world_size()
        elif torch.is_tensor(leaf):
            total += leaf.nbytes
    return total
