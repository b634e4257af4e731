"""
Make small models, texts and runs, and compare them, in several files of tests.
"""
import collections
import contextlib
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import finetune
import prepare_data
import pretrain
from lib.run import LAYOUT, Run
from lib.settings import run_main
from lib.weights import model_file
from model import BertConfig, LanguageModel
from test_pkm import assert_near  # noqa: F401 - tests import it from here

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared" / "data"  # larger texts; tests of them are skipped without it


def tiny_bert(seed=0, **settings):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "n_layer": 3, "n_head": 2, "d_model": 8, "d_ff": 16, "max_len": 16,
             "n_keys": 4, "memory_heads": 2, "topk": 3, "key_dim": 4}
    return LanguageModel(BertConfig(**{**sizes, **settings}))


def save_model(run, model, labels=(), step=3):
    """Save a checkpoint of a model that was not trained."""
    files = {"model": model_file(model, labels), "optimizer": {"dense": {}, "sparse": {}},
             "state": {"step": step, "elapsed": 0.0, "seconds": 0.0}}
    folder = Run(run).save_checkpoint(step, files, keep=2)
    config = folder.parent / "config.json"
    if not config.exists():
        write_settings(folder.parent, first_step=0, max_steps=3, pooler_trained=False)
    return folder


def write_settings(run, **settings):
    """Write a run's config.json."""
    Path(run).mkdir(parents=True, exist_ok=True)
    Path(run, "config.json").write_text(json.dumps({"layout": LAYOUT, **settings}))


TINY = {
    "dataset": "tiny", "model": "demo", "memory_layers": (2, 3), "n_keys": 8, "memory_heads": 2,
    "topk": 4, "key_dim": 16, "seq_len": 16, "batch_size": 2, "accumulation": 2, "dropout": 0.1,
    "max_steps": 12, "warmup_steps": 1, "lr": 3e-3, "log_interval": 3, "eval_interval": 6,
    "eval_sequences": 8, "usage_interval": 6, "checkpoint_interval": 5, "device": "cpu",
}


def train(*args):
    return pretrain.main(["tiny.py", *args])


def log(out="out/tiny"):
    return [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]


def files(folder="."):
    return {str(path): path.is_file() and path.read_bytes() for path in Path(folder).rglob("*")}


def assert_same(a, b, where=""):
    """Compare to the last bit, through dicts and lists of tensors and plain values."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert_same(dict(enumerate(a)), dict(enumerate(b)), where)
    else:
        assert torch.equal(a, b) if torch.is_tensor(a) else a == b, where


def differences(a, b, where=""):
    """Yield (name, distance, norm) for each pair of tensors or floats; the rest must be equal."""
    if isinstance(a, dict | list | tuple):
        assert len(a) == len(b), where
        for key in a if isinstance(a, dict) else range(len(a)):
            yield from differences(a[key], b[key], f"{where}/{key}")
    elif torch.is_tensor(a) or isinstance(a, float):
        a, b = (torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in (a, b))
        assert a.shape == b.shape, where
        yield where, (a - b).norm().item(), b.norm().item()
    else:
        assert a == b, where


def assert_equal_runs(ours, reference, tolerance):
    """Compare log, last weights, moments and usage.

    All weights are compared by one norm, and so is each kind of moment. A gradient that is 0 except
    for rounding, as of a bias before a batch norm, has no meaningful norm.
    """
    speed = "tokens_per_s", "examples_per_s", "elapsed"

    def timeless(run):
        return [{k: v for k, v in r.items() if k not in speed} for r in log(run)]

    ends = [Run(run).newest_checkpoint() or Path(run, "best") for run in (ours, reference)]
    assert ends[0].name == ends[1].name
    pairs = {name: [torch.load(end / f"{name}.pt", weights_only=True) for end in ends]
             for name in ("model", "optimizer") if (ends[0] / f"{name}.pt").exists()}
    for model in pairs["model"]:
        del model["sha256"]  # of weights that are rounded otherwise
    pairs["log"] = timeless(ours), timeless(reference)
    sums = collections.defaultdict(lambda: np.zeros(2))
    for name, pair in pairs.items():
        for where, *squares in differences(*pair):
            _, first, *_, last = where.split("/")
            kind = {"model": "running" in last, "optimizer": (first, last), "log": where}[name]
            sums[name, kind] += np.square(squares)
    for kind, (distance, norm) in sums.items():
        assert distance <= tolerance**2 * norm, f"{kind}: {(distance / norm)**0.5:.1e}"
    if "optimizer" in pairs and Run(ours).settings()["memory_layers"]:
        assert sums["optimizer", ("sparse", "exp_avg_sq")][1] > 0
    for file in Path(reference).glob("usage/*.npz"):
        counts, expected = np.load(Path(ours, *file.parts[-2:])), np.load(file)
        for name in expected:
            assert (counts[name] == expected[name]).all() and counts[name].sum() > 0


@contextlib.contextmanager
def before_update(number, act):
    """Call act(optimizer) before AdamW's update `number`, counted from 1 in the block."""
    def hook(optimizer, *args):
        if isinstance(optimizer, torch.optim.AdamW):
            updates.append(optimizer)
            if len(updates) == number:
                act(optimizer)

    updates, handle = [], register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def interrupt(number):
    """Return what sends this process a signal, for before_update()."""
    return lambda optimizer: os.kill(os.getpid(), number)


