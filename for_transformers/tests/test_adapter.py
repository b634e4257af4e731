"""
A memory alone, saved and loaded: beside its model, beside an adapter of PEFT.
"""
import pytest
import torch

from for_transformers.adapter import find_memories, load_memory, save_memory, train_memory
from for_transformers.add_memory import add_memory
from for_transformers.tests.small_models import MEMORY, batch, logits, small_model, transformers
from lib.settings import UserError
from pkm import LazyAdam
from tests.helpers import assert_near, assert_same


def base(kind="BertForMaskedLM", **more):
    """Make a random model of three layers. The same arguments give the same weights."""
    return small_model(kind, **{"num_hidden_layers": 3, **more}).eval()


def model_with_memory():
    """Make a model with two memories, whose batch norms have statistics."""
    model = base()
    add_memory(model, (1, 3), alpha=0.6, beta=1.5, **MEMORY)
    with torch.no_grad():
        logits(model.train(), *batch())
    return model.eval()


def test_a_memory_comes_back_bit_for_bit(tmp_path):
    model = model_with_memory()
    save_memory(model, tmp_path)
    again = base()
    tables = load_memory(again, tmp_path)
    assert list(tables) == [1, 3] and tables[3] is find_memories(again)["3"].values
    assert_same(dict(model.state_dict()), dict(again.state_dict()))
    assert torch.equal(logits(again, *batch()), logits(model, *batch()))


def test_a_whole_model_is_saved_with_its_memory_beside(tmp_path):
    """transformers reports the memory as unexpected, and load_memory adds it."""
    model = model_with_memory()
    model.save_pretrained(tmp_path)
    save_memory(model, tmp_path)
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    load_memory(again, tmp_path)
    assert_near(logits(again, *batch()), logits(model, *batch()), 1e-6)


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(UserError, match="BertForMaskedLM has no memory to save"):
        save_memory(base(), tmp_path)
    with pytest.raises(FileNotFoundError, match="memory.safetensors"):
        load_memory(base(), tmp_path)
    save_memory(model_with_memory(), tmp_path)
    for other in (base(hidden_size=32), base("RobertaForMaskedLM"), base(num_hidden_layers=4)):
        with pytest.raises(UserError, match="has the memory of .*'bert'.*, not of"):
            load_memory(other, tmp_path)
        assert not find_memories(other)


def lora(model, **more):
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(**{
        "r": 2, "target_modules": ["query", "value", "output.dense"],
        "exclude_modules": ["memory.query"], "init_lora_weights": False, **more}))


def test_an_adapter_and_a_memory(tmp_path):
    """Both are trained and saved, the memory first, and loaded, the adapter first."""
    model = base()
    tables = add_memory(model, (1, 3), **MEMORY)
    model = lora(model)
    train_memory(model)
    assert not tables[1].weight.requires_grad  # DistributedDataParallel passes it by
    before = {name: w.clone() for name, w in model.state_dict().items()}
    dense = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    sparse = LazyAdam(tables.values())
    logits(model.train(), *batch()).square().mean().backward()
    dense.step()
    sparse.step()
    moved = {name for name, w in model.state_dict().items() if not torch.equal(w, before[name])}
    assert moved == {name for name in before if ".memory." in name or "lora_" in name}

    model.save_pretrained(tmp_path)
    save_memory(model, tmp_path)
    again = pytest.importorskip("peft").PeftModel.from_pretrained(base(), tmp_path)
    load_memory(again.get_base_model(), tmp_path)
    assert_same(dict(model.state_dict()), dict(again.state_dict()))
    assert torch.equal(logits(model.eval(), *batch()), logits(again.eval(), *batch()))


@pytest.mark.parametrize("config", [{"exclude_modules": None}, {"modules_to_save": ["memory"]}])
def test_an_adapter_in_the_memory_is_refused(tmp_path, config):
    model = lora(model_with_memory(), **config)
    for work in (train_memory, lambda model: save_memory(model, tmp_path)):
        with pytest.raises(UserError, match="PEFT changes 1..* of the memories: .*exclude_modules"):
            work(model)
