"""
Test how a memory alone, and a model with its memory, is saved, loaded and refused.
"""
import copy
import json
import warnings

import pytest
import torch

from for_transformers.adapter import find_memories, load_memory, save_memory, train_memory
from for_transformers.add_memory import add_memory
from for_transformers.folder import keep_query
from lib.errors import UserError
from tests.for_transformers import small_models
from tests.helpers import assert_near, assert_same
from values import LazyAdam

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")


def base(kind="BertForMaskedLM", **more):
    """Make a random model of three layers. The same arguments give the same weights."""
    return small_models.small_model(kind, **{"num_hidden_layers": 3, **more}).float().eval()


def with_memory(seed=1, **more):
    """Make a model with two memories, whose batch norm has statistics."""
    model = base(**more)
    torch.manual_seed(seed)
    add_memory(model, (1, 3), alpha=0.6, beta=1.5, **small_models.MEMORY)
    ids, mask = small_models.batch()
    with torch.no_grad():
        model.train()(ids, attention_mask=mask)
    model.requires_grad_(False)
    train_memory(model)
    return model.eval()


def outputs(model):
    ids = torch.arange(1, 13).view(2, 6)
    with torch.no_grad():
        return model(ids)[0]


def test_a_memory_comes_back_bit_for_bit(tmp_path):
    model = with_memory()
    save_memory(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["memory.json", "memory.safetensors"]
    again = base()
    tables = load_memory(again, tmp_path)
    assert list(tables) == [1, 3] and tables[3] is find_memories(again)[3].values
    assert_same(dict(model.state_dict()), dict(again.state_dict()))
    assert torch.equal(outputs(again), outputs(model))
    assert not torch.equal(outputs(again), outputs(base()))


def test_a_loaded_memory_trains(tmp_path):
    save_memory(with_memory(), tmp_path)
    model, (ids, mask) = base(), small_models.batch()
    tables = load_memory(model, tmp_path)
    before = tables[1].weight.clone()
    values = LazyAdam(tables.values())
    model.train()(ids, attention_mask=mask, labels=ids).loss.backward()
    values.step()
    moved = (tables[1].weight != before).any(1)
    assert 0 < moved.sum() <= 16


def test_dtypes_are_kept(tmp_path):
    model = with_memory()
    for memory in find_memories(model).values():
        memory.query.bfloat16()
    model.bfloat16()
    find_memories(model)[3].values.float()  # a table that is trained stays in float32
    save_memory(model, tmp_path)
    again = base().bfloat16()
    load_memory(again, tmp_path)
    assert_same(dict(model.state_dict()), dict(again.state_dict()))
    assert {name: w.dtype for name, w in model.state_dict().items()} == {
        name: w.dtype for name, w in again.state_dict().items()}
    load_memory(other := base(), tmp_path)  # in float32: only the query must follow
    memory = find_memories(other)[1]
    assert memory.query.weight.dtype == torch.float32 and memory.keys.dtype == torch.bfloat16
    assert outputs(other).isfinite().all()


def test_the_memory_of_one_class_fits_the_others_of_its_family(tmp_path):
    save_memory(with_memory(), tmp_path)
    for kind in ("BertForQuestionAnswering", "BertForSequenceClassification"):
        model = getattr(transformers, kind)(base().config)
        load_memory(model, tmp_path)
        memory = find_memories(model)[3]
        assert torch.equal(memory.keys, find_memories(with_memory())[3].keys)


def damage(folder, change):
    """Rewrite memory.json by `change`, a function of its content."""
    content = json.loads((folder / "memory.json").read_text())
    change(content)
    (folder / "memory.json").write_text(json.dumps(content))


REFUSED = {
    "hidden_size is 16, here 32": lambda folder: base(hidden_size=32),
    "model_type is bert, here roberta": lambda folder: base("RobertaForMaskedLM"),
    "num_hidden_layers is 3, here 4": lambda folder: base(num_hidden_layers=4),
    "of its value rows are in use": lambda folder: with_memory(),
    "no memory.json": lambda folder: (folder / "memory.json").unlink(),
    "damaged .KeyError": lambda folder: damage(folder, lambda c: c["memory"].pop("layers")),
    "damaged .TypeError": lambda folder: damage(folder, lambda c: c["memory"].update(n_key=4)),
    "not readable": lambda folder: (folder / "memory.json").write_text("{"),
    "memory.safetensors: truncated": lambda folder: cut(folder / "memory.safetensors"),
    "1.keys: found .2, 2, 4, 2., expected .2, 2, 5, 2.": lambda folder: damage(
        folder, lambda c: c["memory"].update(n_keys=5)),
    "2.keys: found none": lambda folder: damage(
        folder, lambda c: c["memory"].update(layers=[1, 2, 3])),
    "safetensors: 3.*expected none": lambda folder: damage(
        folder, lambda c: c["memory"].update(layers=[1])),
}


def cut(file):
    file.write_bytes(file.read_bytes()[:-50])


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path, words):
    save_memory(with_memory(), tmp_path)
    model = REFUSED[words](tmp_path)
    model = model if isinstance(model, torch.nn.Module) else base()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match=words):
        load_memory(model, tmp_path)
    assert_same(dict(before), dict(model.state_dict()))


