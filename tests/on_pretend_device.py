"""
Run the project on a pretended device, and compare with the CPU: training and the scripts.

$ python -m tests.on_pretend_device                     # test_pretend_device.py starts this

Without dropout and in float64, so that only the order of sums may differ. A directory for each
device has the runs that are compared.
"""
import contextlib
import inspect
import io
import os
import shutil
import sys
import textwrap
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import finetune
import measure
import pkm
import pretrain
import values
from lib.common.settings import load_settings
from lib.corpus.batches import Corpus, masked_heldout
from lib.for_transformers.export import export
from lib.slot_usage import evaluation
from lib.training.dry_run import RandomBatches
from lib.training.trainer import Trainer
from lib.weights.run import Run
from tests import pretend_device
from tests.distributed.test_ranks import differences
from tests.helpers import ROOT, log, tiny_bert, write_tasks

DEVICES = "cpu", "pretend:0"
CONFIGS = ("demo", "demo_pkm", "demo_resm", "demo_resm_init", "demo_causal", "demo_causal_memory")
SIZES = ["--dataset=tiny", "--n_layer=3", "--d_model=16", "--d_ff=24", "--n_head=2", "--n_keys=8",
         "--memory_heads=2", "--topk=4", "--key_dim=8", "--seq_len=16", "--batch_size=2",
         "--accumulation=2", "--max_steps=2", "--warmup_steps=1", "--log_interval=1",
         "--eval_interval=2", "--eval_sequences=2", "--usage_interval=2",
         "--checkpoint_interval=1", "--dropout=0"]
TUNE = ["--init_from=out/demo_resm", "--max_len=32", "--train_examples=16", "--max_steps=2",
        "--batch_size=8", "--accumulation=2", "--lr=5e-3", "--value_lr=1e-2", "--dropout=0"]
TASKS = "own", "pairs", "squad"
WORST = {}  # {what was compared: the largest difference, as a share of the norm}

# What a training step waits for with two memories and two micro-batches. The only copies to the
# device are the three arrays of a micro-batch.
WAITS = {("copy to the device", "lib/training/trainer.py to_device"): 6,
         ("copy to the CPU", "values.py LazyAdam.step"): 1}


@pytest.fixture(scope="module")
def places(prepared, tmp_path_factory):
    """A folder with a working directory for each device, which has the runs."""
    folder = tmp_path_factory.mktemp("places")
    with pytest.MonkeyPatch.context() as patch:
        for device in DEVICES:
            shutil.copytree(prepared, folder / device)
            patch.chdir(folder / device)
            write_tasks()
        patch.chdir(folder)
        for config in CONFIGS:
            both(pretrain.main, str(ROOT / f"configs/{config}.py"), *SIZES)
        for task in TASKS:
            both(finetune.main, *TUNE, f"--task={task}", f"--out=out/{task}")
    return folder


@pytest.fixture(autouse=True)
def place(places, monkeypatch):
    monkeypatch.chdir(places)


def both(main, *args):
    """Call a script's main() on both devices, each in its directory. Returns the lines printed."""
    printed, here = [], os.getcwd()
    for device in DEVICES:
        os.chdir(device)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert not main([*args, f"--device={device}"])
        os.chdir(here)
        printed.append(out.getvalue().replace(device, "DEVICE").splitlines())
    return printed


def assert_near(what, ours, reference, tolerance=1e-10):
    """Compare nested dicts and lists of tensors, texts and numbers.

    A norm under 1e-12 is of a gradient that is 0 but for rounding, as a bias has before a norm.
    """
    for where, distance, norm in differences(ours, reference, what):
        difference = distance / norm if norm > 1e-12 else distance
        WORST[what] = max(WORST.get(what, 0), difference)
        assert difference <= tolerance, f"{where}: {difference:.1e}"


def assert_same_training(run, other, name):
    """Compare two runs' last weights and moments."""
    ends = [Run(path).newest_checkpoint() for path in (run, other)]
    assert ends[0].name == ends[1].name
    model, optimizer = ([torch.load(end / f"{name}.pt", map_location="cpu", weights_only=True)
                         for end in ends] for name in ("model", "optimizer"))
    assert_near(f"{name}: weights", model[0]["weights"], model[1]["weights"])
    for kind in optimizer[0]:
        states = [saved[kind]["state"] for saved in optimizer]
        assert_near(f"{name}: {kind} moments", *states)


def assert_same_log(run, other, name):
    records = [[{k: v for k, v in record.items() if "_per_s" not in k and k != "elapsed"}
                for record in log(path)] for path in (run, other)]
    assert_near(f"{name}: log", *records)


