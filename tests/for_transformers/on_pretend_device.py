"""
Run models of transformers with a memory on a pretended device, and compare with the CPU.

The parent folder's on_pretend_device.py runs this too.
"""
import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from lib.for_transformers import facts as ask
from lib.for_transformers import teach
from lib.for_transformers.adapter import load_memory, save_memory, unload_memory
from lib.for_transformers.add_memory import add_memory
from lib.for_transformers.rows import calibrate, count_reads, specific_rows
from tests.for_transformers import small_lessons
from tests.for_transformers.small_models import batch, logits, loss_of, small_model, with_memory
from tests.on_pretend_device import DEVICES, assert_near
from values import LazyAdam

transformers = pytest.importorskip("transformers")
files = pytest.importorskip("safetensors.torch")
KINDS = pytest.mark.parametrize("kind", ["BertForMaskedLM", "LlamaForCausalLM"])


def trained(kind, device):
    """Make two updates with padding, one optimizer for the values and one for all else."""
    model, (ids, mask) = with_memory(kind).train().to(device), batch()
    tables = [module.values for module in model.modules() if hasattr(module, "values")]
    optimizers = torch.optim.AdamW(model.parameters(), lr=1e-2), LazyAdam(tables, lr=1e-2)
    for _ in range(2):
        loss_of(model, ids.to(device), mask.to(device)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


@KINDS
def test_training_saving_and_loading(kind, tmp_path):
    """The whole model and its memory alone, into models on the CPU and on the device."""
    ids, mask = batch()
    models = {device: trained(kind, device) for device in DEVICES}
    reference, ours = (dict(models[device].state_dict()) for device in DEVICES)
    assert_near(f"{kind} trained", ours, reference, 1e-8)
    expected = logits(models["cpu"], ids, mask)
    models[DEVICES[1]].save_pretrained(tmp_path / "whole")
    save_memory(models[DEVICES[1]], tmp_path / "memory")
    auto = {"BertForMaskedLM": "AutoModelForMaskedLM"}.get(kind, "AutoModelForCausalLM")
    for device in DEVICES:
        inputs = ids.to(device), mask.to(device)
        again = getattr(transformers, auto).from_pretrained(
            tmp_path / "whole", trust_remote_code=True).eval().to(device)
        assert_near(f"{kind} loaded", logits(again, *inputs), expected, 1e-8)
        plain = small_model(kind).double().to(device)
        plain.load_state_dict({n: w for n, w in again.state_dict().items() if "memory" not in n})
        load_memory(plain.eval(), tmp_path / "memory")
        assert_near(f"{kind} memory loaded", logits(plain, *inputs), expected, 1e-8)
        unload_memory(plain, tmp_path / "memory")


@KINDS
def test_rows(kind):
    """Counts of reads and the chosen rows are equal, and so is the calibrated query."""
    found, (ids, mask) = [], batch()
    for device in DEVICES:
        model = small_model(kind).double().eval().to(device)
        torch.manual_seed(0)
        add_memory(model, (1, 2), values="zero", freeze=True, n_keys=4, heads=2, topk=3, key_dim=4)
        inputs, ordinary = (ids.to(device), mask.to(device)), ids[:1].to(device)
        read = count_reads(model, *inputs), calibrate(model, [ordinary, ordinary + 1])
        found.append([*read, specific_rows(*read, batches=2, top=5), dict(model.state_dict())])
    assert_near(f"{kind} rows", found[1], found[0])


@pytest.mark.parametrize("kind", small_lessons.KINDS)
def test_a_lesson(kind, tmp_path, monkeypatch):
    load, printed, saved = ask.load_model, [], []

    def load_float64(name, device):
        model, tokenizer = load(name, "cpu")
        return model.double().to(device), tokenizer

    monkeypatch.setattr(ask, "load_model", load_float64)
    monkeypatch.setattr(teach, "MEMORY", small_lessons.MEMORY)
    monkeypatch.setattr(teach, "BLOCKS", 4)
    monkeypatch.chdir(tmp_path)
    small_lessons.save_base("model", kind)
    small_lessons.write_texts(".")
    for device in DEVICES:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            teach.main(["model", "facts.txt", "--ordinary", "ordinary.txt", "--steps", "5",
                        "--out", "lesson", "--device", device])
        printed.append(re.sub(r"\S+ s a step|device .*", "", out.getvalue()))
        saved.append(files.load_file("lesson/memory.safetensors"))
        Path("lesson").rename(device)
    assert printed[0] == printed[1] and "recalls" in printed[0]
    assert_near(f"{kind}: lesson", *saved[::-1])