def test_the_memory_of_another_model_is_warned_of(tmp_path):
    save_memory(with_memory(), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_memory(base().bfloat16(), tmp_path)
    other = base()
    other.get_input_embeddings().weight.data.normal_()
    with pytest.warns(UserWarning, match="word embeddings are others"):
        load_memory(other, tmp_path)


def test_saving_without_a_memory_is_refused_and_other_trained_weights_are_named(tmp_path):
    with pytest.raises(UserError, match="BertForMaskedLM has no memory to save"):
        save_memory(base(), tmp_path / "folder")
    assert not list(tmp_path.iterdir())
    model = with_memory()
    model.cls.requires_grad_(True)
    with pytest.warns(UserWarning, match="the memory alone, but 6 other weights"):
        save_memory(model, tmp_path)


def test_a_pruned_memory_is_not_saved_alone(tmp_path):
    model = small_models.small_model("BertForMaskedLM")
    add_memory(model, [1], n_keys=4, heads=2, topk=3, key_dim=8)
    find_memories(model)[1].share_rows(5)
    with pytest.raises(UserError, match="pruned memory cannot be saved alone"):
        save_memory(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_offloaded_memory_is_not_saved_alone(tmp_path):
    model = with_memory()
    find_memories(model)[1].to("meta")  # as accelerate leaves it between passes
    with pytest.raises(UserError, match="the memory is offloaded"):
        save_memory(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_save_that_is_interrupted_leaves_no_pair_of_two_saves(tmp_path, monkeypatch):
    save_memory(with_memory(), tmp_path)

    def stop(*args):
        raise KeyboardInterrupt

    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with monkeypatch.context() as patch:  # while the tensors are written
        patch.setattr("safetensors.torch.save_file", stop)
        with pytest.raises(KeyboardInterrupt):
            save_memory(with_memory(2), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    monkeypatch.setattr("os.replace", stop)  # when both are written
    with pytest.raises(KeyboardInterrupt):
        save_memory(with_memory(2), tmp_path)
    with pytest.raises(UserError, match=r"no memory.json"):
        load_memory(base(), tmp_path)


# a whole model, by save_pretrained


@pytest.mark.parametrize("kind", small_models.MODELS)
def test_a_saved_model_keeps_its_memory_or_is_refused(tmp_path, kind):
    model = small_models.with_memory(kind, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    for plain in (type(model), transformers.AutoModel):
        with pytest.raises(KeyError, match="this model has a memory.*trust_remote_code=True"):
            plain.from_pretrained(tmp_path / "model")
    auto = (transformers.AutoModelForCausalLM if kind in small_models.DECODERS
            else transformers.AutoModelForMaskedLM)
    again = auto.from_pretrained(tmp_path / "model", trust_remote_code=True)
    assert isinstance(again, type(model)) and type(again) is not type(model)
    assert_same(dict(model.state_dict()), dict(again.state_dict()))
    assert_near(outputs(again), outputs(model), 1e-6)  # another alignment, another rounding
    body = transformers.AutoModel.from_pretrained(tmp_path / "model", trust_remote_code=True)
    body.save_pretrained(tmp_path / "body")  # what was loaded is saved with its code too
    body = transformers.AutoModel.from_pretrained(tmp_path / "body", trust_remote_code=True)
    assert_near(outputs(body), outputs(model.base_model), 1e-6)

    model.requires_grad_(False)  # and the memory alone
    save_memory(model, tmp_path / "memory")
    plain = small_models.small_model(kind)
    plain.load_state_dict({name: w for name, w in model.state_dict().items()
                           if ".memory." not in name})
    load_memory(plain.float().eval(), tmp_path / "memory")
    assert_near(outputs(plain), outputs(model), 1e-6)


@pytest.mark.parametrize("kind, auto", [
    ("BertForMultipleChoice", "AutoModelForMultipleChoice"),
    ("BertForPreTraining", "AutoModelForPreTraining"),
    ("BertForNextSentencePrediction", "AutoModelForNextSentencePrediction")])
def test_other_heads_and_a_scaled_ffn_are_saved(tmp_path, kind, auto):
    torch.manual_seed(0)
    model = small_models.spread(
        getattr(transformers, kind)(transformers.BertConfig(**small_models.BERT)))
    add_memory(model, (1,), alpha=0.5, beta=0)
    model.save_pretrained(tmp_path)
    again = getattr(transformers, auto).from_pretrained(tmp_path, trust_remote_code=True)
    ids = torch.randint(1, 40, (2, 3, 6) if "Choice" in kind else (2, 6))
    with torch.no_grad():
        assert_near(again.eval()(ids)[0], model.eval()(ids)[0], 1e-6)


def test_adding_a_memory_leaves_the_config_usable(tmp_path):
    """A model without memory can be made of it, and a copy saves its own memory."""
    model = with_memory()
    type(model)(model.config)
    other = copy.deepcopy(model)
    find_memories(other)[1].keys.data.zero_()
    other.save_pretrained(tmp_path)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert not find_memories(again)[1].keys.any() and find_memories(model)[1].keys.any()


def test_a_push_on_saving_is_refused(tmp_path):
    """transformers would upload only the files that it wrote itself."""
    with pytest.raises(ValueError, match="use model.push_to_hub"):
        with_memory().save_pretrained(tmp_path / "model", push_to_hub=True)
    assert not list(tmp_path.iterdir())


def test_the_query_of_a_quantized_model_stays_whole(tmp_path):
    """The saved config names the Linears that are not quantized."""
    class Linear4bit(torch.nn.Linear):
        pass

    class Config:
        llm_int8_skip_modules = None

    model = with_memory()
    model.bert.encoder.layer[0].intermediate.dense.__class__ = Linear4bit
    model.config.quantization_config = Config()
    keep_query(model)
    kept = Config.__dict__ | vars(model.config.quantization_config)
    assert "bert.encoder.layer.0.memory.query" in kept["llm_int8_skip_modules"]
    assert "cls.predictions.decoder" in kept["llm_int8_skip_modules"]
    assert "bert.encoder.layer.0.intermediate.dense" not in kept["llm_int8_skip_modules"]


def test_a_quantized_query_is_refused():
    model = with_memory()
    query = find_memories(model)[1].query
    query.weight = torch.nn.Parameter(query.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match="memory's query is quantized.*llm_int8_skip_modules"):
        outputs(model)


def test_a_model_loaded_with_its_code_saves_a_memory_alone(tmp_path):
    model = with_memory()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, trust_remote_code=True)
    loaded.requires_grad_(False)
    save_memory(loaded, tmp_path)
    load_memory(again := base(), tmp_path)
    assert torch.equal(outputs(again), outputs(model))
    assert 16 == json.loads(
        (tmp_path / "memory.json").read_text())["base"]["hidden_size"]