def assert_same_run(path, what):
    """Compare the runs `path` of both devices. Returns their folders, the CPU's last."""
    ours, reference = (f"{device}/out/{path}" for device in reversed(DEVICES))
    assert_same_training(ours, reference, what)
    assert_same_log(ours, reference, what)
    return ours, reference


def test_the_device():
    """It refuses to mix, except for numbers and indices, and counts what waits."""
    x, y = torch.arange(6.0, device=DEVICES[1]), torch.arange(6.0)
    for mix in (lambda: x + y, lambda: y.add_(x), lambda: torch.cat([x, y]), lambda: y[x.long()],
                lambda: x.where(y > 2, 0), lambda: x.index_select(0, y.long()),
                lambda: torch.stack([x[0], y[0]]), lambda: torch.outer(x, y)):
        with pytest.raises(RuntimeError, match="device"):
            mix()
    with pytest.raises(TypeError, match="device"):
        x.numpy()
    with pretend_device.count_waits() as waits:
        assert (x * y[2] + 1).tolist() == (2 * y + 1).tolist()
        assert x[x > 3].tolist() == [4, 5] and x[y > 3].device == x.device
        assert x.sum() == 15 and len(x.bool().nonzero()) == 5 and len(x.unique()) == 6
        x[x > 3] = 0.0
    assert {what: n for (what, _), n in waits.items()} == {
        "copy to the CPU": 2, "copy to the device": 1, "nonzero": 2, "item": 1, "unique": 1}
    assert x.cpu().tolist() == [0, 1, 2, 3, 0, 0]