def trains_pooler(run):
    """Make a run one whose pooler was trained, as those that start from Google's weights."""
    path = Path(run, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pooler_trained": True}))


def steps_saved(run):
    newest = Run(run).newest_checkpoint()
    return int(newest.name[5:]) if newest else 0


def assert_one_line(capsys, *args, words, main=pretrain.main):
    """Expect exit status 2, one line on stderr with `words` in it, and no file but locks."""
    def content():
        return {path: x for path, x in files().items() if x and ".lock_" not in path}

    before = content()
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run_main(lambda: main(list(args)))
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert all(word in error for word in words), error
    assert content() == before


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", "mat", "."]


def prepare(*args):
    """Run prepare_data's main() in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare_data.py", *map(str, args)])
        prepare_data.main()


def texts_of(corpus, which):
    """Return a split's documents, each as its tokens joined by spaces."""
    pieces = [PIECES[i] for i in corpus.split(which)]
    assert pieces[-1] == "[SEP]"
    return [text.strip() for text in " ".join(pieces).split("[SEP]")[:-1]]


def write_parquet(path, texts, column="text"):
    import pyarrow
    from pyarrow import parquet

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({column: texts, "id": list(range(len(texts)))}), path)


def squad_file(path):
    qas = [{"id": f"q{n}", "question": "no cat ?", "answers": [{"answer_start": 4, "text": "cat"}]}
           for n in range(2)]
    data = {"version": "1.1", "data": [{"title": "t", "paragraphs": [
        {"context": "the cat saw the dog . " * 6, "qas": qas}]}]}
    path.write_text(json.dumps(data, indent=1))
    return data


def tune(*args):
    return finetune.main(["tune.py", *args])


def write_tasks(train_examples=200):
    """Write tasks of prepared's words: the folders own (two classes) and pairs (a score), SQuAD."""
    rng, vocabulary = random.Random(1), Path("tiny.txt").read_text().split()[6:]
    for name, columns in (("own", "sentence\tlabel"), ("pairs", "sentence1\tsentence2\tscore")):
        for split, n in (("train", train_examples), ("dev", 30), ("test", 7)):
            lines = []
            for _ in range(n):
                words = rng.choices(vocabulary, k=rng.randrange(2, 4))
                text = " ".join(words)
                label = str(sum(w in vocabulary[9:14] for w in words)) if name == "pairs" else (
                    "animal" if set(words) & set(vocabulary[9:14]) else "none")
                lines.append("\t".join([text, *["the ." * (name == "pairs")][:name == "pairs"],
                                        *[label] * (split != "test")]))
            header = columns.rsplit("\t", 1)[0] if split == "test" else columns
            Path(name).mkdir(exist_ok=True)
            Path(name, f"{split}.tsv").write_text("\n".join([header, *lines]) + "\n")
    Path("data/squad").mkdir()
    for split in ("train", "dev"):
        squad_file(Path(f"data/squad/{split}-v1.1.json"))
