"""
Test memories that change nothing at first: their queries, and the rows that texts read.
"""
import copy
import math

import pytest
import torch

from lib.for_transformers.adapter import find_memories
from lib.for_transformers.add_memory import add_memory, find_layers
from lib.for_transformers.rows import calibrate, count_reads, ordinary_reads, specific_rows
from pkm import PKM
from tests.for_transformers.small_models import (
    MEMORY,
    MODELS,
    batch,
    logits,
    small_model,
)
from tests.helpers import assert_near, assert_same

KINDS = pytest.mark.parametrize("kind", ["LlamaForCausalLM", "BertForMaskedLM"])


@pytest.mark.parametrize("kind", MODELS)
def test_values_of_0_leave_a_frozen_model_as_it_is(kind):
    """Compare the bits of evaluation and of training, with padding and without."""
    plain, model, (ids, mask) = small_model(kind), small_model(kind), batch()
    tables = add_memory(model, (1, 2), values="zero", freeze=True, **MEMORY)
    assert list(tables) == [1, 2] and not any(table.weight.any() for table in tables.values())
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 and all(name.endswith("memory.values.weight") for name in trained)
    assert not any("query_norm" in name for name in model.state_dict())
    for training in (False, True):
        with torch.no_grad():
            for real in (mask, torch.ones_like(mask)):
                y = logits(model.train(training), ids, real)
                assert torch.equal(y, logits(plain.train(training), ids, real))
    find_layers(model)[0].memory.values.weight.data.normal_()  # the memory is there
    assert not torch.equal(logits(model, ids, mask), y)


@pytest.mark.parametrize("settings, words", [
    ({"values": "ones"}, "values = 'ones': expected 'random' or 'zero'"),
    ({"freeze": True, "query_norm": True}, "freeze=True trains the values alone: .* query_norm"),
    ({"freeze": True, "beta": 0}, "beta = 0 has none"),
])
def test_what_no_frozen_memory_can_have(settings, words):
    model = small_model("LlamaForCausalLM")
    with pytest.raises(ValueError, match=words):
        add_memory(model, (1,), **{**MEMORY, **settings})
    assert not any(isinstance(m, PKM) for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def frozen(kind, layers=(1, 2), dtype=torch.double, **more):
    """Make a model with new memories of 36 slots."""
    model = small_model(kind, num_hidden_layers=3, **more).to(dtype).eval()
    add_memory(model, layers, values="zero", freeze=True, **{**MEMORY, "n_keys": 6})
    for memory in find_memories(model).values():  # unlike 0 and 1
        memory.query.bias.data.normal_(3)
        memory.query.weight.data.mul_(5)
    return model


def texts(count=4):
    torch.manual_seed(2)
    return list(torch.randint(3, 40, (count, 3, 7)))


@torch.no_grad()
def inputs(model, batches):
    """Record what the memories are given: {layer: one (tokens, dim) for each batch}."""
    seen = {n: [] for n in find_memories(model)}
    hooks = [memory.register_forward_pre_hook(
                 lambda _, args, own=seen[n]: own.append(args[0].flatten(0, -2)))
             for n, memory in find_memories(model).items()]
    for ids in batches:
        model(ids)
    for hook in hooks:
        hook.remove()
    return seen


def hooks_of(model):
    return [len(module._forward_hooks) + len(module._forward_pre_hooks)
            for module in model.modules()]


@KINDS
def test_calibrated_queries_have_mean_0_and_variance_1(kind):
    """Only the queries change, and only by a shift and a scale."""
    model, batches = frozen(kind), texts()
    before = copy.deepcopy(model)
    calibrate(model, batches)
    for n, x in inputs(model, batches).items():
        memory, old = find_memories(model)[n], find_memories(before)[n]
        query, old_query = memory.query(torch.cat(x)), old.query(torch.cat(x))
        mean, std = old_query.mean(0), old_query.std(0)
        assert query.mean(0).abs().max() < 1e-5 and (query.var(0) - 1).abs().max() < 1e-3
        assert mean.abs().max() > 5  # before it was not so
        assert_near(query, (old_query - mean) / std, 1e-3)
        assert torch.equal(memory.keys, old.keys) and not memory.values.weight.any()
    queries = {name for name in model.state_dict() if ".memory.query." in name}
    changed = {name for name, w in model.state_dict().items()
               if not torch.equal(w, before.state_dict()[name])}
    assert changed == queries and len(queries) == 4


@KINDS
def test_counts_are_those_of_each_search(kind):
    model, batches = frozen(kind), texts()
    found = calibrate(model, batches)
    assert_same(ordinary_reads(model, batches), found)
    for n, seen in inputs(model, batches).items():
        memory, read_by = find_memories(model)[n], torch.zeros(36, dtype=torch.long)
        for ids, x in zip(batches, seen, strict=True):
            slots = memory.search(memory.query(x))[0].flatten().tolist()
            expected = torch.tensor([slots.count(row) for row in range(36)])
            assert expected.sum() == 21 * 2 * 3  # tokens, heads, topk
            assert torch.equal(count_reads(model, ids)[n], expected)
            read_by += expected > 0
        assert torch.equal(found[n], read_by) and len(found[n].unique()) > 2


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM"])
def test_padding_reads_nothing(kind):
    layers = {"n_layer": 3} if kind == "GPT2LMHeadModel" else {}
    model, (ids, mask) = frozen(kind, **layers), batch()
    calibrate(model, texts())
    counts = count_reads(model, ids, mask)
    single = [count_reads(model, row[real.bool()][None]) for row, real in zip(ids, mask)]
    for n in (1, 2):
        assert torch.equal(counts[n], sum(count[n] for count in single))
        assert counts[n].sum() == 13 * 2 * 3
        assert not torch.equal(counts[n], count_reads(model, ids)[n])


@KINDS
def test_padding_that_is_computed_reads_nothing(kind, monkeypatch):
    """On a GPU and in a compiled model padded tokens get weights of 0."""
    model, (ids, mask) = frozen(kind), batch()
    calibrate(model, texts())
    expected = count_reads(model, ids, mask)

    def forward(memory, x, real):
        slots, weights = memory.search(memory.query(x.flatten(0, -2)))
        return memory.values(slots, weights.where(real.reshape(-1, 1, 1), 0)).view_as(x)

    monkeypatch.setattr(PKM, "forward", forward)
    assert_same(count_reads(model, ids, mask), expected)


@pytest.mark.parametrize("settings", [{"values": "random", "freeze": True}, {"values": "zero"}])
def test_a_memory_in_training_is_not_calibrated(settings):
    model = small_model("LlamaForCausalLM")
    add_memory(model, (1, 2), **MEMORY, **settings)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="layer 1: calibrate.* expects a new memory"):
        calibrate(model, texts())
    assert_same(dict(model.state_dict()), dict(before))


