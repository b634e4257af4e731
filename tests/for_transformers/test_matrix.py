"""
Test memories in each model and each mode, or the reason why a mode cannot be.

To compile takes seconds. Most tests use dynamo with the backend "eager", which finds graph breaks
and lost side effects. test_inductor compiles to the end.
"""
import copy
import threading

import pytest
import torch

from for_transformers.add_memory import attention_of
from tests.for_transformers.small_models import (
    DECODERS,
    MODELS,
    batch,
    by_hand,
    find_layers,
    gradients,
    logits,
    no_cache,
    tell_padding,
    with_memory,
)
from tests.helpers import assert_near
from values import LazyAdam, ValueTable


@pytest.fixture(autouse=True)
def forget_compiled():
    torch._dynamo.reset()


models = pytest.mark.parametrize("kind", MODELS)
paddings = pytest.mark.parametrize("padding", ["right", "left"])


def real(y, mask):
    return y[mask.bool()]


def assert_same_gradients(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        size = max(grad.norm().item(), 1e-3)  # some have a gradient of 0, such as a query's bias
        assert (found[name] - grad).norm() <= tolerance * size, name


@paddings
@models
def test_formula(kind, padding):
    """Outputs are FFN + memory by hand; in training gradients and statistics, too."""
    model, (ids, mask) = with_memory(kind), batch(padding)
    plain, parameters = by_hand(model)
    tell_padding(plain, mask)
    with torch.no_grad():
        y, expected = logits(model, ids, mask), logits(plain, ids, mask)
    assert_near(real(y, mask), real(expected, mask), 1e-12)
    model.train()
    plain.train()
    found = gradients(model, (ids, mask))
    for p in parameters.values():
        p.grad = None
    real(logits(plain, ids, mask), mask).double().square().mean().backward()
    expected = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    assert_same_gradients(found, expected, 1e-11)


# RoBERTa, XLM-R, CamemBERT and ELECTRA have BERT's layers, line by line.
COMPILED = [kind for kind in MODELS if not kind.startswith(("Robert", "XLM", "Camem", "Electra"))]


def one_layer(kind, dtype=torch.double):
    """Make a model of one layer, which takes half as long to compile as one of two."""
    model = with_memory(kind, layers=(1,), dtype=dtype)
    del find_layers(model)[1]
    return model


@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_with_mask(kind):
    """One graph, in training: gradients, also of the values, as in eager."""
    model, batches = one_layer(kind).train(), [batch()]
    expected = gradients(copy.deepcopy(model), *batches)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same_gradients(gradients(compiled, *batches), expected, 1e-9)


def test_compiled_and_checkpointed():
    model, batches = one_layer("LlamaForCausalLM").train(), [batch()]
    expected = gradients(copy.deepcopy(model), *batches)
    checkpointing(model, reentrant=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_gradients(gradients(compiled, *batches), expected, 1e-9)


@pytest.mark.parametrize("kind", ["Qwen3ForCausalLM", "BertForMaskedLM"])
def test_exported_with_mask(kind):
    model, (ids, mask) = one_layer(kind), batch()
    settings = {"attention_mask": mask, **no_cache(model)}
    with torch.no_grad():
        exported = torch.export.export(model, (ids,), settings).module()
        y, expected = exported(ids, **settings).logits, logits(model, ids, mask)
        assert_near(real(y, mask), real(expected, mask), 1e-12)


def test_inductor():
    model, (ids, mask) = one_layer("BertForMaskedLM", torch.float), batch()
    with torch.no_grad():
        expected = real(logits(model, ids, mask), mask)
        y = logits(torch.compile(model, fullgraph=True), ids, mask)
        assert_near(real(y, mask), expected, 1e-5)


NO_CHECKPOINTING = {  # transformers' own errors, also without a memory
    ("MPNetForMaskedLM", False): "does not support activation checkpointing",
    ("MPNetForMaskedLM", True): "does not support activation checkpointing",
    ("DebertaV2ForMaskedLM", True): "backward through the graph a second time",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [False, True])
@models
def test_checkpointing(kind, reentrant):
    """Two passes with other padding before a backward: all gradients as without checkpointing."""
    model, batches = with_memory(kind).train(), [batch("right"), batch("left")]
    expected = gradients(copy.deepcopy(model), *batches)
    if reason := NO_CHECKPOINTING.get((kind, reentrant)):
        with pytest.raises((ValueError, RuntimeError), match=reason):
            checkpointing(model, reentrant)
            gradients(model, *batches)
        return
    checkpointing(model, reentrant)
    assert_same_gradients(gradients(model, *batches), expected, 1e-12)


def checkpointing(model, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()  # reentrant checkpointing needs an input with a gradient


@pytest.mark.parametrize("training", [True, False])
@models
def test_two_threads(kind, training):
    """Two threads with other padding that are inside of the same layer at the same time."""
    model, batches = with_memory(kind, layers=(2,)).train(training), [batch("right"), batch("left")]
    with torch.no_grad():
        alone = [logits(copy.deepcopy(model), *b) for b in batches]
        barrier, found = threading.Barrier(2, timeout=20), {}

        def meet(*_):
            barrier.wait()

        attention_of(find_layers(model)[1]).register_forward_hook(meet)  # the FFN comes next

        def serve(n):
            with torch.no_grad():
                found[n] = logits(model, *batches[n])

        threads = [threading.Thread(target=serve, args=(n,)) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for n, (_, mask) in enumerate(batches):
        assert_near(real(found[n], mask), real(alone[n], mask), 1e-12)


@models
def test_bf16(kind):
    """Only the query has the layer's dtype. The memory trains; outputs are near float32's."""
    model, (ids, mask) = with_memory(kind, dtype=torch.bfloat16), batch()
    for name, p in model.named_parameters():
        whole = ".memory." in name and ".memory.query." not in name
        assert p.dtype is (torch.float32 if whole else torch.bfloat16), name
    with torch.no_grad():
        reference = logits(copy.deepcopy(model).float(), ids, mask)
        assert_near(real(logits(model, ids, mask), mask), real(reference, mask), 0.1)
    tables = [m for m in model.modules() if isinstance(m, ValueTable)]
    before = [table.weight.clone() for table in tables]
    values = LazyAdam(tables, lr=0.1)
    loss = logits(model.train(), ids, mask)[mask.bool()].float().square().mean()
    loss.backward()
    values.step()
    for table, weight in zip(tables, before, strict=True):
        assert (table.weight != weight).any() and table.weight.isfinite().all()


@pytest.mark.parametrize("kind", DECODERS)
def test_generate(kind):
    """With a cache and left padding, as each prompt alone; right padding: the same logits."""
    model, (ids, mask) = with_memory(kind), batch("left")
    settings = {"max_new_tokens": 5, "do_sample": False, "min_new_tokens": 5}
    together = model.generate(ids, attention_mask=mask, **settings)[:, ids.shape[1]:]
    again = model.generate(ids, attention_mask=mask, use_cache=False, **settings)[:, ids.shape[1]:]
    assert torch.equal(together, again)
    static = model.generate(ids, attention_mask=mask, cache_implementation="static", **settings)
    assert torch.equal(together, static[:, ids.shape[1]:])
    right, right_mask = batch("right")
    with torch.no_grad():
        padded = logits(model, right, right_mask)
    for n, prompt in enumerate(ids):
        alone = prompt[mask[n].bool()][None]
        generated = model.generate(alone, attention_mask=torch.ones_like(alone), **settings)
        assert torch.equal(generated[0, alone.shape[1]:], together[n])
        with torch.no_grad():
            start = right[n, right_mask[n].bool()][None]
            y = model(start, **no_cache(model)).logits[0]
        assert_near(padded[n, :start.shape[1]], y, 1e-10)
