"""
Hold training steps on a card against the same steps on the CPU beside it.

$ python -m reproduce.card steps out/gpu/demo         # a trained demo: demo_resm_init starts there
$ python -m reproduce.card steps out/gpu/demo cpu     # no card: the CPU's own distances
$ python -m reproduce.card same out/gpu/demo auto out/one.pt       # one process, then two
$ torchrun --nproc_per_node=2 -m reproduce.card same out/gpu/demo auto out/one.pt
$ python -m reproduce.card bandwidth                  # of a memory's read and update

The CPU trains in float32. From some of its states one step is made again: in float64 on the CPU,
which is the reference, then in each dtype of the card on the CPU and on the card. A cell has their
distances from the reference: norm of the difference / norm. A card is as expected up to 4 times the
CPU's largest distance in this dtype and column, and up to 0.9: 1 is a step that was left out. The
exit status is the number of cells that are not.
"""
import copy
import sys
from dataclasses import replace
from functools import partial
from statistics import median
from unittest import mock

import numpy as np
import torch

from bench import RandomBatches, time_in_turn
from lib import ranks, training
from lib.corpus import Corpus
from lib.device import set_up_device
from lib.files import markdown
from lib.settings import load_settings
from lib.weights import init_from
from model import LanguageModel, value_tables
from pkm import LazyAdam, MaskedBatchNorm, ValueTable
from pretrain import MaskedBatches, Settings, bert_config

NUMBERS = ["loss", "gradients", "change of values", "running mean", "running variance"]
PLAIN = ["--dropout=0", "--device=cpu", "--dtype=float32", "--compile=off"]
SMALL = ["--batch_size=2", "--accumulation=1", "--seq_len=128", "--n_keys=128"]


def steps(initial, device="auto"):
    """Print the table. Returns how many of its cells are not as expected."""
    device, dtype = set_up_device(device)
    dtypes = dict.fromkeys(["float32", str(dtype).removeprefix("torch.")])
    modes = ["off"] if device.type == "cpu" else ["off", "on"]  # of torch.compile
    demo, trained, text = trained_demo(initial)
    base = load_settings(Settings, ["configs/base_resm.py", *PLAIN, *SMALL])
    rows = []
    for name, settings, model, batches, last in (
            ("demo_resm_init", demo, trained, text, 50),
            ("base_resm", base, LanguageModel(bert_config(base)), RandomBatches(30522, base), 0)):
        net, optimizers, _ = training.prepare(model, settings)
        for number in range(last + 1):
            training.set_rate(optimizers, settings, number)
            if number in (0, 10, 50):
                trial = partial(one_step, number, model, optimizers, batches, settings)
                rows += compare(f"{name}, step {number}", trial, device, dtypes, modes)
            if number < last:
                training.step(number, net, batches, optimizers, settings)
    table, failed = judge(rows)
    print(markdown(["card / CPU", "dtype", "compile", *NUMBERS], table))
    return failed


def trained_demo(initial, *more):
    """Return the settings, the model and the batches of demo_resm_init."""
    settings = load_settings(Settings, ["configs/demo_resm_init.py", *PLAIN, *more])
    corpus = Corpus(settings.dataset)
    torch.manual_seed(0)
    model = LanguageModel(bert_config(settings, corpus.vocab_size))
    init_from(model, initial)
    return settings, model, MaskedBatches(corpus, settings)


def same(initial, device, path):
    """Make ten steps in float64. Every rank holds its weights against one process's.

    One process without torchrun saves its weights at `path`. Returns 1 if a rank's differ.
    """
    device, _ = set_up_device(device, "float32")
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # losses, too
    settings, model, batches = trained_demo(initial, "--accumulation=8", "--batch_size=8")
    settings = replace(settings, device=str(device))
    net, optimizers, _ = training.prepare(model, settings)
    for number in range(10):
        training.set_rate(optimizers, settings, number)
        training.step(number, net, batches, optimizers, settings)
    weights = torch.cat([tensor.double().cpu().flatten() for tensor in model.state_dict().values()])
    if not ranks.under_torchrun():
        torch.save(weights, path)
        return 0
    difference = (weights - torch.load(path)).abs().max()
    worst = max(ranks.all_gather(difference)).item()
    print(f"ranks: {ranks.get_world_size()}, largest difference of a weight: {worst:.1e}")
    return int(not worst <= 1e-9)