@KINDS
def test_layers_above_the_last_memory_do_not_run(kind):
    model, run = frozen(kind), []
    for layer in find_layers(model):
        layer.register_forward_hook(lambda layer, args, y: run.append(layer))
    hooks = hooks_of(model)
    calibrate(model, texts(1))
    count_reads(model, *batch())
    assert set(run) == {find_layers(model)[0]} and hooks_of(model) == hooks
    with torch.no_grad():
        model(texts(1)[0])
    assert set(run) == set(find_layers(model))  # and nothing stops it now


@KINDS
def test_a_model_that_fails_keeps_no_hooks(kind):
    model, (good, *_), bad = frozen(kind), texts(), torch.full((2, 5), 40)  # no such token
    hooks, before = hooks_of(model), copy.deepcopy(model.state_dict())
    for call in (lambda: calibrate(model, [good, bad]), lambda: ordinary_reads(model, [good, bad]),
                 lambda: count_reads(model, bad)):
        with pytest.raises(IndexError):
            call()
        assert hooks_of(model) == hooks
    assert_same(dict(model.state_dict()), dict(before))


def test_a_half_precision_model_is_calibrated():
    model, batches = frozen("LlamaForCausalLM", dtype=torch.bfloat16), texts()
    calibrate(model, batches)
    for n, x in inputs(model, batches).items():
        query = find_memories(model)[n].query(torch.cat(x)).double()
        assert find_memories(model)[n].query.weight.dtype == torch.bfloat16
        assert query.mean(0).abs().max() < 0.05 and (query.var(0) - 1).abs().max() < 0.05


def test_rows_that_a_text_reads_and_ordinary_text_does_not():
    """Weigh rows by log 4, 2, 4/3 and 1 if 0 to 3 of 3 batches read them."""
    reads = torch.tensor([20, 1, 0, 20, 900, 3])
    ordinary = torch.tensor([1, 0, 0, 2, 3, 0])
    scores = [math.log(21) * math.log(2)**4, math.log(2) * math.log(4)**4, 0,
              math.log(21) * math.log(4 / 3)**4, 0, math.log(4) * math.log(4)**4]
    assert [round(score, 3) for score in scores] == [0.703, 2.56, 0, 0.021, 0, 5.12]
    pair = {4: reads}, {4: ordinary}
    by_reads = specific_rows(*pair, 3, top=6, tf=lambda count: count)[4].tolist()
    assert by_reads == [5, 0, 1, 3]  # 3 * 3.69, 20 * 0.23, 3.69, 20 * 0.007
    assert specific_rows(*pair, 3, top=3)[4].tolist() == [5, 1, 0]
    assert specific_rows(*pair, 3, top=1)[4].tolist() == [5]
    assert specific_rows(*pair, 3, top=6)[4].tolist() == [5, 1, 0, 3]  # scores of 0 are no choice
    assert specific_rows(*pair, 3, top=100)[4].tolist() == [5, 1, 0, 3]
    two = specific_rows({1: reads, 2: reads.flip(0)}, {1: ordinary, 2: ordinary.flip(0)}, 3, 2)
    assert {n: rows.tolist() for n, rows in two.items()} == {1: [5, 1], 2: [0, 4]}
    assert not len(specific_rows({1: 0 * reads}, {1: ordinary}, 3, 2)[1])


def test_calibrating_needs_a_memory_and_a_text():
    for model, batches in ((small_model("LlamaForCausalLM"), texts()),
                           (frozen("LlamaForCausalLM"), [torch.tensor([[3]])])):
        with pytest.raises(ValueError, match="a model with memory, and ordinary text"):
            calibrate(model, batches)
