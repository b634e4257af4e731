"""
Compare the network's layers and heads with formulas; test_huggingface.py compares logits.
"""
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model import (
    SIZES,
    BertConfig,
    Classifier,
    LanguageModel,
    SpanReader,
    build_model,
)
from tests.helpers import tiny_bert


@pytest.mark.parametrize("size, layers, millions", [("base", (4, 8), (110.1, 505.9, 515.4)),
                                                    ("large", (8, 16), (336.2, 859.5, 876.2))])
def test_parameter_counts_are_those_of_table_1(size, layers, millions):
    systems = [((), 1.0), (layers, 0.0), (layers, 1.0)]  # BERT, PKM, ResM
    for (memory_layers, alpha), expected in zip(systems, millions, strict=True):
        with torch.device("meta"):
            config = BertConfig(memory_layers=memory_layers, alpha=alpha, **SIZES[size])
            model = LanguageModel(config)
        assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == expected
        for n, layer in enumerate(model.bert.layers, 1):
            names = {name.split(".")[0] for name, _ in layer.named_parameters()}
            assert ("memory" in names) == (n in memory_layers)
            assert ("up" in names) == ("down" in names) == (n not in memory_layers or alpha)


@pytest.mark.parametrize("head", [None, "classifier", "span"])
def test_initial_weights(head):
    """Draw matrices with init_std, and start biases at 0, norms as in BERT, memories as in PKM."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=99, n_layer=2, n_head=2, d_model=64, d_ff=96, max_len=40,
                        init_std=0.5, memory_layers=(2,), n_keys=16, topk=4, key_dim=32)
    model = build_model(config, head, ["a", "b", "c"])
    assert {m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)} == {1e-12}
    for name, p in model.named_parameters():
        memory = ".memory." in name
        if name.endswith("bias") and not memory:
            assert (p == 0).all(), name
        elif "norm" in name:
            assert (p == ("weight" in name)).all(), name
        elif not memory:
            assert p.std().item() == pytest.approx(0.5, rel=0.25 if p.numel() < 200 else 0.1), name
    memory = model.bert.layers[1].memory
    assert memory.query.weight.std().item() == pytest.approx((2 / (64 + 4 * 32)) ** 0.5, rel=0.1)
    assert memory.values.weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert memory.keys.abs().max() <= 0.25


def test_memory_layer_is_the_papers_formula():
    for alpha, beta in [(0.0, 1.0), (1.0, 1.0), (0.5, 2.0)]:
        model = tiny_bert(memory_layers=(2,), alpha=alpha, beta=beta).double().eval()
        layer = model.bert.layers[1]
        seen = []
        layer.attention_norm.register_forward_hook(lambda *call, seen=seen: seen.append(call[2]))
        y, x = layer(torch.randn(2, 5, 8, dtype=torch.float64)), seen[0]
        total = x + beta * layer.memory(x)
        if alpha:
            hidden = x @ layer.up.weight.T + layer.up.bias
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))  # exact GELU
            total = total + alpha * (hidden @ layer.down.weight.T + layer.down.bias)
        expected = (total - total.mean(-1, keepdim=True)) / (
            total.var(-1, correction=0, keepdim=True) + 1e-12).sqrt()
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)


def test_padding_changes_no_real_token_of_bert():
    """Pad in training, where a memory's batch norm uses the batch's statistics."""
    mask = torch.arange(6) < torch.tensor([[6], [2], [4]])
    results = []
    for pad in (1, 39):
        model = tiny_bert(dropout=0.0, memory_layers=(2,)).double()
        ids = torch.randint(40, (3, 6)).where(mask, pad)
        results.append([model(ids, mask=mask)[mask], *(b.clone() for b in model.buffers())])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)


def compile_and_keep(model, **settings):
    """Compile a model with a backend that keeps its graphs. Returns the model and the graphs."""
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    graphs = []
    return torch.compile(model, backend=backend, **settings), graphs


def test_every_position_and_every_sub_key_can_be_used():
    model = tiny_bert(memory_layers=(2,), topk=4)  # of n_keys = 4 sub-keys
    assert model(torch.zeros(1, 16, dtype=torch.long)).shape == (1, 16, 40)
    with pytest.raises(AssertionError, match="17 tokens: the model has 16 positions"):
        model(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize("head", [None, "classifier", "span"])
def test_a_memory_changes_no_other_initial_weight(head):
    config = tiny_bert(memory_layers=(2, 3)).bert.config
    weights = []
    for layers in (2, 3), ():
        torch.manual_seed(0)
        model = build_model(replace(config, memory_layers=layers), head, ["a", "b"])
        weights.append(model.state_dict())
    memory, plain = weights
    assert all(torch.equal(memory[name], plain[name]) for name in plain)
    assert all(".memory." in name for name in memory.keys() - plain.keys())


def test_a_model_with_memories_is_one_graph_in_evaluation():
    model = tiny_bert(memory_layers=(1, 3)).eval()
    compiled, graphs = compile_and_keep(model, fullgraph=True)
    ids = torch.randint(5, 40, (2, 12))
    mask = torch.arange(12) < torch.tensor([[12], [7]])
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, mask), model(ids, mask))
    assert len(graphs) == 1


def test_padded_batches_are_compiled_only_once():
    """Keep the number of real tokens, which differs in every batch, out of the graph."""
    ids = torch.randint(5, 20, (2, 12))
    compiled, graphs = compile_and_keep(tiny_bert(memory_layers=(2,)))
    for real in range(2, 12):
        mask = torch.arange(12) < torch.tensor([[12], [real]])
        compiled(ids, mask=mask).sum().backward()
        if real == 4:
            before = len(graphs)
    assert len(graphs) == before


@pytest.mark.parametrize("alpha", [0.0, 1.0], ids=["PKM", "ResM"])
def test_dropout_is_where_devlin_et_al_have_it(monkeypatch, alpha):
    """Find it after embeddings, in and after attention, after the FFN and before the classifier.

    There is none in a memory, and none in evaluation.
    """
    def dropout(x, p, training):
        rates.append(("dropout", p if training else 0.0))
        return x * (not training)

    def attention(q, k, v, attn_mask, is_causal, dropout_p):
        rates.append(("attention", dropout_p))
        return q

    monkeypatch.setattr(F, "dropout", dropout)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    config = tiny_bert(dropout=0.3, memory_layers=(2,), alpha=alpha).bert.config
    model, ids = Classifier(config, 2), torch.randint(40, (2, 9))
    for rate in (0.3, 0.0):
        rates = []
        model.train(rate > 0)(ids)
        ffns = config.n_layer - (alpha == 0)
        assert sorted(rates) == sorted([("attention", rate)] * config.n_layer + [
            ("dropout", rate)] * (1 + config.n_layer + ffns + 1))
    for p in model.train().parameters():
        nn.init.normal_(p)
    x = torch.zeros(2, 9, config.d_model)  # all that can be dropped is: norms and memories are left
    for layer in model.bert.layers:
        x = layer.attention_norm(x)
        x = layer.norm(x + layer.memory(x) if layer.memory else x)
    torch.testing.assert_close(model.bert(ids), x, rtol=1e-4, atol=1e-4)


def test_losses_of_the_heads():
    """Compare them with their definitions. An answer cannot be at a padded token.

    A tokenizer returns a mask of ones and zeros.
    """
    config = tiny_bert(dropout=0.0).bert.config
    ids, mask = torch.randint(40, (3, 8)), torch.arange(8) < torch.tensor([[8], [5], [3]])
    reader, classes, score = SpanReader(config), Classifier(config, 4), Classifier(config, 1)
    spans, labels = torch.tensor([[1, 7], [0, 0], [2, 2]]), torch.tensor([3, 0, 1])
    logits = reader(ids, mask)
    expected = [logits[n, :length, side].logsumexp(0) - logits[n, spans[n, side], side]
                for n, length in enumerate((8, 5, 3)) for side in (0, 1)]
    torch.testing.assert_close(reader(ids, mask.long(), labels=spans), sum(expected) / 6)
    logits = classes(ids, mask)
    expected = [logits[n].logsumexp(0) - logits[n, labels[n]] for n in range(3)]
    torch.testing.assert_close(classes(ids, mask, labels=labels), sum(expected) / 3)
    expected = ((score(ids, mask)[:, 0] - labels) ** 2).mean()
    torch.testing.assert_close(score(ids, mask, labels=labels.float()), expected)