def bandwidth(device="auto", tokens=16384, n_keys=512):
    """Print the bytes a second that a read and an update of base's values move.

    A copy of the table shows what the card can do. A read moves 128 rows of the table a token. An
    update moves as many of the gradient, then reads and writes all rows and their two moments.
    """
    device, _ = set_up_device(device, "float32")
    n_keys, shape = int(n_keys), (int(tokens), 4 * 32)
    with torch.device(device):
        table = ValueTable(n_keys**2, 768)
        slots, weights = torch.randint(n_keys**2, shape, dtype=torch.int32), torch.rand(shape)
        grad = torch.randn(len(slots), 768)
    optimizer = LazyAdam([table])

    def update():
        table.pending.append((slots, weights, grad))
        optimizer.step()

    size, reads = table.weight.nbytes, slots.numel() * 768 * 4
    moved = {"copy": 2 * size, "read": reads, "update": reads + 6 * size}
    calls = {"copy": table.weight.clone, "read": partial(torch.no_grad()(table), slots, weights),
             "update": update}
    times = [median(record["seconds"])
             for record in time_in_turn("values", calls, device, rounds=15)]
    speeds = np.array(list(moved.values())) / times / 1e9
    rows = [[name, f"{1e3 * time:.3g}", f"{speed:.0f}", f"{speed / speeds[0]:.0%}"]
            for name, time, speed in zip(moved, times, speeds)]
    print(markdown([f"{tokens} tokens, fp32", "ms", "GB/s", "of a copy"], rows))
    return 0


def one_step(number, model, optimizers, batches, settings, **changed):
    """Make one update of a copy of the model. Returns NUMBERS, float64 tensors on the CPU."""
    model = copy.deepcopy(model).to(torch.get_default_dtype())
    tables = value_tables(model).values()
    before = [table.weight.double().clone() for table in tables]
    settings = replace(settings, **changed)
    net, own, _ = training.prepare(model, settings)
    own.dense.load_state_dict(copy.deepcopy(optimizers.dense.state_dict()))
    own.sparse.load_state_dict(copy.deepcopy(optimizers.sparse.state_dict()))
    gradients = []
    own.dense.register_step_pre_hook(lambda *_: gradients.extend(
        p.grad for p in model.parameters() if p.grad is not None))
    loss, _ = training.step(number, net, batches, own, settings)
    changes = [table.weight.double().cpu() - old for table, old in zip(tables, before)]
    means, variances = zip(*((norm.running_mean, norm.running_var) for norm in model.modules()
                             if isinstance(norm, MaskedBatchNorm)))
    return [torch.cat([tensor.double().cpu().flatten() for tensor in tensors])
            for tensors in ([loss], gradients, changes, means, variances)]


def compare(name, trial, device, dtypes, modes):
    """Yield (name, dtype, mode, distances on the CPU, on the card) of a step."""
    torch.set_default_dtype(torch.float64)
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):  # losses, too
        reference = trial()
    torch.set_default_dtype(torch.float32)

    def distances(**changed):
        return [((found - expected).norm() / expected.norm()).item()
                for found, expected in zip(trial(**changed), reference)]

    for dtype in dtypes:
        cpu = distances(dtype=dtype)
        for mode in modes:
            yield name, dtype, mode, cpu, distances(dtype=dtype, device=str(device), compile=mode)


def judge(rows):
    """Make the lines of a table from compare()'s rows. Returns it, and how many cells are wrong."""
    table, failed = [], 0
    for name, dtype, mode, cpu, card in rows:
        worst = np.max([row[3] for row in rows if row[1] == dtype], axis=0)
        good = np.array(card) <= np.minimum(4 * worst, 0.9)  # NaN is not
        cells = [f"{theirs:.0e} / {ours:.0e}" + " **no**" * (not fine)
                 for theirs, ours, fine in zip(card, cpu, good)]
        table.append([name, dtype, mode, *cells])
        failed += np.sum(~good)
    return table, int(failed)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    commands = {"steps": steps, "same": same, "bandwidth": bandwidth}
    ranks.run_ranks(lambda: commands[command](*arguments))