@pytest.mark.parametrize("config", CONFIGS)
def test_pretraining(config):
    """Two steps of two micro-batches, with evaluations and counts of reads."""
    ours, reference = assert_same_run(config, config)
    for file in Path(reference).glob("usage/*.npz"):
        counts, expected = np.load(Path(ours, *file.parts[-2:])), np.load(file)
        assert all((counts[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize("saved, resumed", [DEVICES, DEVICES[::-1], DEVICES[1:] * 2])
def test_resuming(monkeypatch, saved, resumed):
    """A run goes on from step 1, of the same device or of the other one."""
    run = Path(resumed, "out/again")
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(Path(saved, "out/demo_resm"), run)
    shutil.rmtree(run / "step_000002")
    monkeypatch.chdir(resumed)
    assert not pretrain.main([str(ROOT / "configs/demo_resm.py"), *SIZES, "--out=out/again",
                              f"--device={resumed}"])
    monkeypatch.chdir("..")
    assert_same_training(run, "cpu/out/demo_resm", f"{saved} to {resumed}")


@pytest.mark.parametrize("task", TASKS)
def test_fine_tuning(task):
    """Classes, scores of pairs and spans, with padding."""
    ours, reference = assert_same_run(f"{task}/seed0", task)
    for file in Path(reference).rglob("*.tsv"):
        assert Path(ours, file.relative_to(reference)).read_text() == file.read_text()


@pytest.mark.parametrize("command", [
    "table out/demo out/demo_pkm --data tiny --sequences 4 --repeats 2",
    "table out/demo_causal_memory --data tiny --sequences 4", "table out/own", "by_class out/own",
    "slots out/demo_resm --layer 2 --sequences 4", "fill out/demo_resm [MASK] --sequences 4",
    "sample out/demo_causal_memory cat --sequences 4 --tokens 5",
    "browse out/demo_resm --sequences 4 --out page", "predict out/own own/test.tsv",
    "predict out/pairs pairs/test.tsv", "predict out/squad data/squad/dev-v1.1.json"])
def test_measuring(command):
    """Print the same, and write the same page."""
    printed = [[line for line in lines if not line.startswith("device")]
               for lines in both(measure.main, *command.split())]
    assert printed[0] == printed[1] and printed[0]
    if "browse" in command:
        pages = [Path(device, "page.html").read_text() for device in DEVICES]
        assert pages[0] == pages[1]


def test_a_dry_run(monkeypatch, capsys):
    monkeypatch.chdir("cpu")
    args = [*SIZES, "--memory_layers=2,3", "--dry_run=True", f"--device={DEVICES[1]}"]
    assert pretrain.main(args) == 0 and f"GB on {DEVICES[1]}" in capsys.readouterr().out


def train(device, dtype=torch.float32, steps=2, compile="off"):
    """Make a Trainer of a model with two memories, and let it make steps of random tokens."""
    config = load_settings(pretrain.Config, [*SIZES, f"--compile={compile}"])
    torch.manual_seed(0)
    model = tiny_bert(vocab_size=100, n_layer=2, memory_layers=(1, 2), dropout=0.0)
    batches = RandomBatches(config)
    batches.vocab_size = 100
    trainer = Trainer(config, model, batches, torch.device(device), dtype)
    for step in range(steps):
        trainer.step(step)
    return trainer


@pytest.fixture
def in_float32(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x.to(torch.float32))
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("dtype, tolerance", [
    (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str)
def test_precision(in_float32, dtype, tolerance):
    """In mixed precision with float32 weights, and in float16 with a GradScaler."""
    reference, ours = (train(device, dtype) for device in DEVICES)
    name = str(dtype)
    assert_near(name, dict(ours.model.state_dict()), dict(reference.model.state_dict()), tolerance)
    assert ours.scaler.state_dict() == reference.scaler.state_dict()


def test_waits():
    """The host waits for the device only where WAITS says, and copies only batches to it."""
    trainer = train(DEVICES[1])
    with pretend_device.count_waits() as waits:
        trainer.step(2)
    assert waits == WAITS, waits


def updated(device, rows_on=None):
    """Make two updates of a memory's values, of chosen rows if rows_on is a device."""
    torch.manual_seed(0)
    memory = pkm.PKM(8, n_keys=4, heads=2, topk=3, key_dim=4).to(device)
    rows = None if rows_on is None else torch.tensor([1, 2, 5, 7, 11], device=rows_on)
    adam = pkm.LazyAdam([{"params": [memory.values], "rows": rows}], lr=0.1)
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(3, 5, 8).to(device)
        mask = (torch.arange(5) < torch.tensor([[5], [3], [2]])).to(device)
        memory(x, mask).square().sum().backward()
        adam.step()
        adam.zero_grad()
    return {"weight": memory.values.weight, **adam.state[memory.values.weight]}


@pytest.mark.parametrize("rows_on", [None, *DEVICES])
def test_chosen_rows(rows_on):
    assert_near(f"rows on {rows_on}", updated(DEVICES[1], rows_on),
                updated("cpu", rows_on and "cpu"))


def test_causal_with_padding():
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    losses = []
    for device in DEVICES:
        model = tiny_bert(causal=True, memory_layers=(1, 3), dropout=0.0).to(device)
        ids, labels = (torch.arange(14, device=device).view(2, 7) + n for n in (3, 4))
        losses.append(model(ids, mask.to(device), labels=labels).detach())
    assert_near("causal with padding", *losses[::-1])


def test_compiled(monkeypatch):
    """TorchDynamo captures a step's forward pass whole. No compiler comes after it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    reference, ours = train("cpu"), train(DEVICES[1], compile="on")
    assert ours.compiled is not ours.model
    assert_near("compiled", dict(ours.model.state_dict()), dict(reference.model.state_dict()))


def test_exporting():
    """A folder for transformers has the same weights."""
    files = pytest.importorskip("safetensors.torch")
    for device in DEVICES:
        export(f"{device}/out/demo_resm", f"{device}/folder")
    assert_near("exported", *(files.load_file(f"{device}/folder/model.safetensors")
                              for device in reversed(DEVICES)))


def replaced(function, old, new):
    """Compile a function's source text anew with a change."""
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(old) == 1
    made = {}
    exec(text.replace(old, new), vars(sys.modules[function.__module__]), made)  # noqa: S102
    return made[function.__name__]


@pytest.mark.parametrize("owner, function, old, new", [
    (pkm.PKM, "search", "candidates(self.topk, query.device)", 'candidates(self.topk, "cpu")'),
    (values.LazyAdam, "_update", "torch.zeros_like(weight, **like)",
     "torch.zeros(weight.shape, dtype=dtype)"),
    (evaluation, "evaluate_language_model", 'batch.pop("labels").flatten()',
     'batch.pop("labels").flatten().cpu()')], ids=["search", "_update", "evaluation"])
def test_a_tensor_on_the_wrong_device_is_an_error(monkeypatch, owner, function, old, new):
    """The change has no effect on the CPU, and ends in an error on the device."""
    monkeypatch.chdir("cpu")
    held_out = masked_heldout(Corpus("tiny"), "val", 16, 2, 2)
    monkeypatch.setattr(owner, function, replaced(getattr(owner, function), old, new))

    def step_and_evaluate(device):
        model = train(device, steps=1).model
        evaluation.evaluate_language_model(model, held_out, torch.device(device))

    step_and_evaluate("cpu")
    with pytest.raises(RuntimeError, match="device"):
        step_and_evaluate(DEVICES[1])


def main():
    pretend_device.register()
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # losses too
    files = [__file__, str(ROOT / "tests/for_transformers/on_pretend_device.py")]
    status = pytest.main([*files, "-q", "-p", "no:cacheprovider", "-p", "no:warnings",
                          *sys.argv[1:]])
    for what, difference in sys.modules["tests.on_pretend_device"].WORST.items():
        print(f"{difference:.1e} {what}")
    sys.stdout.flush()
    os._exit(status)  # PyTorch takes the device down after Python, which crashes


if __name__ == "__main__":
    main()
