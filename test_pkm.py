"""
What the code claims, held against independent references: brute force over all slots, a dense
layer in float64, Hugging Face BERT, the paper's parameter counts, an uninterrupted run.

$ python -m pytest                                  # minutes on two CPU cores, no network
$ PKM_TEST_KILLS=20 python -m pytest -k killed      # more SIGKILLs than 5
"""
import ast
import collections
import contextlib
import dataclasses
import hashlib
import http.server
import importlib.util
import io
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from torch import nn

import bench
import configs
import finetune
import measure
import model as bert
import prepare_data
import pretrain
import tasks
from configs import Failure, UserError
from pkm import PKM, ValueTable, topk

ROOT = Path(__file__).parent
SHARED = ROOT.parent / "shared" / "data"  # larger texts; tests of them are skipped without it
KILLS = int(os.environ.get("PKM_TEST_KILLS", "5"))
torch.set_num_threads(1)  # at these sizes threads mostly wait for each other
os.environ["OMP_NUM_THREADS"] = "1"  # and in the processes that a test starts


def brute_force(query, keys, topk):
    """The topk best of all n_keys^2 slots, head by head: [(scores, slots)], (tokens, topk) each."""
    found = []
    for part, (keys_1, keys_2) in zip(query.chunk(len(keys), 1), keys, strict=True):
        first, second = (half @ k.T for half, k in zip(part.chunk(2, 1), (keys_1, keys_2)))
        scores = (first[:, :, None] + second[:, None, :]).flatten(1)  # slot = n_keys * i + j
        found.append(scores.topk(topk))
    return found


def small_memory(dtype=torch.float64, **sizes):
    """A memory with no parameter at a value, 0 or 1, that would hide its absence."""
    torch.manual_seed(0)
    sizes = {"d_model": 6, "n_keys": 12, "heads": 2, "topk": 4, "key_dim": 8, **sizes}
    memory = PKM(**sizes).to(dtype)
    for p in (memory.query.bias, memory.query_norm.weight, memory.query_norm.bias):
        nn.init.normal_(p)
    return memory


@pytest.mark.parametrize("trained", [False, True], ids=["random", "trained"])
@pytest.mark.parametrize("dtype, gap", [(torch.float64, 0), (torch.float32, 1e-4)],
                         ids=["float64", "float32"])
@pytest.mark.parametrize("n_keys, topk, heads", [(1, 1, 1), (40, 1, 3), (7, 2, 2), (12, 5, 2),
                                                 (8, 8, 2), (9, 8, 4), (32, 32, 2), (64, 32, 4)])
def test_search_equals_brute_force(n_keys, topk, heads, dtype, gap, trained):
    memory = small_memory(dtype, n_keys=n_keys, topk=topk, heads=heads)
    x = torch.randn(33, 6, dtype=dtype)
    if trained:
        dense = [p for name, p in memory.named_parameters() if name != "values.weight"]
        optimizer = torch.optim.Adam(dense, lr=0.1)
        for _ in range(8):
            F.mse_loss(memory(x), x.roll(1, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            memory.values.step(lr=0.1)
    query = memory.query_norm(memory.query(x)).detach()
    slots, weights = memory.search(query)
    assert slots.dtype == torch.int32 and slots.shape == weights.shape == (33, heads, topk)
    compared = 0
    for head, (scores, expected) in enumerate(
            brute_force(query.double(), memory.keys.double(), min(topk + 1, n_keys**2))):
        torch.testing.assert_close(weights[:, head].double(), scores[:, :topk].softmax(1),
                                   rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
        gaps = F.pad(-scores.diff(dim=1), (1, 1), value=math.inf)  # to the next better and worse
        distinct = ((gaps[:, :-1] > gap) & (gaps[:, 1:] > gap))[:, :topk]
        assert torch.equal(slots[:, head][distinct].long(), expected[:, :topk][distinct])
        compared += distinct.double().mean().item() / heads
    assert compared > 0.9


@pytest.mark.parametrize("shape, k", [((3, 2, 700, 512), 32), ((5, 119), 32), ((4, 7), 7),
                                      ((2, 1), 1), ((0, 9), 3)])
def test_topk_is_torchs(shape, k):
    scores = torch.randn(shape) * 10.0 ** torch.randint(-44, 38, shape)
    scores[torch.rand(shape) < 0.1] = 0.0
    values, index = topk(scores, k)
    assert values.dtype == torch.float32 and index.dtype == torch.int64
    assert torch.equal(values, scores.topk(k).values)
    assert torch.equal(scores.gather(-1, index), values)
    assert all(len(set(row)) == k for row in index.flatten(0, -2).tolist())
    assert torch.equal(topk(scores.double(), k)[0], values.double())
    scores[torch.rand(shape) < 0.1] = random.choice([math.inf, -math.inf, math.nan])
    assert all(0 <= i < shape[-1] for i in topk(scores, k)[1].flatten().tolist())


def test_candidates_of_32_are_119_of_1024():
    assert PKM(8, n_keys=32, topk=32, key_dim=4).pairs.shape == (2, 119)


@pytest.mark.parametrize("sizes, word", [({"topk": 13}, "topk"), ({"topk": 0}, "topk"),
                                         ({"key_dim": 7}, "key_dim")])
def test_impossible_sizes_are_refused(sizes, word):
    with pytest.raises(ValueError, match=word):
        small_memory(**sizes)


def dense_layer(parameters, table, x, topk, mask):
    """The layer without any shortcut; the table is an ordinary tensor. Returns its output, 0 at
    padded tokens, and the rows that it read."""
    x, mask = x.flatten(0, 1), slice(None) if mask is None else mask.flatten()
    query = x[mask] @ parameters["query.weight"].T + parameters["query.bias"]
    query = (query - query.mean(0)) / (query.var(0, correction=0) + 1e-5).sqrt()
    query = query * parameters["query_norm.weight"] + parameters["query_norm.bias"]
    found = brute_force(query, parameters["keys"], topk)
    out = torch.zeros_like(x)
    out[mask] = sum((scores.softmax(1)[..., None] * table[slots]).sum(1) for scores, slots in found)
    return out, torch.cat([slots.flatten() for _, slots in found]).unique()


def assert_near(ours, reference, tolerance):
    """Difference within `tolerance` of the reference's norm."""
    difference = (ours.detach().double() - reference.detach().double()).norm()
    assert difference <= tolerance * reference.norm(), f"{difference / reference.norm():.1e}"


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)],
                         ids=["float64", "float32"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("micro_batches", [(3,), (2, 1, 4)], ids=["one", "accumulated"])
def test_gradients_and_updates_equal_a_dense_layer(micro_batches, padded, dtype, tolerance):
    memory = small_memory(dtype)
    parameters = {name: p.detach().double().requires_grad_()
                  for name, p in memory.named_parameters()}
    table = parameters.pop("values.weight").detach().requires_grad_()
    exp_avg, exp_avg_sq = torch.zeros_like(table), torch.zeros_like(table)
    for step in range(1, 5):
        rows = set()
        for batch in micro_batches:
            x, weight = torch.randn(2, batch, 5, 6, dtype=dtype)
            mask = torch.arange(5) < torch.randint(2, 6, (batch, 1)) if padded else None
            (memory(x.requires_grad_(), mask) * weight).sum().backward()
            x_ref = x.detach().double().requires_grad_()
            out, read = dense_layer(parameters, table, x_ref, memory.topk, mask)
            (out * weight.flatten(0, 1)).sum().backward()
            assert_near(x.grad, x_ref.grad, tolerance)
            rows.update(read.tolist())
        assert memory.values.weight.grad is None
        for name, p in parameters.items():
            ours = memory.get_parameter(name).grad
            if name == "query.bias":  # the batch norm takes it out
                assert ours.norm() < 10 * tolerance
            else:
                assert_near(ours, p.grad, tolerance)
            p.grad = None
        memory.zero_grad()
        memory.values.step(lr=0.01)
        rows = sorted(rows)
        with torch.no_grad():  # torch.optim.SparseAdam's formula
            grad = table.grad[rows]
            exp_avg[rows] += 0.1 * (grad - exp_avg[rows])
            exp_avg_sq[rows] += 0.001 * (grad**2 - exp_avg_sq[rows])
            size = 0.01 * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            table[rows] -= size * exp_avg[rows] / (exp_avg_sq[rows].sqrt() + 1e-8)
        table.grad = None
        for ours, reference in [(memory.values.weight, table), (memory.values.exp_avg, exp_avg),
                                (memory.values.exp_avg_sq, exp_avg_sq)]:
            assert_near(ours, reference, tolerance)


@pytest.mark.parametrize("chunk", [1, 3, None])
def test_value_updates_equal_sparse_adam(chunk):
    """Of an ordinary sparse embedding bag; a row that was not read keeps its every bit."""
    torch.manual_seed(0)
    ours, bag = ValueTable(50, 8), nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
    bag.weight.data.copy_(ours.weight)
    optimizer = torch.optim.SparseAdam(bag.parameters(), lr=0.01)
    for step in range(1, 6):
        slots = torch.randint(50, (4, 2, 3), dtype=torch.int32)
        weights, target = torch.rand(4, 2, 3, requires_grad=True), torch.randn(4, 8)
        weights_ref = weights.detach().clone().requires_grad_()
        out = ours(slots, weights)
        out_ref = bag(slots.flatten(1), per_sample_weights=weights_ref.flatten(1))
        assert_near(out, out_ref, 1e-6)
        (256 * F.mse_loss(out, target)).backward()  # as a GradScaler scales it
        F.mse_loss(out_ref, target).backward()
        assert_near(weights.grad / 256, weights_ref.grad, 1e-5)
        state = [ours.weight] + [ours.exp_avg, ours.exp_avg_sq] * (step > 1)
        before = [tensor.detach().clone() for tensor in state]
        ours.step(lr=0.01, grad_scale=256, chunk=chunk)
        optimizer.step()
        optimizer.zero_grad()
        moments = optimizer.state[bag.weight]
        for mine, reference in [(ours.weight, bag.weight), (ours.exp_avg, moments["exp_avg"]),
                                (ours.exp_avg_sq, moments["exp_avg_sq"])]:
            assert_near(mine, reference, 1e-5)
        unread = [row for row in range(50) if row not in slots]
        for tensor, old in zip(state, before, strict=True):
            assert torch.equal(tensor[unread], old[unread])
            assert not torch.equal(tensor, old)


def test_the_layer_equals_the_plain_baseline():
    """bench.py's ratios compare two ways to the same numbers: outputs, gradients, SparseAdam."""
    torch.manual_seed(0)
    ours = PKM(16, n_keys=8, heads=2, topk=4, key_dim=8)
    plain = bench.PlainPKM(16, n_keys=8, heads=2, topk=4, key_dim=8)
    plain.load_state_dict(ours.state_dict())
    sparse_adam = torch.optim.SparseAdam(plain.values.parameters(), lr=0.01)
    for _ in range(3):
        x, weight = torch.randn(2, 300, 16)  # more than backward takes at once
        outputs = [model(x) for model in (ours, plain)]
        for output in outputs:
            (output * weight).sum().backward()
        assert_near(*outputs, 1e-6)
        assert_near(ours.keys.grad, plain.keys.grad, 1e-5)
        assert_near(ours.query.weight.grad, plain.query.weight.grad, 1e-5)
        sparse_adam.step()
        ours.values.step(lr=0.01)
        ours.zero_grad()
        plain.zero_grad()
        assert_near(ours.values.weight, plain.values.weight, 1e-5)


@pytest.mark.parametrize("by_row", [True, False])
def test_gradient_of_the_weights(by_row):
    values = ValueTable(400, 700).double()  # more rows than a chunk has
    slots, grad_out = torch.randint(400, (90, 8)).int(), torch.randn(90, 700).double()
    expected = torch.einsum("trd,td->tr", values.weight.detach()[slots.long()], grad_out)
    with torch.no_grad():
        assert_near(values.weights_grad(slots, grad_out, by_row), expected, 1e-12)


def test_flat_keys_are_all_compared():
    memory = bench.FlatPKM(6, n_keys=5, heads=2, topk=3, key_dim=4).eval()
    x = torch.randn(7, 6)
    query = memory.query_norm(memory.query(x)).view(7, 2, 1, 4)
    score, slots = (query * memory.keys).sum(3).sort(descending=True)  # (7, 2, 25)
    found, weights = memory.search(memory.query_norm(memory.query(x)))
    assert torch.equal(found, slots[..., :3])
    torch.testing.assert_close(weights, score[..., :3].softmax(2))


def test_bfloat16_values_change_little():
    memory, x = PKM(64, n_keys=32, heads=4, topk=8, key_dim=16).eval(), torch.randn(50, 64)
    with torch.no_grad():
        expected = memory(x)
        memory.values.to(torch.bfloat16)
        assert memory(x).dtype == torch.float32
        assert_near(memory(x), expected, 0.01)
        assert not torch.equal(memory(x), expected)


def test_frozen_or_unread_values_stay():
    memory = small_memory()
    x, before = torch.randn(5, 6, dtype=torch.float64), memory.values.weight.detach().clone()
    memory.values.step(lr=1.0)
    memory.values.weight.requires_grad_(False)
    memory(x).sum().backward()
    memory.values.step(lr=1.0)
    assert torch.equal(memory.values.weight, before) and memory.values.steps == 0
    assert memory.keys.grad.norm() > 0
    memory.values.weight.requires_grad_(True)
    memory(x).sum().backward()
    memory.values.step(lr=1.0)
    after = memory.values.weight.detach().clone()
    assert not torch.equal(after, before)
    memory.values.step(lr=1.0)  # nothing was read since
    assert torch.equal(memory.values.weight, after) and memory.values.steps == 1


def test_values_learn_where_all_else_is_frozen():
    """Backward must come by although nothing before the values requires a gradient."""
    memory, x = small_memory(), torch.randn(3, 6, dtype=torch.float64)
    whole = small_memory()
    for p in memory.parameters():
        p.requires_grad_(p is memory.values.weight)
    for m in (memory, whole):
        m(x).square().sum().backward()
        m.values.step(lr=0.1)
    assert not torch.equal(memory.values.weight, small_memory().values.weight)
    assert torch.equal(memory.values.weight, whole.values.weight)


def test_padding_changes_no_real_token_and_no_value():
    """The first step is without padding: it gives every row a momentum that padding could use."""
    x, weight = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([[6], [2], [4]])
    results = []
    for pad in (0.0, 50.0, None):  # None: the real tokens alone
        memory = small_memory()
        (memory(torch.randn(400, 6, dtype=torch.float64)) ** 2).sum().backward()
        memory.values.step(lr=0.1)
        memory.zero_grad()
        out = memory(x[mask]) if pad is None else memory(x.where(mask[..., None], pad), mask)[mask]
        (out * weight[mask]).sum().backward()
        memory.values.step(lr=0.1)
        grads = [p.grad for p in memory.parameters() if p.grad is not None]
        results.append([out, *grads, *memory.buffers(), memory.values.weight])
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_compiled_inference_is_one_graph(dtype, tolerance):
    memory, x = small_memory(dtype).eval(), torch.randn(2, 5, 6, dtype=dtype)
    with torch.no_grad():
        compiled = torch.compile(memory, fullgraph=True)
        torch.testing.assert_close(compiled(x), memory(x), rtol=tolerance, atol=tolerance)


def test_padded_batches_compile_but_once():
    """Each has another number of real tokens: that must not be compiled into a graph."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model, ids = tiny_bert(memory_layers=(2,)), torch.randint(5, 20, (2, 12))
    compiled = torch.compile(model, backend=backend)
    for real in range(2, 12):
        mask = torch.arange(12) < torch.tensor([[12], [real]])
        compiled(ids, mask=mask).sum().backward()
        if real == 4:
            before = len(graphs)
    assert len(graphs) == before


def test_grad_out_is_kept_in_autocasts_dtype():
    memory, x = PKM(8, n_keys=16, heads=2, topk=4, key_dim=8), torch.randn(9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        memory(x).sum().backward()
    assert [read[2].dtype for read in memory.values.reads] == [torch.bfloat16]


def closed_form(size, vocab, memory_layers=(), ffn_in_them=True):
    """Parameters of BERT with pooler and head, and of memories of 512^2 slots, from the shapes."""
    layers, d, d_ff = (bert.SIZES[size][name] for name in ("n_layer", "d_model", "d_ff"))
    ffn = 2 * d * d_ff + d + d_ff
    count = (vocab + 512 + 2) * d + 2 * d  # embeddings and their norm
    count += layers * (4 * (d * d + d) + ffn + 4 * d)
    count += 2 * (d * d + d) + 2 * d + vocab  # pooler and head
    memory = 512**2 * d + 8 * 512 * 128 + (d + 1) * 1024 + 2 * 1024
    return count + len(memory_layers) * (memory - (0 if ffn_in_them else ffn))


@pytest.mark.parametrize("size, layers, millions", [("base", (4, 8), (110.1, 505.9, 515.4)),
                                                    ("large", (8, 16), (336.2, 859.5, 876.2))])
def test_parameter_counts_are_those_of_table_1(size, layers, millions):
    systems = [((), 1.0), (layers, 0.0), (layers, 1.0)]  # BERT, PKM, ResM
    for (memory_layers, alpha), expected in zip(systems, millions, strict=True):
        with torch.device("meta"):
            model = bert.MaskedLM(bert.BertConfig(memory_layers=memory_layers, alpha=alpha,
                                                  **bert.SIZES[size]))
        count = sum(p.numel() for p in model.parameters())
        assert count == closed_form(size, 30522, memory_layers, bool(alpha))
        assert round(count / 1e6, 1) == expected
        for number, layer in enumerate(model.bert.layers, 1):
            names = {name.split(".")[0] for name, _ in layer.named_parameters()}
            assert ("memory" in names) == (number in memory_layers)
            assert ("up" in names) == ("down" in names) == (number not in memory_layers or alpha)


def tiny_bert(seed=0, **settings):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "n_layer": 3, "n_head": 2, "d_model": 8, "d_ff": 16, "max_len": 16,
             "n_keys": 4, "memory_heads": 2, "topk": 3, "key_dim": 4}
    return bert.MaskedLM(bert.BertConfig(**{**sizes, **settings}))


def test_padding_changes_no_real_token_of_bert():
    """Also while training, when a memory's batch norm takes its statistics from the batch."""
    mask = torch.arange(6) < torch.tensor([[6], [2], [4]])
    results = []
    for pad in (1, 39):
        model = tiny_bert(dropout=0.0, memory_layers=(2,)).double()
        ids = torch.randint(40, (3, 6)).where(mask, pad)
        results.append([model(ids, mask=mask)[mask], *(b.clone() for b in model.buffers())])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForPreTraining"])
def test_logits_equal_hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = getattr(transformers, kind)(transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=24)).eval()
    for name, p in theirs.named_parameters():  # so that every weight shows in the logits
        nn.init.normal_(p, float("norm" in name.lower() and "weight" in name), 0.4)
    ours = tiny_bert(vocab_size=99, n_head=4, d_model=32, d_ff=64, max_len=24).eval()
    loaded = bert.load_weights(ours, bert.from_huggingface(theirs.state_dict(), ours.bert.config),
                               "theirs", partial=True)
    missing = ours.state_dict().keys() - loaded
    assert missing == ({"bert.pooler.weight", "bert.pooler.bias"} if "Masked" in kind else set())
    ids, types = torch.randint(99, (3, 20)), torch.randint(2, (3, 20))
    mask = torch.arange(20) < torch.tensor([[20], [13], [5]])
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask.long(), token_type_ids=types)[0]
        logits = ours(ids, mask=mask, token_types=types)
        assert expected[mask].std() > 1
        torch.testing.assert_close(logits[mask], expected[mask], rtol=0, atol=1e-4)
        torch.testing.assert_close(ours(ids), theirs(ids)[0], rtol=0, atol=1e-4)
        if not missing:
            hidden = theirs.bert(ids, attention_mask=mask.long(), token_type_ids=types)
            torch.testing.assert_close(ours.bert.pool(ours.bert(ids, mask, types)),
                                       hidden.pooler_output, rtol=0, atol=1e-4)


def hugging_face(kind, **sizes):
    """A random transformers model in which every weight shows in the logits."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "max_position_embeddings": 24, **sizes}
    if kind.startswith("Distil"):
        config = transformers.DistilBertConfig(dim=32, n_layers=3, n_heads=4, hidden_dim=64, **sizes)
    else:
        config = transformers.BertConfig(hidden_size=32, num_hidden_layers=3, intermediate_size=64,
                                         num_attention_heads=4, **sizes)
    model = getattr(transformers, kind)(config).eval()
    for name, p in model.named_parameters():
        nn.init.normal_(p, float("norm" in name.lower() and "weight" in name), 0.4)
    return model


def assert_same_logits(ours, theirs):
    ids, types = torch.randint(40, (3, 20)), torch.randint(2, (3, 20))
    mask = torch.arange(20) < torch.tensor([[20], [13], [5]])
    distil = type(theirs).__name__.startswith("Distil")
    with torch.no_grad():
        out = theirs(ids, attention_mask=mask.long(),
                     **({} if distil else {"token_type_ids": types}))
        logits = ours(ids, mask=mask, token_types=types)
        if isinstance(ours, bert.SpanReader):
            out = [torch.stack([out.start_logits, out.end_logits], 2)]
        where = ... if isinstance(ours, bert.Classifier) else mask
        assert out[0][where].std() > 0.3
        torch.testing.assert_close(logits[where], out[0][where], rtol=0, atol=1e-4)


LAYOUTS = ["safetensors", "bin", "old names", "no prefix"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [
    "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification", "regression",
    "BertForQuestionAnswering", "DistilBertForMaskedLM", "DistilBertForQuestionAnswering"])
def test_hugging_face_folders_give_the_same_logits(tmp_path, kind, layout):
    if kind == "regression":
        theirs = hugging_face("BertForSequenceClassification", num_labels=1)
    else:
        more = {"id2label": {n: f"class {n}" for n in range(3)}} if "Sequence" in kind else {}
        theirs = hugging_face(kind, **more)
    if layout == "safetensors":
        pytest.importorskip("safetensors")
        theirs.save_pretrained(tmp_path)
    else:
        theirs.config.architectures = [type(theirs).__name__]
        theirs.config.save_pretrained(tmp_path)
        weights = theirs.state_dict()
        if layout == "old names":
            weights = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"): w for n, w in weights.items()}
        if layout == "no prefix":
            weights = {n.removeprefix("bert.").removeprefix("distilbert."): w
                       for n, w in weights.items()}
        torch.save(weights, tmp_path / "pytorch_model.bin")
    ours = bert.load_model(tmp_path).eval()
    assert type(ours) is {"S": bert.Classifier, "r": bert.Classifier, "Q": bert.SpanReader}.get(
        kind.split("BertFor")[-1][0], bert.MaskedLM)
    assert_same_logits(ours, theirs)
    saved = bert.read_weights(tmp_path)
    assert saved.get("labels") == {"BertForSequenceClassification": [
        "class 0", "class 1", "class 2"], "regression": []}.get(kind)


def saved_run(tmp_path, model, vocab_size=40, labels=()):
    """A run's folder with a checkpoint of the model and a vocabulary of its size."""
    for name, p in model.named_parameters():
        nn.init.normal_(p, float("norm" in name and "weight" in name), 0.4)
    words = [*prepare_data.SPECIALS, *(f"w{n}" for n in range(vocab_size - 5))]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/vocab.txt").write_text("\n".join(words) + "\n")
    optimizer = torch.optim.AdamW(bert.optimizer_groups(model, 0))
    bert.save_checkpoint(tmp_path / "run", 3, model.eval(), optimizer, {"step": 3}, labels=labels)
    return tmp_path / "run"


def tiny_head(head, labels=(), **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_layer": 3, "n_head": 4, "d_model": 32, "d_ff": 64, "max_len": 24,
             "n_keys": 4, "memory_heads": 2, "topk": 3, "key_dim": 4}
    return bert.build_model(bert.BertConfig(**{**sizes, **settings}), head, labels)


@pytest.mark.parametrize("type_vocab", [2, 0])
@pytest.mark.parametrize("head, auto, labels", [
    (None, "MaskedLM", ()), ("classifier", "SequenceClassification", ("no", "maybe", "yes")),
    ("classifier", "SequenceClassification", ()), ("span", "QuestionAnswering", ())],
    ids=["MLM", "classes", "regression", "span"])
def test_export_loads_in_transformers(tmp_path, capsys, head, auto, labels, type_vocab):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    model = tiny_head(head, labels, type_vocab=type_vocab)
    bert.main(["export", str(saved_run(tmp_path, model, labels=labels)), str(tmp_path / "out")])
    theirs, loading = getattr(transformers, f"AutoModelFor{auto}").from_pretrained(
        tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    assert type(theirs).__name__ == f"BertFor{auto}"
    assert_same_logits(model, theirs.eval())
    if head == "classifier":
        assert tuple(theirs.config.id2label.values()) == (labels or ("LABEL_0",))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    pair = tokenizer("W3 w5", "w7 [MASK]")
    assert pair["input_ids"] == [2, 8, 10, 3, 12, 4, 3]
    assert pair["token_type_ids"] == [0] * 4 + [1] * 3
    again = bert.load_model(tmp_path / "out").eval()
    ids = torch.randint(40, (2, 9))
    assert type(again) is type(model)
    torch.testing.assert_close(again(ids), model(ids), rtol=1e-5, atol=1e-6)  # aligned otherwise
    with pytest.raises(UserError, match="exists"):
        bert.export(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("alpha", [0.0, 1.0], ids=["PKM", "ResM"])
@pytest.mark.parametrize("head", [None, "classifier", "span"])
def test_export_of_a_memory_comes_back_bit_for_bit(tmp_path, head, alpha):
    pytest.importorskip("safetensors")
    model = tiny_head(head, ("a", "b"), memory_layers=(1, 3), alpha=alpha, type_vocab=0).train()
    model(torch.randint(40, (4, 9)))  # the batch norm has statistics now
    run = saved_run(tmp_path, model, labels=("a", "b") if head == "classifier" else ())
    bert.export(run, tmp_path / "out")
    saved, again = bert.read_weights(run), bert.read_weights(tmp_path / "out")
    assert_same(saved["weights"], again["weights"])
    assert saved["config"] == again["config"] and saved.get("labels") == again.get("labels")
    ids = torch.randint(40, (2, 9))
    torch.testing.assert_close(bert.load_model(tmp_path / "out").eval()(ids), model.eval()(ids),
                               rtol=1e-5, atol=1e-6)  # another alignment, another rounding
    readme = (tmp_path / "out/README.md").read_text()
    assert "load_model" in readme and "(1, 3)" in readme and "4 x 4 slots" in readme
    fresh = tiny_head(None, memory_layers=(1, 3), alpha=alpha, type_vocab=0)
    bert.init_from(fresh, tmp_path / "out")
    assert torch.equal(fresh.bert.layers[2].memory.values.weight,
                       model.bert.layers[2].memory.values.weight)


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


BERT_SETTINGS = {"model_type": "bert", "num_hidden_layers": 1, "num_attention_heads": 1,
                 "hidden_size": 4, "intermediate_size": 4, "vocab_size": 40,
                 "max_position_embeddings": 8, "type_vocab_size": 2, "hidden_dropout_prob": 0.1,
                 "initializer_range": 0.02}


@pytest.mark.parametrize("files, words", [
    ({"pytorch_model.bin": Payload()}, "nothing in it was run"),
    ({"pytorch_model.bin": [torch.ones(2)]}, "no state dict"),
    ({"pytorch_model.bin": {"epoch": 3}}, "no state dict"),
    ({"pytorch_model.bin": {"a": torch.ones(1)}}, "it has no"),
    ({"pytorch_model.bin": b"half"}, "truncated"), ({"model.safetensors": b"half"}, "truncated"),
    ({"config.json": b"{"}, "config.json: damaged"), ({"config.json": b"[]"}, "damaged"),
    ({"config.json": {"hidden_size": None}}, "config.json: damaged"),
    ({"config.json": {"model_type": "gpt2"}}, "'gpt2': expected bert"),
    ({"config.json": {"model_type": "roberta"}}, "RoBERTa's weights"),
    ({"config.json": {"hidden_act": "gelu_new"}}, "gelu_new"),
    ({"config.json": {"vocab_size": 41}}, "40 tokens do not fit weights for 41"),
    ({"config.json": {"num_attention_heads": 3}}, "multiple"),
    ({"config.json": {"hidden_size": "wide"}}, "config.json: damaged"),
    ({"vocab.txt": "\n".join([*prepare_data.SPECIALS, "The", *map(str, range(34))]).encode()},
     "a cased vocabulary"),
    ({"vocab.txt": b"[PAD]\n"}, "not a vocabulary")])
def test_a_bad_folder_of_weights_is_one_line(tmp_path, monkeypatch, capsys, files, words):
    monkeypatch.chdir(tmp_path)
    vocab = "\n".join([*prepare_data.SPECIALS, *(f"w{n}" for n in range(35))]) + "\n"
    if "model.safetensors" in files:
        pytest.importorskip("safetensors")
    for name, content in ({"config.json": {}, "vocab.txt": vocab.encode()}
                          | ({} if "model.safetensors" in files else {"pytorch_model.bin": {}})
                          | files).items():
        if name == "config.json" and isinstance(content, dict):
            settings = {key: value for key, value in (BERT_SETTINGS | content).items()
                        if value is not None}
            content = json.dumps(settings).encode()
        Path("hf").mkdir(exist_ok=True)
        if isinstance(content, bytes):
            Path("hf", name).write_bytes(content)
        else:
            torch.save(content, Path("hf", name))
    with pytest.raises(SystemExit) as end:
        configs.run(lambda: measure.main(["fill", "hf", "[MASK]"]))
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and words in error, error
    assert os.listdir() == ["hf"]


@pytest.mark.parametrize("name, words", [
    ("bert-base-uncased", "python prepare_data.py weights bert-base-uncased"),
    ("roberta-base", "RoBERTa's weights"), ("out/none", "configs/none.py"), ("bert-bas", "bert-base")])
def test_weights_that_are_not_there(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words) as error:
        bert.load_model(name)
    assert "\n" not in str(error.value)


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


def test_head_at_positions_and_loss():
    model = tiny_bert(memory_layers=(2,)).double().eval()
    ids = torch.randint(40, (3, 12))
    positions, labels = torch.randint(12, (3, 4)), torch.randint(40, (3, 4))
    labels[0, 1] = labels[2] = -100
    full = model(ids)
    expected = torch.stack([full[b, positions[b]] for b in range(3)])
    torch.testing.assert_close(model(ids, positions), expected)
    losses = [full[b, p].exp().sum().log() - full[b, p, label]
              for b in range(3) for p, label in zip(positions[b], labels[b]) if label != -100]
    torch.testing.assert_close(model(ids, positions, labels).double(), sum(losses) / 7,
                               rtol=1e-6, atol=1e-6)  # the loss is in float32


def test_masking():
    special, mask_id, vocab = (0, 100, 101, 102, 103), 103, 1000
    ids = np.random.default_rng(0).choice(np.setdiff1d(np.arange(vocab), special), (2000, 40))
    ids[:, 0], ids[:, 20], ids[:, -1] = 101, 102, 102
    ids[7, 4:] = 0  # three ordinary tokens
    original = ids.copy()
    inputs, positions, labels = bert.mask_tokens(ids, np.random.default_rng(1), vocab, special,
                                                 mask_id)
    assert np.array_equal(ids, original)
    assert positions.shape == labels.shape == (2000, 6)  # 15% of 40
    assert all(len(set(row)) == 6 for row in positions.tolist())
    at = np.take_along_axis(ids, positions.numpy(), 1)
    assert sorted(positions[7][labels[7] != -100].tolist()) == [1, 2, 3]
    assert (labels[7] == -100).sum() == 3
    chosen = labels.numpy() != -100
    assert chosen.sum() == 1999 * 6 + 3
    assert np.array_equal(at[chosen], labels.numpy()[chosen])
    assert not np.isin(at[chosen], special).any()
    untouched = np.ones_like(ids, bool)
    np.put_along_axis(untouched, positions.numpy(), ~chosen, 1)
    assert np.array_equal(inputs.numpy()[untouched], ids[untouched])
    new = inputs.gather(1, positions).numpy()[chosen]
    masked, kept = new == mask_id, new == at[chosen]
    drawn = new[~masked & ~kept]
    assert not np.isin(drawn, special).any() and drawn.min() < 20 and drawn.max() > 980
    n = chosen.sum()
    for share, expected in [(masked.mean(), 0.8), (kept.mean(), 0.1), (len(drawn) / n, 0.1)]:
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / n)
    counts = np.bincount(positions.numpy()[chosen], minlength=40)[np.r_[1:20, 21:39]]
    assert abs(counts / (n / 38) - 1).max() < 5 / math.sqrt(n / 38)  # every place alike
    again = bert.mask_tokens(ids, np.random.default_rng(1), vocab, special, mask_id)
    other = bert.mask_tokens(ids, np.random.default_rng(2), vocab, special, mask_id)
    assert torch.equal(again[0], inputs) and not torch.equal(other[1], positions)


def test_optimizer_groups():
    model = tiny_bert(memory_layers=(2, 3))
    decayed, others = bert.optimizer_groups(model, 0.3)
    assert decayed["weight_decay"] == 0.3 and others["weight_decay"] == 0
    found = collections.Counter(id(p) for group in (decayed, others) for p in group["params"])
    for name, p in model.named_parameters():
        assert found.pop(id(p), 0) == (0 if name.endswith("values.weight") else 1), name
        if "norm" in name or name.endswith("bias"):
            assert not any(p is q for q in decayed["params"]), name
        elif not name.endswith("values.weight"):
            assert not any(p is q for q in others["params"]), name
    assert not found


@pytest.fixture
def plain_run(tmp_path):
    """A run with one checkpoint of a model without memory."""
    model = tiny_bert(seed=1)
    optimizer = torch.optim.AdamW(bert.optimizer_groups(model, 0))
    bert.save_checkpoint(tmp_path / "run", 3, model, optimizer, {})
    return model.state_dict(), tmp_path / "run" / "step_000003"


@pytest.mark.parametrize("alpha, reinit_ffn", [(1.0, False), (0.0, False), (1.0, True)],
                         ids=["ResM", "PKM", "ResM'"])
def test_init_from(plain_run, capsys, alpha, reinit_ffn):
    trained, checkpoint = plain_run
    model = tiny_bert(memory_layers=(2,), alpha=alpha)
    random_weights = {name: w.clone() for name, w in model.state_dict().items()}
    bert.init_from(model, checkpoint, reinit_ffn)
    for name, w in model.state_dict().items():
        fresh = "memory" in name or reinit_ffn and name.startswith(("bert.layers.1.up",
                                                                    "bert.layers.1.down"))
        assert torch.equal(w, (random_weights if fresh else trained)[name]), name
    assert ("bert.layers.1.up.weight" in model.state_dict()) == bool(alpha)
    said = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    ffn = 8 * 16 * 2 + 8 + 16
    memory = 16 * 8 + 2 * 2 * 4 * 2 + 8 * 8 + 8 + 2 * 8  # values, keys, query, its norm
    expected = {f"left random memory {memory} parameters layers 2"}
    if alpha and not reinit_ffn:
        expected |= {f"loaded FFN {3 * ffn} parameters layers 1, 2, 3"}
    else:
        expected |= {f"loaded FFN {2 * ffn} parameters layers 1, 3",
                     f"{'left random' if alpha else 'dropped'} FFN {ffn} parameters layers 2"}
    assert said >= expected


def test_init_from_another_shape(plain_run):
    with pytest.raises(UserError, match="shape"):
        bert.init_from(tiny_bert(d_model=12), plain_run[1])


def plain_usage(slots, weights, n_slots):
    """Section 3.2 read by read; slots, weights: (accesses, topk) lists, best first."""
    read, weight, top1, effective_k = [0] * n_slots, [0.0] * n_slots, [0] * n_slots, 0.0
    for access, shares in zip(slots, weights, strict=True):
        top1[access[0]] += 1
        effective_k += math.prod(share ** -share for share in shares)
        for slot, share in zip(access, shares, strict=True):
            read[slot] += 1
            weight[slot] += share

    def kl(counts):
        total = sum(counts)
        return sum(c / total * math.log(c / total * n_slots) for c in counts if c)

    n = len(slots)
    return {"mu": sum(map(bool, read)) / n_slots, "top1_mu": sum(map(bool, top1)) / n_slots,
            "kl_u": kl(read), "kl_w": kl(weight), "effective_k": effective_k / n, "accesses": n,
            "mu_uniform": 1 - (1 - len(slots[0]) / n_slots) ** n,
            "top1_mu_uniform": 1 - (1 - 1 / n_slots) ** n}, read, top1, weight


def test_usage_metrics_known_answers():
    one, every = np.zeros(64), np.ones(64)
    one[5] = 10
    m = measure.usage_metrics(one, one, one, topk=1, effective_k=10)
    assert m["mu"] == m["top1_mu"] == 1 / 64 and m["accesses"] == 10 and m["effective_k"] == 1
    assert m["kl_u"] == m["kl_w"] == pytest.approx(math.log(64))
    assert m["mu_uniform"] == m["top1_mu_uniform"] == pytest.approx(1 - (63 / 64) ** 10)
    m = measure.usage_metrics(4 * every, every, every / 3, topk=4, effective_k=64 * 2.5)
    assert m["mu"] == m["top1_mu"] == 1 and abs(m["kl_u"]) + abs(m["kl_w"]) < 1e-12
    assert m["mu_uniform"] == pytest.approx(1 - (60 / 64) ** 64) and m["effective_k"] == 2.5
    four = np.repeat([10.0, 0.0], [4, 60])  # every access reads the same 4 slots
    m = measure.usage_metrics(four, one, np.repeat([4, 3, 2, 1, 0.0], [1, 1, 1, 1, 60]), 4, 30)
    assert m["mu"] == 4 / 64 and m["kl_u"] == pytest.approx(math.log(64 / 4))
    assert math.log(64 / 4) < m["kl_w"] < math.log(64)
    half = np.repeat([2.0, 0.0], 32)  # slots that are never read add nothing
    m = measure.usage_metrics(half, half, half, topk=1, effective_k=64)
    assert m["mu"] == 0.5 and m["kl_u"] == pytest.approx(math.log(2))


def record_search(model):
    """{layer: calls}, each the (slots, weights) of a search, taken from within the memory."""
    calls = {}
    for layer, block in enumerate(model.bert.layers, 1):
        if block.beta:
            calls[layer] = []

            def search(query, found=block.memory.search, own=calls[layer]):
                own.append(found(query))
                return own[-1]
            block.memory.search = search
    return calls


def test_evaluate_counts_every_read_but_padding_and_knows_the_uniform_model():
    model = tiny_bert(memory_layers=(1, 3)).train()
    calls = record_search(model)
    nn.init.zeros_(model.bert.words.weight)  # the tied decoder: all logits 0
    masks = [None, torch.arange(12) < torch.tensor([[12], [5], [1], [9]]), None]
    batches = [(torch.randint(40, (n, 12)), torch.randint(12, (n, 2)), torch.randint(40, (n, 2)), m)
               for n, m in zip((4, 4, 1), masks, strict=True)]
    batches[0][2][0] = -100
    before = [b.clone() for b in model.buffers()]
    results, counts = measure.evaluate(model, batches, torch.device("cpu"))
    assert model.training and all(map(torch.equal, before, model.buffers()))
    assert results["perplexity"] == pytest.approx(40) and results["masked_tokens"] == 16
    assert results["accuracy"] == sum((b[2] == 0).sum().item() for b in batches) / 16
    assert calls.keys() == results["layers"].keys() == {1, 3}
    for layer, reads in calls.items():
        slots, weights = (torch.cat(part).flatten(0, 1).tolist()
                          for part in zip(*reads, strict=True))
        assert len(slots) == (5 * 12 + 27) * 2  # real tokens x heads
        metrics, read, top1, weight = plain_usage(slots, weights, 16)
        assert counts[layer]["read"].tolist() == read and counts[layer]["top1"].tolist() == top1
        assert counts[layer]["weight"].tolist() == pytest.approx(weight)
        assert results["layers"][layer] == pytest.approx(metrics, rel=1e-6, abs=1e-6)


def test_effective_k_of_known_weights():
    """One slot that has it all: 1; all alike: topk. Averaged over the accesses."""
    model = tiny_bert(memory_layers=(2,)).eval()
    slots = torch.tensor([[[0, 1, 2], [3, 4, 5]]], dtype=torch.int32)
    weights = torch.tensor([[[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]])
    with torch.no_grad(), measure.count_reads(model) as counts:
        model.bert.layers[1].memory.values(slots, weights)
    metrics = measure.usage_metrics(**counts[2])
    assert metrics["effective_k"] == pytest.approx(2) and metrics["accesses"] == 2


class Stub(nn.Module):
    """A model whose prediction is the same everywhere: token 1 at 1/2, 2 at 1/4, 3 at 1/8."""

    def __init__(self):
        super().__init__()
        self.bert = nn.Module()
        self.bert.layers = nn.ModuleList()

    def forward(self, ids, positions, mask=None):
        return torch.tensor([0.1, 0.5, 0.25, 0.125, 0.025]).log().expand(*positions.shape, 5)


def test_perplexity_of_a_stub():
    batches = [(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64),
                torch.tensor(labels), None) for labels in ([[1, -100], [2, 3]], [[-100, -100]] * 2)]
    results, _ = measure.evaluate(Stub(), batches, torch.device("cpu"))
    assert results["perplexity"] == pytest.approx((2 * 4 * 8) ** (1 / 3), rel=1e-6)
    assert results["masked_tokens"] == 3 and results["accuracy"] == pytest.approx(1 / 3)


def test_a_compiled_model_is_measured_through_its_raw_module():
    """Compiled and called before: hooks that come later are not seen by its graph."""
    model = tiny_bert(memory_layers=(1, 3)).eval()
    batch = (torch.randint(40, (2, 12)), torch.tensor([[1], [2]]), torch.tensor([[7], [9]]), None)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(batch[0], batch[1], mask=None)
        with measure.count_reads(compiled) as counts:
            compiled(batch[0], batch[1], mask=None)
    assert all(layer["read"].sum() == 0 for layer in counts.values())  # which is the trap
    results, counts = measure.evaluate(compiled, [batch], torch.device("cpu"))
    torch._dynamo.reset()
    expected, reference = measure.evaluate(model, [batch], torch.device("cpu"))
    assert results == expected and results["layers"][1]["accesses"] == 2 * 12 * 2
    assert all(np.array_equal(counts[n]["read"], reference[n]["read"]) for n in (1, 3))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_loading_a_model_keeps_one_copy(tmp_path):
    """And writing to it leaves the file as it was."""
    model = tiny_bert(memory_layers=(2,), n_keys=512, d_model=64)  # 67 MB of values
    optimizer = torch.optim.AdamW(bert.optimizer_groups(model, 0))
    file = bert.save_checkpoint(tmp_path, 1, model, optimizer, {}) / "model.pt"
    before = hashlib.sha256(file.read_bytes()).digest()
    code = ("import sys, model as bert\n"
            "def kb(): return next(int(line.split()[1]) for line in open('/proc/self/status') "
            "if line.startswith('VmHWM'))\n"
            "start = kb(); loaded = bert.load_model(sys.argv[1]); peak = kb() - start\n"
            "for p in loaded.parameters(): p.data.zero_()\n"
            "print(peak)")
    peak = subprocess.run([sys.executable, "-c", code, str(file.parent)], cwd=ROOT, check=True,
                          capture_output=True, text=True).stdout
    assert int(peak) < 1.3 * file.stat().st_size / 1024
    assert hashlib.sha256(file.read_bytes()).digest() == before
    assert_same(dict(bert.load_model(file.parent).state_dict()), dict(model.state_dict()))


@dataclasses.dataclass
class Settings:
    lr: float = 0.1
    steps: int = 3
    name: str = "a"
    flag: bool = False
    layers: tuple = ()


@pytest.mark.parametrize("args, expected", [
    ([], {}), (["--lr=1"], {"lr": 1.0}), (["--lr=1e-3"], {"lr": 1e-3}), (["--name=5"], {"name": "5"}),
    (["--name=a=b=c"], {"name": "a=b=c"}), (["--name="], {"name": ""}),
    (["--flag=True"], {"flag": True}), (["--layers=4"], {"layers": (4,)}),
    (["--layers=4,8"], {"layers": (4, 8)}), (["--layers=(4,8)"], {"layers": (4, 8)}),
    (["--layers="], {"layers": ()}), (["c.py"], {"lr": 2.0, "layers": (1, 2), "steps": 6}),
    (["c.py", "--steps=7", "--steps=8"], {"lr": 2.0, "layers": (1, 2), "steps": 8})])
def test_load(tmp_path, monkeypatch, capsys, args, expected):
    monkeypatch.chdir(tmp_path)
    Path("c.py").write_text("import math\n_half = 3\nlr = 2\nlayers = [1, 2]\nsteps = 2 * _half\n")
    config = configs.load(Settings, args)
    assert config == Settings(**expected)
    assert all(type(value) is type(getattr(Settings, name))
               for name, value in dataclasses.asdict(config).items())
    assert f"lr={config.lr}" in capsys.readouterr().out


RECIPES = [p for p in sorted(ROOT.glob("configs/[!_]*.py")) if "finetune" not in p.stem]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_are_the_papers_systems(path, capsys):
    """Each recipe loads; its name says what it is; 1,024 sequences a step (2,048 for distil)."""
    c, name = configs.load(pretrain.Config, [str(path)]), path.stem
    size = name.split("_")[0]
    assert c.model == size
    layers = {"base": (4, 8), "large": (8, 16), "distil": (2, 4), "demo": (2, 3)}[size]
    memory = {"pkm": (0, 1), "resm": (1, 1)}.get((name.split("_") + [""])[1])
    assert c.memory_layers == (layers if memory else ())
    assert not memory or (c.alpha, c.beta) == memory
    initial = "_init" in name or "_more" in name
    initial_model = "distilbert-base-uncased" if size == "distil" else f"out/{size}"
    assert c.init_from == (initial_model if initial else "") and c.seed == int(initial)
    assert c.reinit_ffn == name.endswith("_ffn")
    assert (ROOT / "configs" / f"{size}.py").is_file()
    if size != "demo":
        assert c.batch_size * c.accumulation == (2048 if size == "distil" else 1024)
        assert (c.max_steps, c.warmup_steps, c.lr, c.value_lr) == (500_000, 10_000, 1e-4, 1e-3)
        assert (c.n_keys, c.memory_heads, c.topk, c.key_dim, c.seq_len) == (512, 4, 32, 256, 512)


@pytest.mark.parametrize("args, config, words", [
    (["--leyers=1"], "", ["command line", "'leyers'", "did you mean layers"]),
    (["c.py"], "step = 1", ["c.py", "'step'", "did you mean steps"]),
    (["--steps=1.0"], "", ["steps", "expected int", "float"]),
    (["--steps=True"], "", ["steps", "expected int", "bool"]),
    (["--lr=True"], "", ["lr", "expected float", "bool"]),
    (["--lr=fast"], "", ["lr", "'fast'", "expected float"]),
    (["--flag=1"], "", ["flag", "expected bool", "int"]),
    (["--layers=1,2.5"], "", ["layers", "tuple of ints"]),
    (["c.py"], "name = 5", ["c.py", "name", "expected str", "int"]),
    (["--steps"], "", ["--steps", "--steps=VALUE"]), (["c.py", "steps=1"], "", ["--steps=VALUE"]),
    (["d.py"], "", ["d.py", "no such config"]),
    (["c.py"], "steps = 1\nlr = 1 / 0", ["c.py:2", "ZeroDivisionError"]),
    (["c.py"], "steps = 1\n\nlr = = 2", ["c.py:3", "SyntaxError"])])
def test_load_refuses(tmp_path, monkeypatch, args, config, words):
    monkeypatch.chdir(tmp_path)
    Path("c.py").write_text(config)
    with pytest.raises(UserError) as error:
        configs.load(Settings, args)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_atomic(tmp_path):
    file, folder = tmp_path / "new" / "file", tmp_path / "folder"
    for content in ("one", "two"):
        with configs.atomic(file) as temporary:
            temporary.write_text(content)
            assert not file.exists() or file.read_text() == "one"
    with pytest.raises(OSError), configs.atomic(file) as temporary:
        temporary.write_text("half")
        raise OSError
    assert file.read_text() == "two" and os.listdir(file.parent) == ["file"]
    with pytest.raises(KeyboardInterrupt), configs.atomic(folder) as temporary:
        temporary.mkdir()
        (temporary / "a").write_text("half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["new"]
    (tmp_path / ".tmp_folder").mkdir()  # as a killed process leaves it
    (tmp_path / ".tmp_folder" / "stale").touch()
    with configs.atomic(folder) as temporary:
        temporary.mkdir()
        (temporary / "a").write_text("whole")
    assert os.listdir(folder) == ["a"] and sorted(os.listdir(tmp_path)) == ["folder", "new"]


TINY = {
    "dataset": "tiny", "model": "demo", "memory_layers": (2, 3), "n_keys": 8, "memory_heads": 2,
    "topk": 4, "key_dim": 16, "seq_len": 16, "batch_size": 2, "accumulation": 2, "dropout": 0.1,
    "max_steps": 12, "warmup_steps": 4, "lr": 3e-3, "log_interval": 3, "eval_interval": 6,
    "eval_sequences": 8, "usage_interval": 6, "checkpoint_interval": 5, "device": "cpu",
}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A folder with tiny.py, and data/tiny and data/other of another vocabulary."""
    folder, rng = tmp_path_factory.mktemp("prepared"), random.Random(0)
    kinds = [words.split(" ") for words in ("the a one no", "old red wet big shy",
                                            "cat dog owl elk fox", "saw met hid bit fed")]
    order = [0, 1, 2, 3, 0, 1, 2]
    text = "\n\n".join("\n".join(" ".join(rng.choice(kinds[k]) for k in order) + " ."
                                 for _ in range(8)) for _ in range(60))
    (folder / "text.txt").write_text(text)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *itertools.chain(*kinds)]
    for name, vocab in (("tiny", words), ("other", [*words, "more"])):
        (folder / f"{name}.txt").write_text("\n".join(vocab) + "\n")
        subprocess.run([sys.executable, ROOT / "prepare_data.py", "text", name, "text.txt", "--vocab",
                        f"{name}.txt", "--val_every", "10"], cwd=folder, check=True)
    (folder / "tiny.py").write_text("".join(f"{k} = {v!r}\n" for k, v in TINY.items()))
    return folder


@pytest.fixture
def place(prepared, tmp_path, monkeypatch):
    """The working directory: a copy of `prepared`. Signal handlers are put back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def train(*args):
    return pretrain.main(["tiny.py", *args])


def command(*args):
    return [sys.executable, str(ROOT / "pretrain.py"), "tiny.py", *args]


def log(out="out/tiny"):
    return [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]


def losses(*args):
    """The loss of every step of a fresh run."""
    shutil.rmtree("out/losses", ignore_errors=True)
    assert train("--out=out/losses", "--log_interval=1", "--eval_interval=1000", *args) == 0
    return np.array([r["loss"] for r in log("out/losses") if "grad_norm" in r])


def files(folder="."):
    return {str(path): path.is_file() and path.read_bytes() for path in Path(folder).rglob("*")}


def assert_same(a, b, where=""):
    """Equal to the last bit, through dicts and lists of tensors and plain values."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert_same(dict(enumerate(a)), dict(enumerate(b)), where)
    else:
        assert torch.equal(a, b) if torch.is_tensor(a) else a == b, where


def assert_same_run(out, reference):
    """The same log, but for speed, the same last weights, optimizer and value moments."""
    def timeless(run):
        return [{k: v for k, v in r.items() if k not in ("tokens_per_s", "elapsed")}
                for r in log(run)]

    assert_same(timeless(out), timeless(reference), "log")
    ends = [bert.find_checkpoint(run) for run in (out, reference)]
    assert ends[0].name == ends[1].name
    for name in ("model.pt", "optimizer.pt"):
        assert_same(*(torch.load(end / name, weights_only=True) for end in ends), name)
    values = torch.load(ends[0] / "optimizer.pt", weights_only=True)["values"]
    assert len(values) == 2 and all(v["exp_avg_sq"].abs().sum() > 0 for v in values.values())


def test_a_run_leaves_what_it_promises(place, capsys):
    assert train("--checkpoint_interval=3") == 0
    run, records = Path("out/tiny"), log()
    assert [r["step"] for r in records if "grad_norm" in r] == [3, 6, 9, 12]
    evaluations = [r for r in records if "perplexity" in r]
    assert [r["step"] for r in evaluations] == [0, 1, 2, 4, 6, 12]
    assert all({"1", "4"}.isdisjoint(r["layers"]) and len(r["layers"]) == 2 for r in evaluations)
    assert 20 < evaluations[0]["perplexity"] < 30  # untrained, 25 tokens
    assert evaluations[-1]["perplexity"] < evaluations[0]["perplexity"] - 0.5
    assert sorted(p.name for p in run.iterdir()) == ["config.json", "log.jsonl", "step_000009",
                                                     "step_000012", "usage", "vocab.txt"]
    saved = json.loads((run / "config.json").read_text())
    assert saved["memory_layers"] == [2, 3] and saved["lr"] == 3e-3
    assert sorted(os.listdir(run / "usage")) == ["step_000006.npz", "step_000012.npz"]
    for name, counts in np.load(run / "usage" / "step_000012.npz").items():
        assert name in {f"layer{n}_{what}" for n in (2, 3) for what in ("read", "top1")}
        topk = 4 if name.endswith("read") else 1
        assert counts.shape == (64,) and counts.sum() == 8 * 16 * 2 * topk  # tokens, heads
    before = files()
    assert train("--checkpoint_interval=3") == 0 and files() == before  # the end was reached
    assert train("--checkpoint_interval=3", "--eval_only=True") == 0 and files() == before
    assert f"perplexity {evaluations[-1]['perplexity']:.2f}" in capsys.readouterr().out
    assert train("--out=out/new", "--dry_run=True") == 0 and files() == before
    assert train("--out=out/new", "--eval_only=True") == 0 and files() == before


def test_batches_are_a_function_of_seed_and_step(place):
    """An epoch reads every token once, but for those left over at its ends."""
    corpus = pretrain.prepare_data.Corpus("tiny")
    config, device = pretrain.Config(**TINY), torch.device("cpu")
    batches, tokens = pretrain.Batches(corpus, config, device), corpus.split("train")
    first, second = ([int(batches.start(n)) for n in range(e, e + batches.per_epoch)]
                     for e in (0, batches.per_epoch))
    assert set(np.diff(sorted(first))) == set(np.diff(sorted(second))) == {14}
    assert len(first) == len(tokens) // 14 - 1 and max(first) + 14 <= len(tokens)
    assert first != sorted(first) and np.argsort(first).tolist() != np.argsort(second).tolist()
    masks = set()
    for n, (step, micro) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]):  # 2 sequences each
        inputs, positions, labels = batches.get(step, micro)
        masks.add(str(positions.tolist()))
        for ids, start in zip(inputs.scatter(1, positions, labels).tolist(), first[2 * n:]):
            assert ids == [corpus.cls_id, *tokens[start:start + 14], corpus.sep_id]
    assert len(masks) == 5
    again = pretrain.Batches(corpus, config, device).get(2, 0)
    assert all(map(torch.equal, again, (inputs, positions, labels)))
    other = pretrain.Batches(corpus, dataclasses.replace(config, seed=1), device).get(2, 0)
    assert not torch.equal(other[0], inputs)


def test_accumulation_is_one_larger_batch(place, monkeypatch):
    """Without memory, whose batch norm sees a micro-batch, and without dropout."""
    corpus, results = pretrain.prepare_data.Corpus("tiny"), []
    whole = pretrain.Batches(corpus, pretrain.Config(seq_len=16, batch_size=4, accumulation=1),
                             torch.device("cpu"))
    get = pretrain.Batches.get
    for size in (4, 2, 1):
        monkeypatch.setattr(pretrain.Batches, "get", lambda self, step, micro, size=size: [
            part[size * micro:size * (micro + 1)] for part in get(whole, step, 0)])
        losses("--memory_layers=", "--dropout=0", "--max_steps=3", f"--batch_size={size}",
               f"--accumulation={4 // size}")
        results.append([r[key] for r in log("out/losses") for key in ("loss", "grad_norm") if key in r])
    assert results[1] == pytest.approx(results[0], rel=1e-4)
    assert results[2] == pytest.approx(results[0], rel=1e-4)


def test_a_logged_loss_is_the_mean_since_the_last(place):
    every = losses("--max_steps=9")
    train("--max_steps=9")
    means = [r["loss"] for r in log() if "grad_norm" in r]
    assert means == pytest.approx(every.reshape(3, 3).mean(1))
    lrs = [r["lr"] for r in log("out/losses") if "grad_norm" in r]
    assert lrs == pytest.approx([min((n + 1) / 4, (9 - n) / 5) * 3e-3 for n in range(9)])


def test_compiled_training_equals_eager(place):
    """At a value_lr at which values that a compiled graph forgets to train show in the loss."""
    args = ["--dropout=0", "--max_steps=20", "--accumulation=1", "--value_lr=0.03"]
    eager, compiled = losses(*args), losses(*args, "--compile=on")
    frozen = losses(*args, "--value_lr=0")
    torch._dynamo.reset()
    assert len(eager) == 20 and abs(eager - compiled).max() < 1e-3
    assert abs(eager - frozen).max() > 1e-2
    assert (eager != compiled).any()  # it was another program


def test_bfloat16_follows_float32(place):
    args = ["--max_steps=50", "--dropout=0"]
    full, half = losses(*args), losses(*args, "--dtype=bfloat16")
    assert (full != half).any()
    assert abs(half[-10:].mean() / full[-10:].mean() - 1) < 0.02


def test_float16_skips_a_step_that_overflows(place):
    """The scaler finds an inf: nothing moves, the reads are forgotten; the next step is unscaled."""
    config = pretrain.Config(**{**TINY, "dropout": 0.0})
    corpus, device = prepare_data.Corpus("tiny"), torch.device("cpu")
    model, _ = pretrain.start_model(config, pretrain.validate(config), corpus, None)
    trainer = pretrain.Trainer(config, corpus, model, device, torch.float16)
    before = {name: w.clone() for name, w in model.state_dict().items() if "running" not in name}
    scale, backward = trainer.scaler.get_scale(), torch.Tensor.backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", lambda self: backward(self * math.inf))
        trainer.step(0)
    after = model.state_dict()
    assert all(torch.equal(w, after[name]) for name, w in before.items() if "tracked" not in name)
    assert trainer.scaler.get_scale() == scale / 2
    assert all(not t.reads and t.steps == 0 and t.exp_avg is None for t in trainer.tables)
    full = pretrain.start_model(config, pretrain.validate(config), corpus, None)[0]
    full.load_state_dict(after)
    other = pretrain.Trainer(config, corpus, full, device, torch.float32)
    for t in (trainer, other):
        t.step(1)
    for half, single in zip(trainer.tables, other.tables, strict=True):
        ratio = half.exp_avg.norm() / single.exp_avg.norm()  # slots near a tie may differ
        assert 0.9 < ratio < 1.1 and ratio != 1  # unscaled: not 32,768 times as large


def wait_for(condition, process):
    """Poll until condition() is true, and return its value; the process must not end before."""
    while not (value := condition()):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.001)
    return value


def steps_saved(run):
    newest = bert.find_checkpoint(run)
    return int(newest.name[5:]) if newest else 0


def saving(run):
    """Whether the newest checkpoint, whatever its name, still lacks its last file."""
    newest = max(run.glob("*step_*"), key=lambda path: path.name[-6:])
    return (newest / "model.pt").exists() and not (newest / "state.pt").exists()


def test_a_killed_run_ends_as_if_it_had_not_been(place):
    """SIGKILL during steps and, every other time, during the writing of a checkpoint."""
    args = ["--eval_interval=4", f"--max_steps={20 + 6 * KILLS}"]
    rng, run, seen = random.Random(), Path("out/killed"), 0  # other moments every time
    for number in range(KILLS):
        with subprocess.Popen(command(*args, "--out=out/killed", "--checkpoint_interval=1"),
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            first = wait_for(lambda seen=seen: max(0, steps_saved(run) - seen), process) + seen
            start = time.perf_counter()
            wait_for(lambda first=first: steps_saved(run) > first, process)
            time.sleep(rng.random() * (time.perf_counter() - start))  # somewhere in a step
            if number % 2:
                wait_for(lambda: saving(run), process)
                time.sleep(rng.random() * 0.003)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        seen = steps_saved(run)
    assert 0 < seen < 20 + 6 * KILLS
    assert train(*args, "--out=out/killed", "--checkpoint_interval=1") == 0
    assert train(*args, "--out=out/whole", "--checkpoint_interval=1000") == 0
    assert_same_run(run, "out/whole")
    assert not list(run.rglob(".tmp_*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [1, 8, 12])
def test_a_signal_saves_and_the_run_goes_on(place, monkeypatch, capsys, number, at):
    step = pretrain.Trainer.step

    def interrupted(trainer, n):
        if n == at - 1:
            os.kill(os.getpid(), number)
        return step(trainer, n)

    with monkeypatch.context() as patch:
        patch.setattr(pretrain.Trainer, "step", interrupted)
        assert train("--out=out/a b") == 128 + number
    assert steps_saved("out/a b") == at
    assert "python pretrain.py tiny.py '--out=out/a b'" in capsys.readouterr().out
    assert train("--out=out/a b") == 0
    assert train("--out=out/whole") == 0
    assert_same_run("out/a b", "out/whole")


def test_a_loss_that_is_no_number_stops_the_run(place, monkeypatch):
    assert train("--max_steps=4", "--checkpoint_interval=2") == 0
    before = files("out/tiny/step_000004")
    rate = pretrain.learning_rate
    monkeypatch.setattr(pretrain, "learning_rate", lambda n, c: 1e30 if n == 5 else rate(n, c))
    with pytest.raises(Failure, match="^step 7: the loss is (nan|inf)"):
        train("--checkpoint_interval=100")
    assert files("out/tiny/step_000004") == before and steps_saved("out/tiny") == 4


def test_a_gradient_that_is_no_number_is_not_saved(place, monkeypatch):
    """The loss of its step is fine, but the weights after it are not."""
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda p, n: clip(p, n) * math.nan)
    with pytest.raises(Failure, match="^step 1: "):
        train("--checkpoint_interval=1")
    assert not list(Path("out/tiny").glob("*step_*"))


@pytest.mark.parametrize("file, share", [("model.pt", 0.02), ("model.pt", 0.5),
                                         ("optimizer.pt", 0.9)])
def test_no_space_left(place, file, share):
    """The disk takes files up to `share` of this one."""
    assert train("--max_steps=4") == 0
    before = files("out/tiny/step_000004")
    limit = int(share * len(before[f"out/tiny/step_000004/{file}"]))
    result = subprocess.run(
        command("--max_steps=6"), capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert files("out/tiny/step_000004") == before and steps_saved("out/tiny") == 4
    assert train("--max_steps=6") == 0


def test_heldout_covers_the_split_once(place):
    """Whatever the batch size; the last sequence is padded, and 15% of its own tokens masked."""
    corpus = prepare_data.Corpus("tiny")
    tokens = corpus.split("test").tolist()
    full, rest = divmod(len(tokens), 14)
    assert full > 3 and rest > 2
    whole = measure.heldout(corpus, "test", 16, 1)
    assert all(mask is None for *_, mask in whole[:-1]) and len(whole) == full + 1
    assert whole[-1][3].tolist() == [[True] * (rest + 2) + [False] * (14 - rest)]
    found, changed = [], 0
    for inputs, positions, labels, mask in whole:
        ids = inputs.scatter(1, positions, labels.where(labels != -100, inputs.gather(1, positions)))
        assert inputs.shape == (1, 16)
        changed += (ids != inputs).sum().item()
        ids = ids[0, mask[0] if mask is not None else slice(None)].tolist()
        assert ids[0] == corpus.cls_id and ids[-1] == corpus.sep_id
        found += ids[1:-1]
    assert found == tokens and changed > full  # 2 a sequence, of which a tenth stays
    for size in (2, 3, 100):
        batches = measure.heldout(corpus, "test", 16, size)
        assert all(len(batch[0]) <= size for batch in batches)
        for one, same in zip(zip(*whole, strict=True), zip(*batches, strict=True), strict=True):
            if torch.is_tensor(one[0]):
                assert torch.equal(torch.cat([part.flatten() for part in one]),
                                   torch.cat([part.flatten() for part in same]))
    other = measure.heldout(corpus, "test", 16, 100, masking=1)
    assert not torch.equal(other[0][1], batches[0][1])
    some = measure.heldout(corpus, "test", 16, 100, sequences=3)
    assert len(some) == 1 and some[0][0].shape == (3, 16)
    for length in range(16, 60):
        *_, (inputs, _, labels, mask) = measure.heldout(corpus, "test", length, 8)
        if mask is not None:
            assert (inputs[~mask] == corpus.pad_id).all() and (inputs[mask] != corpus.pad_id).all()
            assert (labels != -100).sum() == max(1, round(0.15 * mask.sum().item()))
    short = measure.heldout(corpus, "test", len(tokens) + 4, 8)  # less than one sequence
    assert len(short) == 1 and short[0][3].sum() == len(tokens) + 2
    with pytest.raises(UserError, match="too few"):
        measure.heldout(corpus, "test", len(tokens) + 4, 8, sequences=1)


def test_perplexity_depends_on_neither_batch_size_nor_padding(place):
    corpus, device = prepare_data.Corpus("tiny"), torch.device("cpu")
    model = tiny_bert(memory_layers=(2,), vocab_size=corpus.vocab_size).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    reference, counts = measure.evaluate(model, measure.heldout(corpus, "test", 16, 8), device)
    *whole, (inputs, positions, labels, mask) = measure.heldout(corpus, "test", 16, 8)
    length = int(mask.sum())
    cut = [*whole, (inputs[:, :length], positions, labels, None)]  # the last one not padded
    other = [*whole, (inputs.where(mask, 7), positions, labels, mask)]  # padded with something else
    short = [(*(t[-1:] for t in (inputs, positions, labels)), mask)]
    alone, bare = (measure.evaluate(model, b, device)[0]["loss"] for b in (short, cut[-1:]))
    assert alone == pytest.approx(bare, rel=1e-5)
    for batches in (cut, other, *(measure.heldout(corpus, "test", 16, n) for n in (1, 5, 1000))):
        results, same = measure.evaluate(model, batches, device)
        assert results["perplexity"] == pytest.approx(reference["perplexity"], rel=1e-5)
        assert results["layers"][2] == pytest.approx(reference["layers"][2], rel=1e-6)
        assert np.array_equal(same[2]["read"], counts[2]["read"])


def test_progress_tells_when_it_will_end(capsys, monkeypatch):
    now = itertools.count(0, 4)  # seconds a batch
    monkeypatch.setattr(measure, "monotonic", lambda: next(now))
    assert list(measure.progress(list(range(6)), "work")) == list(range(6))
    assert capsys.readouterr().err == ("work: 3 of 6 batches, ETA 0:00:12\n"
                                       "work: 6 of 6 batches, ETA 0:00:00\n")


def test_table(place, capsys):
    """Cells are evaluate's numbers; a run without memory has no usage; JSON keeps every masking."""
    prepare("text", "more", "text.txt", "--vocab", "tiny.txt", "--val_every", "5")
    assert train("--max_steps=2") == 0
    assert train("--max_steps=2", "--memory_layers=", "--out=out/plain") == 0
    capsys.readouterr()
    measure.main(["table", "out/plain", "out/tiny", "--data", "more", "tiny", "--usage_data", "tiny",
                  "--repeats", "2", "--batch_size", "3", "--device", "cpu", "--out", "results/t2.md"])
    out = capsys.readouterr().out
    assert sorted(os.listdir("results")) == ["t2.json", "t2.md"]
    text = Path("results/t2.md").read_text()
    assert text in out and "data/tiny" in text
    header, _, plain, tiny = ([cell.strip() for cell in line.split("|")[1:-1]]
                              for line in text.splitlines()[:4])
    assert header[-2:] == ["more ppl", "tiny ppl"] and plain[1:10] == ["-"] * 9
    model, device = measure.load_run("out/tiny")[0], torch.device("cpu")
    expected = {name: [measure.evaluate(model, measure.heldout(
        prepare_data.Corpus(name), "test", 16, 8, masking=n), device)[0] for n in (0, 1)]
        for name in ("more", "tiny")}
    saved = json.loads(Path("results/t2.json").read_text())
    assert [r["run"] for r in saved["runs"]] == ["out/plain", "out/tiny"]
    for name, results in expected.items():
        found = saved["runs"][1]["results"][name]
        for one, same in zip(results, found, strict=True):
            assert same["perplexity"] == pytest.approx(one["perplexity"], rel=1e-5)
            for n in (2, 3):
                assert same["layers"][str(n)] == pytest.approx(one["layers"][n], rel=1e-6)
        ppl = [r["perplexity"] for r in results]
        assert f"{np.mean(ppl):.2f} [{min(ppl):.2f}, {max(ppl):.2f}]" == tiny[
            header.index(f"{name} ppl")]
    row, usage = dict(zip(header, tiny, strict=True)), [r["layers"] for r in expected["tiny"]]
    assert row["layers"] == "2/3" and row["accesses"] == f"{usage[0][2]['accesses']:,}"
    for name, key, scale, form in [("MU %", "mu", 100, ".1f"), ("KL_w", "kl_w", 1, ".2f"),
                                   ("top-1 MU %", "top1_mu", 100, ".1f"),
                                   ("KL_u", "kl_u", 1, ".2f"),
                                   ("effective k", "effective_k", 1, ".1f")]:
        assert row[name] == "/".join(f"{scale * np.mean([u[n][key] for u in usage]):{form}}"
                                     for n in (2, 3))
    measure.main(["table", "out/tiny/step_000002", "--data", "tiny", "--sequences", "2"])
    assert "| 64" in capsys.readouterr().out  # 2 sequences x 16 tokens x 2 heads


def test_a_weights_folder_is_measured_like_a_run(place, capsys):
    """Its half-precision weights in float32; a fine-tuned model guesses no words any more."""
    safetensors = pytest.importorskip("safetensors.torch")
    assert train("--max_steps=2", "--memory_layers=") == 0
    bert.export("out/tiny", "folder")
    file = Path("folder/model.safetensors")
    safetensors.save_file({n: w.half() for n, w in safetensors.load_file(file).items()}, file)
    assert {p.dtype for p in bert.load_model("folder").parameters()} == {torch.float32}
    capsys.readouterr()
    measure.main(["table", "out/tiny", "folder", "--data", "tiny", "--device", "cpu", "--out", "t"])
    assert "all sequences of 16;" in Path("t.md").read_text()  # the shortest that one is for
    assert [measure.trained_on(path)[0] for path in ("out/tiny", "folder")] == [16, 128]
    ours, theirs = (run["results"]["tiny"][0] for run in json.loads(Path("t.json").read_text())["runs"])
    assert theirs["perplexity"] == pytest.approx(ours["perplexity"], rel=1e-3)
    assert theirs["masked_tokens"] == ours["masked_tokens"] and theirs["layers"] == {}
    measure.main(["fill", "folder", "[MASK] ."])
    tuned = bert.Classifier(bert.load_model("out/tiny").bert.config, 2)
    bert.save_checkpoint("out/tuned", 1, tuned, torch.optim.SGD(tuned.parameters()), {})
    shutil.copy("out/tiny/vocab.txt", "out/tuned")
    with pytest.raises(UserError, match="out/tuned: fine-tuned"):
        measure.main(["table", "out/tiny", "out/tuned", "--data", "tiny"])
    shutil.rmtree("folder")
    assert train("--max_steps=2", "--out=out/memory") == 0
    bert.export("out/memory", "folder")
    with pytest.raises(UserError, match="folder: its corpus is not known"):
        measure.main(["slots", "folder", "--layer", "2"])


def test_staleness(place, capsys):
    pytest.importorskip("matplotlib")
    rng, run = np.random.default_rng(0), Path("out/hand")
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({
        "tokenizer_hash": "", "init_checkpoint": "", "first_step": 0, "memory_layers": [2, 3]}))
    with pytest.raises(UserError, match="out/hand/usage"):
        measure.main(["staleness", "out/hand"])
    steps = [500_000, 1_000_000, 1_500_000]  # where names no longer sort by step
    tops = {n: [rng.integers(0, 2, 50) * 3 for _ in steps] for n in (2, 3)}
    for i, step in enumerate(steps):
        measure.write_usage(run, step, {n: {"read": tops[n][i], "top1": tops[n][i]} for n in tops})
    measure.main(["staleness", "out/hand", "--out", "figures/two"])
    out = capsys.readouterr().out
    saved = json.loads(Path("figures/two.json").read_text())
    for bars, (n, top1) in zip(saved, tops.items(), strict=True):
        plain = collections.Counter(max((step for step, t in zip(steps, top1, strict=True) if t[s]),
                                        default="never") for s in range(50))
        assert bars["layer"] == n and plain["never"] > 0
        assert bars["slots"] == {str(key): count / 50 for key, count in plain.items()}
        for count in plain.values():
            assert f"{count / 50:.1%}" in out
    assert Path("figures/two.png").read_bytes()[1:4] == b"PNG"
    assert b"<svg" in Path("figures/two.svg").read_bytes()


def test_slots_are_those_that_the_contexts_read_most(place, capsys):
    assert train("--max_steps=2") == 0
    capsys.readouterr()
    measure.main(["slots", "out/tiny", "--layer", "2", "--most", "2", "--contexts", "4",
                  "--device", "cpu", "--out", "s"])
    most = json.loads(Path("s.json").read_text())
    assert Path("s.md").read_text() in capsys.readouterr().out
    model, tokenizer, _ = measure.load_run("out/tiny")
    ids = torch.from_numpy(measure.cut(prepare_data.Corpus("tiny"), "test", 16, 512))
    calls = record_search(model)
    with torch.no_grad():  # sequence by sequence
        for sequence in ids:
            model.bert(sequence[None])
    reads, words = [], []
    for sequence, (slots, weights) in zip(ids, calls[2], strict=True):
        tokens = [tokenizer.id_to_token(i) for i in sequence.tolist()]
        read = zip(slots.flatten(1).tolist(), weights.flatten(1).tolist(), strict=True)
        for t, (slot, weight) in enumerate(read):
            reads.append(list(zip(slot, weight, strict=True)))
            marked = [*tokens[:t], f"«{tokens[t]}»", *tokens[t + 1:]]
            words.append("".join(marked[max(0, t - 8):t + 9]))
    counts = collections.Counter(slot for read in reads for slot, _ in read)
    assert [s["reads"] for s in most] == [n for _, n in counts.most_common(2)]
    for slot in most:
        assert slot["reads"] == counts[slot["slot"]]
        strength = collections.defaultdict(float)
        for context, read in zip(words, reads, strict=True):
            weight = sum(w for s, w in read if s == slot["slot"])
            if weight:
                strength[context] = max(strength[context], weight)
        best = sorted(strength.values(), reverse=True)[:4]
        assert [w for w, _ in slot["contexts"]] == pytest.approx(best, rel=1e-5)
        for weight, context in slot["contexts"]:
            assert strength[context.replace(" ", "")] == pytest.approx(weight, rel=1e-5)
    never = next(s for s in range(64) if s not in counts)
    measure.main(["slots", "out/tiny", "--layer", "2", "--slot", str(never),
                  str(most[0]["slot"]), "--data", "tiny", "--contexts", "1", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "(never read)" in out and most[0]["contexts"][0][1] in out


def test_fill_names_words_slots_and_what_else_reads_them(place, capsys):
    assert train("--max_steps=2") == 0
    capsys.readouterr()
    word = Path("out/tiny/vocab.txt").read_text().splitlines()[-1]
    measure.main(["fill", "out/tiny", f"{word} [MASK] {word}", "--contexts", "2", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "[MASK] at token 2:" in out and out.count("%") == 5
    assert "layer 2 read" in out and "layer 3 read" in out
    assert len(re.findall(r"^    head \d: \d+ \(0\.", out, re.MULTILINE)) == 2 * 2  # layers x heads
    slot = int(re.search(r"head 1: (\d+)", out)[1])
    measure.main(["slots", "out/tiny", "--layer", "2", "--slot", str(slot), "--contexts", "2",
                  "--device", "cpu"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "«" in line]
    assert len(rows) == 2
    for row in rows:  # the same contexts, with the same weight
        assert f"({row[4].strip()}) {row[5].strip()}" in out
    shutil.rmtree("data")  # a run can be used without its corpus
    measure.main(["fill", "out/tiny", f"{word} [MASK] {word}"])
    out = capsys.readouterr().out
    assert "data/tiny: no such corpus" in out and out.count("%") == 5


def demo_of_hugging_face(kind, folder, vocab):
    """A random transformers model of the demo's shape with a vocabulary, saved by torch."""
    size = len(Path(vocab).read_text().splitlines())
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=size, hidden_size=64, num_hidden_layers=4, intermediate_size=128,
        num_attention_heads=4, max_position_embeddings=128))
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), Path(folder, "pytorch_model.bin"))
    shutil.copy(vocab, Path(folder, "vocab.txt"))
    return model


def test_a_run_starts_from_hugging_faces_weights(place, capsys):
    """By the name that they have in data/weights; its first evaluation is theirs."""
    theirs = demo_of_hugging_face("Bert", "data/weights/bert-base-uncased", "tiny.txt")
    args = ["--init_from=bert-base-uncased", "--memory_layers="]
    assert train(*args, "--max_steps=2", "--out=out/init") == 0
    first = log("out/init")[0]
    said = capsys.readouterr().out
    assert "init_from data/weights/bert-base-uncased:" in said and "loaded       MLM head" in said
    batches = measure.heldout(prepare_data.Corpus("tiny"), "val", 16, 2, 8)
    total = 0.0
    with torch.no_grad():
        for inputs, positions, labels, _ in batches:
            logits = theirs.eval()(inputs).logits.gather(
                1, positions[..., None].expand(-1, -1, 25))
            total += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert first["loss"] == pytest.approx(float(total) / first["masked_tokens"], rel=1e-5)
    settings = json.loads(Path("out/init/config.json").read_text())
    assert settings["init_checkpoint"] == "data/weights/bert-base-uncased"
    assert settings["first_step"] == 0
    assert train(*args, "--max_steps=3", "--out=out/init") == 0  # goes on
    measure.main(["fill", "bert-base-uncased", "the [MASK] cat"])
    assert "[MASK] at token 2:" in capsys.readouterr().out
    assert_one_line(capsys, "tiny.py", "--init_from=bert-base-uncased", "--dataset=other",
                    words=["bert-base-uncased", "vocabulary", "--vocab data/weights"])
    assert_one_line(capsys, "tiny.py", "--init_from=roberta-base", words=["RoBERTa's weights"])
    shutil.copy("other.txt", "data/weights/bert-base-uncased/vocab.txt")
    assert_one_line(capsys, "tiny.py", "--init_from=bert-base-uncased", "--dataset=other",
                    words=["26 tokens do not fit weights for 25"])


def test_curves_go_on_where_the_initial_model_ended(place, capsys):
    pytest.importorskip("matplotlib")
    assert train("--max_steps=4", "--checkpoint_interval=2", "--eval_interval=2") == 0
    for name in ("more", "pkm"):
        assert train("--max_steps=4", f"--out=out/{name}", "--init_from=out/tiny") == 0
    capsys.readouterr()
    measure.main(["curves", "out/tiny", "out/more", "out/pkm", "--out", "figures/a.png"])
    out = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1:3] for line in out[2:5]] == [
        [" out/tiny ", " 4     "], [" out/more ", " 8     "], [" out/pkm  ", " 8     "]]
    assert sorted(os.listdir("figures")) == ["a.json", "a.md", "a.png", "a.svg"]
    more = measure.read_evaluations("out/more")
    assert more[0]["step"] == 4 and json.loads(Path("figures/a.json").read_text())["out/more"] == more


def test_curves_show_where_initialized_runs_start(monkeypatch):
    """However high, and marked; not where the others start. No two runs look alike in grey."""
    pytest.importorskip("matplotlib")

    def evaluations(first, *perplexities):
        return [{"step": first + n, "perplexity": p, "layers": {"2": {"top1_mu": 0.5}}}
                for n, p in enumerate(perplexities)]

    figures = []
    monkeypatch.setattr(measure, "save_figure", lambda figure, out: figures.append(figure))
    found = {"base": evaluations(0, 30000, 9, 5), "more": evaluations(2, 5, 4),
             "pkm": evaluations(2, 70, 6, 3), "resm": evaluations(2, 5.1, 3.5)}
    measure.draw_curves(found, "")
    left = figures[0].axes[0]
    (first, last), (low, high) = left.get_xlim(), left.get_ylim()
    assert 0 < first < 2 and last > 4 and low < 3 and 70 < high < 30000
    assert len(left.get_yticks()) > 3 and left.get_yscale() == "log"
    base, *others = left.lines
    assert base.get_marker() == "None" and all(line.get_marker() == "o" for line in others)
    assert len({str(line._dash_pattern) for line in left.lines}) == len(found)


@pytest.mark.parametrize("args, words", [
    (["table", "out/none", "--data", "tiny"], ["out/none", "no weights"]),
    (["table", "data", "--data", "tiny"], ["data: no weights"]),
    (["table", "out/tiny", "--data", "tiny", "--repeats", "0"], ["--repeats", "at least 1"]),
    (["table", "out/tiny", "--data", "pg19"], ["data/pg19", "prepare_data.py"]),
    (["table", "out/tiny", "--data", "tiny", "--usage_data", "pg19"], ["data/pg19"]),
    (["table", "out/tiny", "out/foreign", "--data", "tiny"],
     ["out/foreign", "vocabulary", "data/tiny", "--vocab"]),
    (["curves", "out/tiny", "out/foreign"], ["out/foreign", "vocabulary", "out/tiny"]),
    (["curves", "out/none"], ["out/none"]), (["staleness", "data"], ["data/config.json"]),
    (["staleness", "out/foreign"], ["out/foreign", "without memory"]),
    (["slots", "out/foreign", "--layer", "2"], ["out/foreign", "no memory"]),
    (["slots", "out/tiny", "--layer", "1"], ["no memory in layer 1", "2, 3"]),
    (["slots", "out/tiny", "--layer", "2", "--slot", "3", "64"], ["slot 64", "0 to 63"]),
    (["slots", "out/tiny", "--layer", "2", "--data", "other"], ["data/other", "vocabulary"]),
    (["fill", "out/tiny", "no mask"], ["no [MASK]"]), (["fill", "out/none", "[MASK]"], ["out/none"]),
    (["fill", "out/tiny", "[MASK]", "--data", "nowhere"], ["data/nowhere"]),
    (["fill", "out/tiny", "[MASK] " * 500], ["positions"])])
def test_a_mistake_in_measuring_is_one_line(two_runs, capsys, args, words):
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        configs.run(lambda: measure.main(args))
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    assert all(word in error for word in words), error


@pytest.fixture(scope="module")
def two_runs(prepared, tmp_path_factory):
    """The working directory: data, out/tiny with memory, out/foreign without it on other words."""
    folder = tmp_path_factory.mktemp("two_runs")
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train("--max_steps=2")
        train("--max_steps=2", "--dataset=other", "--memory_layers=", "--out=out/foreign")
        yield folder
    for number, handler in handlers.items():
        signal.signal(number, handler)


def assert_one_line(capsys, *args, words):
    """Exit status 2, one line on stderr with `words` in it, nothing written."""
    before = files()
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        configs.run(lambda: pretrain.main(list(args)))
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert all(word in error for word in words), error
    assert files() == before


@pytest.mark.parametrize("args, words", [
    (["--batchsize=4"], ["'batchsize'", "did you mean batch_size"]),
    (["--batch_size=2.5"], ["batch_size", "expected int"]), (["--batch_size=0"], ["batch_size"]),
    (["--model=huge"], ["'huge'", "demo"]), (["--compile=maybe"], ["compile", "'maybe'"]),
    (["--dtype=float8"], ["dtype", "float8"]), (["--dtype=float16"], ["float16"]),
    (["--device=abacus"], ["device", "abacus"]), (["--topk=9"], ["topk", "9"]),
    (["--key_dim=15"], ["key_dim", "15"]), (["--memory_layers=5"], ["memory_layers", "layer 5"]),
    (["--seq_len=129"], ["seq_len", "129", "128"]), (["--dataset=nowhere"], ["data/nowhere"]),
    (["--init_from=out/basis"], ["out/basis", "python pretrain.py configs/basis.py"]),
    (["--seq_len=2"], ["seq_len"]), (["--dropout=1.5"], ["dropout"]), (["--seed=-1"], ["seed"]),
    (["--lr=-1"], ["lr"]), (["--key_dim=0"], ["key_dim"]), (["--memory_heads=0"], ["memory_heads"]),
    (["--lr={[]}"], ["lr", "expected float"])])
def test_a_wrong_setting_is_one_line(place, capsys, args, words):
    assert_one_line(capsys, "tiny.py", *args, words=words)


def halve(path):
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def foreign_id(path):
    ids = np.fromfile(path, "<u2")
    ids[100] = 25
    ids.tofile(path)


@pytest.mark.parametrize("damage, args, words", [
    (lambda: halve(Path("data/tiny/train.bin")), [], ["train.bin", "bytes"]),
    (lambda: foreign_id(Path("data/tiny/train.bin")), [], ["train.bin", "25"]),
    (lambda: halve(Path("out/tiny/step_000002/model.pt")), [], ["step_000002/model.pt"]),
    (lambda: halve(Path("out/tiny/step_000002/optimizer.pt")), [], ["step_000002/optimizer.pt"]),
    (lambda: halve(Path("out/tiny/step_000002/state.pt")), [], ["step_000002/state.pt"]),
    (lambda: halve(Path("out/tiny/config.json")), [], ["out/tiny/config.json"]),
    (lambda: None, ["--dataset=other"], ["out/tiny", "vocabulary"]),
    (lambda: None, ["--lr=5e-3"], ["lr", "0.003", "0.005"]),
    (lambda: None, ["--out=out/new", "--init_from=out/tiny", "--n_keys=9"], ["shape", "step_000002"]),
    (lambda: None, ["--out=out/new", "--init_from=out/tiny", "--dataset=other"], ["vocabulary"])])
def test_a_damaged_or_foreign_file_is_one_line(place, capsys, damage, args, words):
    assert train("--max_steps=2") == 0
    damage()
    assert_one_line(capsys, "tiny.py", "--max_steps=4", *args, words=words)


def test_a_mistake_ends_the_process_with_status_2(place):
    result = subprocess.run(command("--max_step=4"), capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: command line: unknown key 'max_step'")


SCRIPTS = {"pretrain", "finetune", "bench"}
BELOW = {"configs": set(), "pkm": set(), "prepare_data": {"configs"},
         "tasks": {"prepare_data", "configs"}, "model": {"pkm", "prepare_data", "configs"},
         "measure": {"model", "tasks", "prepare_data", "configs"}}
PACKAGES = {"torch", "numpy", "tiktoken", "tokenizers", "requests", "matplotlib", "pyarrow",
            "safetensors"}


@pytest.mark.parametrize("args", [
    ["--sizes", "demo", "--lengths", "8"], ["inference", "--slots", "32", "33", "--lengths", "4"],
    ["layer", "--tokens", "6"], ["train", "--size", "demo", "--length", "16", "--batch_size", "2"],
    ["against_transformers", "--size", "demo", "--lengths", "8", "--length", "16"]],
    ids=lambda args: args[0])
def test_bench(tmp_path, monkeypatch, capsys, args):
    if "against_transformers" in args:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(bench.SIZES, "base", bench.SIZES["demo"])  # of --slots and layer
    monkeypatch.setitem(bench.LAYERS, "base", (2, 3))
    n_keys = [] if "against_transformers" in args else ["--n_keys", "32"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *args, "--rounds", "2", *n_keys,
                                      "--out", "results/x.json"])
    bench.main()
    line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(line) == json.loads(Path("results/x.json").read_text())
    record = json.loads(line)
    assert record["results"] and record["rounds"] == 2 and record["dtype"] == "float32"
    if args[0] == "train":
        assert [r["model"] for r in record["results"]] == ["demo plain", "demo +PKM", "demo +ResM"]
    if "--slots" in args:
        assert [r["slots"] for r in record["results"]] == [1024, 1089] * 2


@pytest.mark.parametrize("args, words", [
    (["speed"], ["invalid choice", "inference"]), (["--sizes", "huge"], ["huge", "base"]),
    (["layer", "--tokens", "0"], ["--tokens", "at least 1"]),
    (["--slots", "9"], ["--slots", "at least 32"]), (["--dtype", "int8"], ["int8"]),
    (["--device", "moon"], ["moon"]), (["train", "--systems", "+FFN"], ["+FFN", "+ResM"])])
def test_a_wrong_bench_is_one_line(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.py", *args])
    with pytest.raises(UserError) as caught:
        bench.main()
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words)


def test_what_does_not_fit_is_skipped(capsys):
    assert bench.fits("little", 1, torch.device("cpu"))
    assert not bench.fits("a model", 1e18, torch.device("cpu"))
    assert "skipped: a model" in capsys.readouterr().out


def test_imports_run_one_way_down():
    paths = {path.stem: path for path in ROOT.glob("*.py") if not path.stem.startswith("test_")}
    paths["configs"] = ROOT / "configs" / "__init__.py"
    assert paths.keys() >= BELOW.keys() | {"pretrain"}
    for name, path in paths.items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import)
                    for alias in node.names}
        imported |= {node.module.split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
        own = imported & paths.keys()
        assert own <= BELOW.get(name, paths.keys() - SCRIPTS), (name, own)
        assert imported - own - sys.stdlib_module_names <= PACKAGES, name


def test_preparing_data_needs_no_torch():
    subprocess.run([sys.executable, "-c", "import sys, prepare_data; assert 'torch' not in sys.modules"],
                   cwd=ROOT, check=True)


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", "mat", "."]
SAMPLE = "The cat sat.\nThe mats\n\nA cat.\n\nThe mat. [SEP]\n\nsat sat\n"


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty working directory with a vocab.txt of PIECES and a text of four documents."""
    monkeypatch.chdir(tmp_path)
    Path("vocab.txt").write_text("\n".join(PIECES) + "\n")
    Path("sample.txt").write_text(SAMPLE)
    return tmp_path


def prepare(*args):
    """Run prepare_data's main() in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare_data.py", *map(str, args)])
        prepare_data.main()


def prepare_sample(*more):
    prepare("text", "sample", "sample.txt", "--vocab", "vocab.txt", *more)


def words(corpus, which):
    """A split's documents, each as its tokens joined by spaces."""
    pieces = [PIECES[i] for i in corpus.split(which)]
    assert pieces[-1] == "[SEP]"
    return [text.strip() for text in " ".join(pieces).split("[SEP]")[:-1]]


def test_prepared_corpus(workdir, capsys):
    prepare_sample()
    corpus = prepare_data.Corpus("sample")
    # four documents: every fourth but one is for val, every fourth for test
    assert words(corpus, "train") == ["the cat sat . the mat ##s", "[UNK] cat ."]
    # [SEP] in a text is text: "[", "sep", "]"
    assert words(corpus, "val") == ["the mat . [UNK] [UNK] [UNK]"]
    assert words(corpus, "test") == ["sat sat"]
    assert Path("data/sample/test.bin").read_bytes() == bytes([7, 0, 7, 0, 3, 0])
    assert corpus.split("test").dtype == np.uint16
    assert corpus.special_ids == (0, 1, 2, 3, 4) and corpus.mask_id == 4
    assert corpus.vocab_size == 11
    assert corpus.tokenizer_hash == hashlib.sha256("\n".join(PIECES).encode()).hexdigest()
    assert corpus.meta["documents"] == {"train": 2, "val": 1, "test": 1}
    assert corpus.meta["unknown"] == {"train": 1, "val": 3, "test": 0}
    assert corpus.meta["tokens"] == {"train": 12, "val": 7, "test": 3}
    assert "1 documents, 3 tokens" in capsys.readouterr().out
    assert corpus.tokenizer().encode("The [MASK] sat").ids == [5, 4, 7]
    assert sorted(os.listdir("data")) == ["sample"]


def test_second_run_gives_the_same_bytes(workdir):
    prepare_sample()
    first = {path.name: path.read_bytes() for path in Path("data/sample").iterdir()}
    prepare_sample("--force")
    assert first == {path.name: path.read_bytes() for path in Path("data/sample").iterdir()}
    prepare("text", "sample2", "sample.txt", "--vocab", "data/sample")
    assert Path("data/sample2/train.bin").read_bytes() == first["train.bin"]


def test_documents_by_file_and_held_out_share(workdir):
    Path("books/more").mkdir(parents=True)
    for number in range(20):
        Path(f"books/{'more/' * (number % 2)}{number:02}.txt").write_text("cat\n\n" * (number + 1))
    Path("books/notes.md").write_text("sat")
    prepare("text", "books", "books", "--split", "file", "--val_every", 10, "--vocab", "vocab.txt")
    corpus = prepare_data.Corpus("books")
    assert corpus.meta["documents"] == {"train": 16, "val": 2, "test": 2}
    # 00, 02 ... 18, then more/01 ... more/19: the 9th and 19th are 16 and 17
    assert [len(text.split()) for text in words(corpus, "val")] == [17, 18]
    assert [len(text.split()) for text in words(corpus, "test")] == [19, 20]


def test_batches_do_not_change_the_ids(workdir, monkeypatch):
    prepare_sample()
    monkeypatch.setattr(prepare_data, "BATCH", 5)
    prepare("text", "small", "sample.txt", "--vocab", "vocab.txt")
    for which in prepare_data.SPLITS:
        big, small = (prepare_data.Corpus(name).split(which) for name in ("sample", "small"))
        assert np.array_equal(big, small)


DOUBLES = {"a.txt": "cat\n\nmat\nsat\n\ncat\n\n", "b.txt": "mat sat\n\nsat\n\nmat\nsat\n\nthe\n"}


def test_duplicates_are_dropped(workdir):
    """The first of equal documents stays, whatever file it is in; held out is from what stays."""
    for name, text in DOUBLES.items():
        Path(name).write_text(text)
    prepare("text", "one", "a.txt", "b.txt", "--vocab", "vocab.txt")
    corpus = prepare_data.Corpus("one")
    assert words(corpus, "train") == ["cat", "mat sat", "mat sat"]  # "mat\nsat" and "mat sat"
    assert words(corpus, "val") == ["sat"] and words(corpus, "test") == ["the"]
    assert corpus.meta["duplicates"] == 2


def many_documents():
    rng = random.Random(1)
    for file in range(3):
        Path(f"{file}.txt").write_text("\n\n".join(
            "\n".join(" ".join(rng.choices(["the", "cat", "sat", "mats", "mat."], k=5))
                      for _ in range(rng.randint(1, 4))) for _ in range(40)))
    return ["0.txt", "1.txt", "2.txt", "--vocab", "vocab.txt", "--val_every", "7"]


STOP = """
import os, signal, sys, prepare_data
prepare_data.BATCH, left, replace = 90, int(sys.argv.pop(1)), os.replace
def stop(a, b):
    global left
    left -= str(b).endswith("state.json")
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(a, b)
os.replace = stop
prepare_data.main()
"""


@pytest.mark.parametrize("vocab", ["given", "learned"])
def test_killed_and_restarted_gives_the_same_bytes(workdir, monkeypatch, capsys, vocab):
    args = many_documents()
    if vocab == "learned":  # once: `tokenizers` does not learn the same one twice
        args[3:5] = ["--vocab_size", "256"]
    monkeypatch.setattr(prepare_data, "BATCH", 90)
    done = []
    for kills in range(1, 12, 3):  # later and later, in the second and in the third file too
        stopped = subprocess.run([sys.executable, "-c", STOP, str(kills), "text", "new", *args],
                                 env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
        assert stopped.returncode == -signal.SIGKILL and not Path("data/new").exists()
        done.append(json.loads(Path("data/.part_new/state.json").read_text())["documents"])
    assert done == sorted(done) and 0 < done[0] < 40 < done[-1]
    capsys.readouterr()
    prepare("text", "new", *args)
    assert f"going on after {done[-1]} documents" in capsys.readouterr().out
    if vocab == "learned":
        args[3:5] = ["--vocab", "data/new"]
    prepare("text", "whole", *args)
    for file in ("train.bin", "val.bin", "test.bin", "vocab.txt"):
        assert Path("data/new", file).read_bytes() == Path("data/whole", file).read_bytes()
    assert sorted(os.listdir("data")) == ["new", "whole"]
    assert len(os.listdir("data/new")) == 5


def test_other_text_starts_anew(workdir, monkeypatch):
    args = many_documents()
    subprocess.run([sys.executable, "-c", STOP, "9", "text", "new", *args],
                   env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    Path("0.txt").write_text("cat\n\n" + Path("0.txt").read_text())
    prepare("text", "new", *args)
    prepare("text", "whole", *args)
    assert (Path("data/new/train.bin").read_bytes() == Path("data/whole/train.bin").read_bytes())


def test_long_lines_are_cut_where_no_id_changes(workdir):
    line = " ".join(random.Random(0).choices(["the", "cat,", "sat  the", "mats", "\u00e9t\u00e9"], k=40000))
    pieces = list(prepare_data._pieces(line))
    assert "".join(pieces) == line and len(pieces) > 2 and max(map(len, pieces)) < 2**16 + 20
    assert list(prepare_data._pieces("x" * 10**6)) == ["x" * 10**6]
    tokenizer = prepare_data.build_tokenizer(PIECES)
    ids = itertools.chain.from_iterable(tokenizer.encode(piece).ids for piece in pieces)
    assert list(ids) == tokenizer.encode(line).ids


def write_parquet(path, texts, column="text"):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({column: texts, "id": list(range(len(texts)))}), path)


def test_the_papers_corpora_from_files(workdir, monkeypatch):
    """Parquet and text, Wikipedia by article and BookCorpus by lines, give the same ids."""
    monkeypatch.setattr(prepare_data, "SENTENCES", 2)
    articles = ["the cat\n\nsat .", "the mat", "", None, "the cat\n\nsat .", "cats"]
    sentences = ["cat", "sat", "mat", "the", "cats"]
    write_parquet("wiki/train-0.parquet", articles[:2])
    write_parquet("wiki/train-1.parquet", articles[2:])
    write_parquet("books.parquet", sentences)
    Path("books.txt").write_text("\n".join(sentences) + "\n")
    with tarfile.open("bookcorpus.tar.bz2", "w:bz2") as archive:
        archive.add("books.txt")
    for place in ("books.parquet", "books.txt", "bookcorpus.tar.bz2"):
        prepare("wikibooks", "--from", "wiki", place, "--vocab", "vocab.txt", "--force")
        corpus = prepare_data.Corpus("wikibooks")
        assert words(corpus, "train") == ["the cat sat .", "the mat", "cat ##s"]
        assert (words(corpus, "val"), words(corpus, "test")) == (["cat sat"], ["mat the"])
    assert corpus.meta["duplicates"] == 2  # an article, and the last sentence


def test_damaged_parquet_is_one_line(workdir):
    write_parquet("wiki/a.parquet", ["cat", "sat", "mat"] * 5000)
    whole = Path("wiki/a.parquet").read_bytes()
    write_parquet("none/a.parquet", ["cat"], column="body")
    half = bytearray(whole)
    half[4:60] = b"\xff" * 56
    for name, content in (("short", whole[:-100]), ("empty", b""), ("spoiled", bytes(half))):
        Path(name).mkdir()
        Path(name, "a.parquet").write_bytes(content)
    for name, words in (("short", "short/a.parquet: damaged"), ("empty", "empty/a.parquet: damaged"),
                        ("spoiled", "spoiled/a.parquet: damaged"), ("none", "no column 'text'"),
                        ("nowhere", "nowhere: no such file")):
        with pytest.raises(UserError, match=words) as error:
            prepare("wikipedia", "--from", name, "--vocab", "vocab.txt")
        assert "\n" not in str(error.value) and not Path("data").exists()


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match="a.parquet needs a package: pip install pyarrow"):
        list(prepare_data._parquet(Path("a.parquet"), True))


@pytest.fixture
def gpt2_files(monkeypatch, tmp_path):
    """GPT-2's two files where tiktoken looks for them: under the SHA-1 of their addresses."""
    if not (SHARED / "gpt2-bpe").is_dir():
        pytest.skip("no GPT-2 vocabulary on this machine")
    pytest.importorskip("tiktoken")
    (tmp_path / "cache").mkdir()
    for name in ("encoder.json", "vocab.bpe"):
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        shutil.copy(SHARED / "gpt2-bpe" / name,
                    tmp_path / "cache" / hashlib.sha1(url.encode()).hexdigest())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    return SHARED / "gpt2-bpe"


def byte_level_bpe(folder):
    """`tokenizers`' byte-level BPE of the two files, which shares no code with tiktoken."""
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(
        json.loads((folder / "encoder.json").read_text()), [tuple(x.split()) for x in lines if x]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def test_ids_of_gpt2(workdir, gpt2_files):
    reference = byte_level_bpe(gpt2_files)
    vocab = prepare_data.gpt2_vocab()
    ids = json.loads((gpt2_files / "encoder.json").read_text())
    assert dict(zip(vocab, range(50257))) == ids
    assert vocab[50257:] == ["<s>", "</s>", "<pad>", "<mask>"]
    lines = (gpt2_files / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    numbers = {token: number for number, token in enumerate(vocab)}
    assert prepare_data._merges(numbers) == [tuple(line.split()) for line in lines if line]
    with open(SHARED / "wikipedia.txt", encoding="utf-8") as file:
        texts = [*TRICKY, "  two  spaces\n\n\ttabs \r\n", *itertools.islice(file, 3000)]
    ours = prepare_data._encoder(vocab)(texts)
    assert ours == [encoding.ids for encoding in reference.encode_batch(texts)]
    tokenizer = prepare_data.build_tokenizer(vocab)
    assert [encoding.ids for encoding in tokenizer.encode_batch(texts)] == ours
    assert tokenizer.decode(ours[-1]) == texts[-1]
    marked = tokenizer.encode("<s>a <mask> b</s>").ids  # the mask has the space before it
    assert [vocab[i] for i in marked] == ["<s>", "a", "<mask>", "\u0120b", "</s>"]


def test_gpt2_corpus_and_run(place, gpt2_files, capsys, monkeypatch):
    """From text to filled-in masks and an exported tokenizer, with GPT-2's vocabulary."""
    prepare("text", "bytes", "text.txt", "--tokenizer", "gpt2")
    corpus = prepare_data.Corpus("bytes")
    assert corpus.vocab_size == 50261 and corpus.special_ids == (50259, 50256, 50257, 50258, 50260)
    documents = Path("text.txt").read_text().split("\n\n")
    reference = byte_level_bpe(gpt2_files)  # of lines with their line breaks
    expected = [i for line in documents[58].splitlines()
                for i in reference.encode(line + "\n").ids]
    assert corpus.split("val").tolist()[-len(expected) - 1:] == [*expected, 50258]
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")  # a corpus and a run bring their own vocabulary
    assert train("--dataset=bytes", "--max_steps=2", "--out=out/bytes") == 0
    capsys.readouterr()
    measure.main(["fill", "out/bytes", "the [MASK] cat"])
    assert "[MASK] at token 2:" in capsys.readouterr().out
    assert_one_line(capsys, "tiny.py", "--out=out/bytes", words=["another vocabulary"])
    assert train("--dataset=bytes", "--max_steps=2", "--out=out/plain", "--memory_layers=") == 0
    transformers = pytest.importorskip("transformers")
    bert.export("out/plain", "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained("hf")
    assert tokenizer("a <mask> dog")["input_ids"] == [50257, 64, 50260, 3290, 50258]
    assert tokenizer.mask_token_id == 50260 and tokenizer.pad_token_id == 50259


WIKITEXT = """ \n = First = \n \n a cat \n \n = = Part = = \n \n the mat \n Key : G \n = Goals = \n
 \n = De sat : a book = \n cat . \n \n = Second = \n \n cat \n"""


def test_wikitext_articles(workdir):
    Path("wiki").mkdir()
    for name in ("train", "valid", "test"):
        Path(f"wiki/wiki.{name}.tokens").write_text(WIKITEXT)
        Path(f"wiki/wiki.{name}.raw").write_text(WIKITEXT.replace("mat", "sat"))
    prepare("wikitext2", "--from", "wiki", "--vocab", "vocab.txt")
    corpus = prepare_data.Corpus("wikitext2")
    assert corpus.meta["documents"] == {"train": 2, "val": 2, "test": 2}
    assert words(corpus, "val")[1] == "[UNK] [UNK] [UNK] cat"  # = Second =
    assert "mat" in words(corpus, "train")[0]

    Path("wiki/wiki.valid.tokens").write_text("")
    with pytest.raises(UserError, match="valid.tokens: empty"):
        prepare("wikitext2", "--from", "wiki", "--vocab", "vocab.txt", "--force")

    with zipfile.ZipFile("wiki.zip", "w") as archive:
        for path in Path("wiki").iterdir():
            archive.write(path, f"wikitext-2-raw/{path.name}")
    prepare("wikitext2", "--raw", "--from", "wiki.zip", "--vocab", "vocab.txt")
    raw = prepare_data.Corpus("wikitext2_raw")
    assert raw.meta["documents"] == corpus.meta["documents"]
    assert "mat" not in words(raw, "train")[0]


@pytest.mark.skipif(not (SHARED / "wikitext-2").is_dir(), reason="no WikiText-2 on this machine")
def test_wikitext2_articles_as_published(workdir):
    Path("wiki").mkdir()
    for name in ("valid", "test"):
        Path(f"wiki/{name}.txt").write_bytes((SHARED / f"wikitext-2/{name}.txt").read_bytes())
    with open(SHARED / "wikitext-2/train.txt", encoding="utf-8") as file:
        lines = list(itertools.islice(file, 3000))
    Path("wiki/train.txt").write_text("".join(lines), encoding="utf-8")
    prepare("wikitext2", "--from", "wiki", "--vocab_size", 1000)
    corpus = prepare_data.Corpus("wikitext2")
    assert (corpus.meta["documents"]["val"], corpus.meta["documents"]["test"]) == (60, 60)
    assert corpus.vocab_size == 1000 and corpus.special_ids == (0, 1, 2, 3, 4)
    tokenizer = corpus.tokenizer()
    whole = tokenizer.encode(" ".join(lines)).ids  # white space is all that separates lines
    train = corpus.split("train")
    assert train[train != corpus.sep_id].tolist() == whole


def test_docs_from_source(workdir, monkeypatch):
    """Docstrings come in the source's order, from a tree that is never imported."""
    tree = prepare_data.ast.parse(
        '"""Module.\n\n    Indented."""\nimport nothing_like_it\nclass A:\n    "Class."\n'
        'try:\n    pass\nexcept E:\n    def f():\n        """Function."""\n'
        'abs = _C._add_docstr(torch.abs, r"""\nabs(x)\n\n    more {x}""".format(x=1))\n'
        'add_newdoc("A", ("b", """\n    b()"""))\n'
        'call("""not\na docstring""")\nasync def g():\n    "Last."\n')
    found = [text for text in prepare_data._docstrings(tree) if text]
    assert found == [
        "Module.\n\nIndented.", "Class.", "Function.", "abs(x)\n\n    more {x}", "b()",
        "Last."]

    library = workdir / "library"
    (library / "tests").mkdir(parents=True)
    for number in range(40):  # one docstring of each is the same
        (library / f"m{number:02}.py").write_text(f'"Number {number}."\ndef f():\n    "Same."\n')
    (library / "tests/m.py").write_text('"""A test."""')
    (library / "bad.py").write_text('"""Bad."""\ndef')
    (library / "odd.py").write_text('"""Odd \\ud800 \\d"""')
    monkeypatch.setattr(prepare_data.sysconfig, "get_path", lambda name: str(library))
    empty = type("Spec", (), {"origin": str(workdir / "nowhere/__init__.py")})
    monkeypatch.setattr(prepare_data.importlib.util, "find_spec", lambda name: empty)
    prepare_data.prepare_docs(vocab=PIECES + ["number", "same", *map(str, range(40)), "odd", "?"])
    corpus = prepare_data.Corpus("docs")
    assert corpus.meta["documents"] == {"train": 37, "val": 2, "test": 2}
    assert corpus.tokenizer().decode(corpus.split("val")) == "number 18. number 38."
    assert corpus.tokenizer().decode(corpus.split("train")).count("same.") == 1


TRICKY = ["Café déjà-vu, naïve!", "北京 is 中文 and かな", "don't  e.g. U.S.A.\t(x_1) <unk> @-@",
          "unaffable supercalifragilistic" * 5, "a [MASK] b", "\u00ad soft\u200b, \ufeffBOM ½ ﬁ Ⅷ",
          "İstanbul ẞ ǅ", "नमस्ते 😀 ok", "x\u0000y \x07"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="no BERT vocabulary on this machine")
def test_ids_are_hugging_faces():
    """Against Hugging Face's tokenizer in plain Python, which shares no code with `tokenizers`."""
    legacy = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")
    vocabulary = SHARED / "bert-vocab/vocab.txt"
    theirs = legacy.BertTokenizerLegacy(str(vocabulary))
    ours = prepare_data.build_tokenizer(vocabulary)
    for text in TRICKY:
        assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False), text


@pytest.mark.skipif(not SHARED.is_dir(), reason="no BERT vocabulary on this machine")
def test_ids_of_bert():
    """Ids as BERT's published vocabulary numbers them."""
    tokenizer = prepare_data.build_tokenizer(SHARED / "bert-vocab/vocab.txt")
    assert tokenizer.encode("Hello, [MASK] WORLD").ids == [7592, 1010, 103, 2088]
    assert tokenizer.encode("Café 北京").tokens == ["cafe", "北", "京"]
    assert tokenizer.encode("embeddings").tokens == ["em", "##bed", "##ding", "##s"]
    assert tokenizer.decode(tokenizer.encode("embeddings").ids) == "embeddings"


def test_reading_does_not_import_torch(workdir):
    code = "import sys, prepare_data; sys.exit('torch' in sys.modules or 'requests' in sys.modules)"
    folder = Path(prepare_data.__file__).parent
    assert subprocess.run([sys.executable, "-c", code], cwd=folder, check=False).returncode == 0


def test_unigram_perplexity():
    train, heldout = [5, 5, 5, 6, 3], [5, 6, 7, 3, 1]
    # ordinary ids 5, 6, 7 with counts 3 + 1, 1 + 1, 0 + 1
    expected = math.exp(-(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3)
    found = prepare_data.unigram_perplexity(
        np.bincount(train, minlength=8), np.bincount(heldout, minlength=8), (0, 1, 2, 3, 4))
    assert found == pytest.approx(expected, rel=1e-12)


MISTAKES = {  # what is in bad.txt or in vocab.txt, what the message must say
    "empty": ("bad.txt", b"", "bad.txt"),
    "blank": ("bad.txt", b" \n\n", "bad.txt"),
    "binary": ("bad.txt", b"cat\n\0\n", "bad.txt: byte 4 is 0x00"),
    "not UTF-8": ("bad.txt", "cat\n\ncafé".encode("latin-1"), "bad.txt: byte 8 is 0xe9"),
    "too few documents": ("bad.txt", b"cat\n\nmat\n", "2 documents"),
    "vocabulary without [MASK]": ("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\ncat\n", "[MASK]"),
    "token twice": ("vocab.txt", ("\n".join(PIECES + ["cat"])).encode(), "'cat'"),
    "no vocabulary": ("vocab.txt", b"", "vocab.txt"),
    "vocabulary too large": ("vocab.txt", "\n".join(PIECES + [*map(str, range(2**16))]).encode(),
                             "65,536"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_in_a_file(workdir, mistake):
    name, content, message = MISTAKES[mistake]
    Path(name).write_bytes(content)
    texts = ["bad.txt"] if mistake == "too few documents" else ["sample.txt", "bad.txt"]
    texts = texts if name == "bad.txt" else ["sample.txt"]
    with pytest.raises(UserError) as error:
        prepare("text", "new", *texts, "--vocab", "vocab.txt")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not Path("data").exists()


@pytest.mark.parametrize("args, message", [
    (["text", "new", "missing.txt"], "missing.txt"),
    (["text", "new", "sample.txt", "nothing"], "nothing"),
    (["text", "../new", "sample.txt"], "../new"),
    (["text", ".new", "sample.txt"], ".new"),
    (["text", "new", "sample.txt", "--vocab_size", "70000"], "70000"),
    (["text", "new", "sample.txt", "--vocab", "missing"], "missing"),
    (["wikitext2", "--from", "nothing"], "wiki.train.tokens"),
    (["wikitext2", "--from", "sample.txt"], "sample.txt"),
])
def test_mistake_on_the_command_line(workdir, args, message):
    Path("nothing").mkdir()
    with pytest.raises(UserError) as error:
        prepare(*args)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not Path("data").exists()


def test_a_mistake_is_one_line_and_status_2(workdir):
    command = [sys.executable, prepare_data.__file__, "text", "new", "missing.txt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: missing.txt: no such file, or a folder without *.txt\n"


def test_existing_corpus_and_force(workdir, monkeypatch):
    prepare_sample()
    old = {path.name: path.read_bytes() for path in Path("data/sample").iterdir()}
    with pytest.raises(UserError, match="data/sample exists already"):
        prepare_sample()

    Path("sample.txt").write_text("mat\n\ncat\n\nsat\n\nmat cat\n\nmat sat\n")
    def dies(*args):
        raise ZeroDivisionError
    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "_encode", dies)  # half-way
        with pytest.raises(ZeroDivisionError):
            prepare_sample("--force")
    assert {path.name: path.read_bytes() for path in Path("data/sample").iterdir()} == old

    with monkeypatch.context() as patch:  # between the two renames
        rename = os.replace
        patch.setattr(os, "replace",
                      lambda a, b: 1 / 0 if Path(b).name == "sample" else rename(a, b))
        with pytest.raises(ZeroDivisionError):
            prepare_sample("--force")
    assert prepare_data.Corpus(".old_sample").meta["documents"]["train"] == 2
    assert not Path("data/sample").exists()

    prepare_sample()
    assert prepare_data.Corpus("sample").meta["documents"] == {"train": 3, "val": 1, "test": 1}
    assert os.listdir("data") == ["sample"]
    assert sorted(os.listdir("data/sample")) == sorted(old)


def spoil_vocab(folder):
    (folder / "vocab.txt").write_text("\n".join(PIECES[:-1] + ["!"]) + "\n")


def spoil_id(folder):
    ids = np.fromfile(folder / "train.bin", "<u2")
    ids[3] = 11
    ids.tofile(folder / "train.bin")


def spoil_meta(change):
    def spoil(folder):
        meta = json.loads((folder / "meta.json").read_text())
        change(meta)
        (folder / "meta.json").write_text(json.dumps(meta))
    return spoil


@pytest.mark.parametrize("spoil, message", [
    (lambda folder: (folder / "meta.json").unlink(), "prepare_data.py text sample PATH"),
    (lambda folder: (folder / "meta.json").write_text('{"name":'), "meta.json: damaged"),
    (lambda folder: (folder / "meta.json").write_text("[]"), "meta.json: damaged"),
    (spoil_meta(lambda meta: meta.pop("tokens")), "meta.json: damaged"),
    (spoil_meta(lambda meta: meta.update(mask_id=5)), "meta.json: damaged"),
    (spoil_vocab, "vocab.txt"),
    (lambda folder: (folder / "train.bin").write_bytes(bytes(22)), "expected 24 bytes, found 22"),
    (lambda folder: (folder / "train.bin").unlink(), "expected 24 bytes, found 0"),
    (spoil_id, "id 11 at position 3"),
])
def test_spoiled_corpus(workdir, spoil, message):
    prepare_sample()
    spoil(Path("data/sample"))
    with pytest.raises(UserError) as error:
        prepare_data.Corpus("sample").split("train")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name, command", [
    ("docs", "prepare_data.py docs"), ("wikitext103_raw", "prepare_data.py wikitext103 --raw"),
    ("mine", "prepare_data.py text mine PATH...")])
def test_missing_corpus_names_its_command(workdir, name, command):
    with pytest.raises(UserError) as error:
        prepare_data.Corpus(name)
    assert str(error.value).endswith(command)


class Hub:
    """A server with one file, `body`, at any path. `plan` says what it does with each request in
    turn: a method's name, or a status; after the plan it serves. `seen`: (path, Range, agent)."""

    def __init__(self, body):
        self.body, self.plan, self.seen, self.headers = body, [], [], {}
        self.stalled = threading.Event()

    def answer(self, handler):
        wanted = handler.headers["Range"]
        self.seen.append((handler.path, wanted, handler.headers["User-Agent"]))
        step = self.plan.pop(0) if self.plan else "serve"
        start = int(wanted[6:-1]) if wanted and step != "without_ranges" else 0
        status, rest = (206 if start else 200), self.body[start:]
        if isinstance(step, int):
            status, start, rest = step, 0, b"no"
        elif start >= len(self.body):
            status, rest = 416, b""
        handler.send_response(status)
        for name, value in self.headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(rest)))
        if status == 206:
            first = start + 1 if step == "elsewhere" else start
            handler.send_header("Content-Range", f"bytes {first}-{len(self.body) - 1}/{len(self.body)}")
        elif status == 416:
            handler.send_header("Content-Range", f"bytes */{len(self.body)}")
        handler.end_headers()
        handler.wfile.write(rest[:len(rest) // 2] if step in ("cut", "stall") else rest)
        if step == "stall":
            handler.wfile.flush()
            self.stalled.wait(5)


@pytest.fixture
def hub(monkeypatch):
    hub = Hub(random.Random(0).randbytes(3 * 2**20))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):  # the client went away
                hub.answer(self)

        def log_message(self, *args):
            pass
    hub.pauses = []
    monkeypatch.setattr(time, "sleep", hub.pauses.append)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        serving.daemon_threads = True
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        hub.url = f"http://127.0.0.1:{serving.server_port}"
        yield hub
        hub.stalled.set()
        serving.shutdown()


def ranges(hub):
    return [wanted for _, wanted, _ in hub.seen]


HALF, REST = 3 * 2**19, 3 * 2**18  # of the hub's 3 MB, and of what is left after a half


@pytest.mark.parametrize("plan, expected", [
    ([], [None]), ([503], [None, None]), ([429, 500, 408], [None] * 4),
    (["cut"], [None, f"bytes={HALF}-"]),
    (["cut", 503, "cut"], [None] + [f"bytes={HALF}-"] * 2 + [f"bytes={HALF + REST}-"]),
    (["stall"], [None, f"bytes={HALF}-"]),
    (["cut", "without_ranges"], [None, f"bytes={HALF}-"]),
    (["cut", "elsewhere"], [None, f"bytes={HALF}-", None])],
    ids=["whole", "503", "three errors", "cut", "cut twice", "stalled", "no ranges", "wrong range"])
def test_download(workdir, hub, monkeypatch, plan, expected):
    monkeypatch.setattr(prepare_data, "TIMEOUT", 0.5)
    hub.plan = list(plan)
    sha256 = hashlib.sha256(hub.body).hexdigest()
    prepare_data.download(f"{hub.url}/a.zip", Path("data/a.zip"), len(hub.body), sha256)
    assert Path("data/a.zip").read_bytes() == hub.body and os.listdir("data") == ["a.zip"]
    assert ranges(hub) == expected and all("Mozilla" in agent for _, _, agent in hub.seen)
    assert hub.pauses == [2, 8, 30][:len(expected) - 1]


@pytest.mark.parametrize("plan, requests, message", [
    ([404], 1, "no such file"), ([401], 1, "gated"), ([403], 1, "gated"), ([503] * 4, 4, "503"),
    (["cut", "cut", "cut", "cut"], 4, "bytes came|more expected")])
def test_failed_download_keeps_only_the_part(workdir, hub, plan, requests, message):
    """What came so far has another name, and the next call goes on from there."""
    hub.plan = list(plan)
    with pytest.raises(Failure, match=message) as error:
        prepare_data.download(f"{hub.url}/a.zip", Path("data/a.zip"))
    assert "\n" not in str(error.value) and len(hub.seen) == requests
    assert os.listdir("data") == (["a.zip.part"] if "cut" in plan else [])
    prepare_data.download(f"{hub.url}/a.zip", Path("data/a.zip"))
    assert ranges(hub)[-1] == (f"bytes={len(hub.body) * 15 // 16}-" if "cut" in plan else None)
    assert Path("data/a.zip").read_bytes() == hub.body and os.listdir("data") == ["a.zip"]


def test_part_that_had_come_whole(workdir, hub):
    """Killed between the last byte and the renaming."""
    Path("a.part").write_bytes(hub.body)
    prepare_data.download(f"{hub.url}/a", Path("a"))
    assert Path("a").read_bytes() == hub.body and ranges(hub) == [f"bytes={len(hub.body)}-"]
    Path("b.part").write_bytes(hub.body + b"more")  # of another file
    prepare_data.download(f"{hub.url}/b", Path("b"))
    assert Path("b").read_bytes() == hub.body


@pytest.mark.parametrize("size, sha256, tag", [
    (0, "0" * 64, None), (5, "", None), (0, "", "1" * 64)], ids=["SHA-256", "size", "the hub's"])
def test_other_bytes_than_expected(workdir, hub, size, sha256, tag):
    hub.headers = {"X-Linked-Etag": f'"{tag}"'} if tag else {}
    with pytest.raises(Failure, match="expected"):
        prepare_data.download(f"{hub.url}/a", Path("data/a"), size, sha256)
    assert os.listdir("data") == []


def test_short_body_is_noticed_without_urllib3(workdir, hub, monkeypatch):
    """Older versions of urllib3 do not compare the body with Content-Length."""
    requests = pytest.importorskip("requests")
    monkeypatch.setattr(requests.Response, "iter_content", lambda self, size: [b"half"])
    hub.plan = ["without_ranges"] * 4
    with pytest.raises(Failure, match="4 of 3,145,728 bytes"):
        prepare_data.download(f"{hub.url}/a", Path("data/a"))
    assert os.listdir("data") == ["a.part"]


def test_endpoint_and_proxy_are_honoured(workdir, hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}/mirror/")
    prepare_data.download(f"{prepare_data.HUB}/x/resolve/main/a", Path("a"))
    monkeypatch.delenv("HF_ENDPOINT")
    monkeypatch.setenv("HTTP_PROXY", hub.url)
    monkeypatch.setenv("http_proxy", hub.url)
    prepare_data.download("http://nowhere.invalid/b", Path("b"))
    assert [path for path, _, _ in hub.seen] == ["/mirror/x/resolve/main/a",
                                                 "http://nowhere.invalid/b"]
    assert Path("a").read_bytes() == Path("b").read_bytes() == hub.body


def zipped(files):
    """The bytes of a zip of {name: text}."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return file.getvalue()


def test_wikitext_is_downloaded_once(workdir, hub, monkeypatch):
    hub.body = zipped({f"wikitext-2/wiki.{name}.tokens": WIKITEXT
                       for name in ("train", "valid", "test")})
    url = f"{hub.url}/wikitext-2-v1.zip"
    monkeypatch.setitem(prepare_data.SOURCES, "wikitext2", ("", [(url, 0, "")]))
    prepare("wikitext2", "--vocab", "vocab.txt")
    prepare("wikitext2", "--vocab", "vocab.txt", "--force")
    corpus = prepare_data.Corpus("wikitext2")
    assert len(hub.seen) == 1 and corpus.meta["source"] == url
    monkeypatch.setitem(prepare_data.MIRRORS, f"{hub.url}/a.zip", f"{hub.url}/mirror/a.zip")
    hub.plan = [404]
    path, = prepare_data.fetch([(f"{hub.url}/a.zip", 0, "")])
    assert path.read_bytes() == hub.body and hub.seen[-1][0] == "/mirror/a.zip"
    assert sorted(os.listdir("data")) == ["downloads", "wikitext2"]


def test_glue_and_squad(workdir, hub, monkeypatch, capsys):
    """Downloaded, or from a folder as downloads or as these unpack to: the same official files."""
    hub.body = zipped({"SST-2/": "", "SST-2/train.tsv": "a\t1\n", "SST-2/dev.tsv": "b\t0\n",
                       "SST-2/original/raw.txt": "c", "__MACOSX/SST-2/._train.tsv": "d"})
    monkeypatch.setitem(prepare_data.GLUE, "SST-2", [(f"{hub.url}/SST-2.zip", 0, "")])
    expected = {"train.tsv": b"a\t1\n", "dev.tsv": b"b\t0\n", "original/raw.txt": b"c"}

    def found(folder):
        return {str(Path(name).relative_to(folder)): body
                for name, body in files(folder).items() if body is not False}

    prepare("glue", "SST-2")
    assert found("data/glue/SST-2") == expected and os.listdir("data/glue") == ["SST-2"]
    assert "exists already" not in capsys.readouterr().out
    prepare("glue", "SST-2")
    assert "exists already" in capsys.readouterr().out
    for place in ("data/downloads", "data/downloads/SST-2.zip"):
        prepare("glue", "SST-2", "--from", place, "--force")
        assert found("data/glue/SST-2") == expected
    del expected["original/raw.txt"]
    for place in ("data/glue/SST-2", "data/glue"):
        shutil.copytree("data/glue", "copy/data/glue", dirs_exist_ok=True)
        prepare("glue", "SST-2", "--from", f"copy/{place}", "--force")
        assert found("data/glue/SST-2") == expected
    assert len(hub.seen) == 1

    names = ["msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "mrpc_dev_ids.tsv"]
    for name in names:
        Path(name).write_text(name)
    prepare("glue", "MRPC", "--from", ".")
    assert found("data/glue/MRPC") == {name: name.encode() for name in names}
    hub.body = b"{}"
    monkeypatch.setitem(prepare_data.SOURCES, "squad", (
        "", [(f"{hub.url}/{split}-v1.1.json", 2, "") for split in ("train", "dev")]))
    prepare("squad")
    assert found("data/squad") == {"train-v1.1.json": b"{}", "dev-v1.1.json": b"{}"}

    Path("bad.zip").write_bytes(Path("data/downloads/SST-2.zip").read_bytes()[:-30])
    Path("out.zip").write_bytes(zipped({"a/../../../../train.tsv": "escaped"}))
    for args, words in ((["glue", "SST2"], "SST-2"), (["glue", "RTE", "--from", "."], "RTE.zip"),
                        (["glue", "RTE", "--from", "bad.zip"], "bad.zip: damaged"),
                        (["glue", "RTE", "--from", "out.zip"], "outside"),
                        (["glue", "RTE", "QNLI", "--from", "data/downloads/SST-2.zip"], "RTE.zip"),
                        (["glue", "RTE", "QNLI", "--from", "data/glue/SST-2"], "RTE.zip"),
                        (["squad", "--force", "--from", "data/glue"], "train-v1.1")):
        with pytest.raises(UserError, match=words):
            prepare(*args)
    assert sorted(os.listdir("data/glue")) == ["MRPC", "SST-2"]


def test_sources_are_complete():
    """Every file has a size and a checksum of the right form, but for those of the hub, which
    tells them, and every corpus of the command line has its sources."""
    sources = [files for _, files in prepare_data.SOURCES.values()]
    for url, size, sha256 in itertools.chain(*prepare_data.GLUE.values(), *sources):
        assert url.startswith("https://") and (
            url.startswith(prepare_data.HUB) or size > 0 and len(bytes.fromhex(sha256)) == 32)
    assert {"wikipedia", "bookcorpus", "pg19"} <= prepare_data.SOURCES.keys()
    assert [url[-29:] for url, _, _ in prepare_data.SOURCES["wikipedia"][1]][::40] == [
        f"/train-{n:05}-of-00041.parquet" for n in (0, 40)]


def test_corpora_are_downloaded(workdir, hub, monkeypatch):
    """Wikipedia's shards, BookCorpus's tar and, where that is gone, its copy, PG-19's books."""
    write_parquet("a.parquet", ["cat", "sat", "mat", "the mat"])
    hub.body = Path("a.parquet").read_bytes()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setitem(prepare_data.SOURCES, "wikipedia", ("", [
        (f"{prepare_data.HUB}/train-{n}.parquet", 0, "") for n in range(2)]))
    prepare("wikipedia", "--vocab", "vocab.txt")
    corpus = prepare_data.Corpus("wikipedia")
    assert corpus.meta["documents"] == {"train": 2, "val": 1, "test": 1}
    assert corpus.meta["duplicates"] == 4
    assert [path for path, *_ in hub.seen] == ["/train-0.parquet", "/train-1.parquet"]

    monkeypatch.setattr(prepare_data, "SENTENCES", 1)
    monkeypatch.setitem(prepare_data.SOURCES, "bookcorpus", ("", [(f"{hub.url}/b.tar.bz2", 0, "")]))
    bodies = {"/b.tar.bz2": b"", prepare_data.BOOKCORPUS_COPY.removeprefix(prepare_data.HUB):
              json.dumps([f"{prepare_data.HUB}/0.parquet"]).encode(), "/0.parquet": hub.body,
              "/list/test_files.txt": b"test/7.txt\ntest/8.txt\n", "/7.txt": b"cat\n\nsat\n",
              "/8.txt": b"mat\n"}
    answer = hub.answer
    def choose(handler):
        hub.body = bodies[handler.path]
        hub.plan = [404] if handler.path == "/b.tar.bz2" else []
        answer(handler)
    hub.answer = choose
    prepare("bookcorpus", "--vocab", "vocab.txt")
    corpus = prepare_data.Corpus("bookcorpus")
    assert words(corpus, "train") == ["cat", "sat"] and words(corpus, "test") == ["the mat"]

    monkeypatch.setitem(prepare_data.SOURCES, "pg19", ("", [(f"{hub.url}/list/test_files.txt", 0, "")]))
    monkeypatch.setattr(prepare_data, "PG19", f"{hub.url}/")
    prepare("pg19", "--vocab", "vocab.txt")
    pg19 = prepare_data.Corpus("pg19")
    assert words(pg19, "test") == ["cat sat", "mat"] and len(pg19.split("train")) == 0
    assert len(measure.heldout(pg19, "test", 4, 2, 8)) == 1
    with pytest.raises(UserError, match="too few"):
        measure.heldout(pg19, "val", 4, 2, 8)


def test_weights_are_downloaded_once(workdir, hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(prepare_data, "BERT_VOCAB", "")
    prepare("text", "a", "sample.txt", "--vocab", "vocab.txt")
    prepare("weights", "bert-base-uncased")
    prepare("weights", "bert-base-uncased")
    folder = "/google-bert/bert-base-uncased/resolve/main/"
    safe = importlib.util.find_spec("safetensors")
    names = ["config.json", "vocab.txt", "model.safetensors" if safe else "pytorch_model.bin"]
    assert [path for path, *_ in hub.seen] == [folder + name for name in names]
    assert sorted(os.listdir("data/weights/bert-base-uncased")) == sorted(names)
    Path("local").mkdir()
    for name in ("config.json", "vocab.txt", "pytorch_model.bin"):
        Path("local", name).write_text(name)
    prepare("weights", "distilbert-base-uncased", "--from", "local")
    assert sorted(os.listdir("data/weights/distilbert-base-uncased")) == sorted(os.listdir("local"))
    Path("local/config.json").unlink()
    for args, message in ((["roberta-base"], "RoBERTa's weights"), (["bert"], "bert-base-uncased"),
                          (["bert-large-uncased", "--from", "local"], "no config.json")):
        with pytest.raises(UserError, match=message):
            prepare("weights", *args)
    hub.plan = [401]
    with pytest.raises(Failure, match="gated"):
        prepare("weights", "bert-large-uncased")
    hub.seen.clear()
    Path("data/weights/bert-base-uncased/vocab.txt").write_bytes(Path("vocab.txt").read_bytes())
    Path("text").mkdir()
    for number in range(3):
        Path(f"text/{number}.txt").write_text(f"{'cat ' * number}sat")
    prepare("pg19", "--from", "text")  # BERT's vocabulary, which is there
    assert prepare_data.Corpus("pg19").vocab_size == len(PIECES) and not hub.seen


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertForQuestionAnswering"])
def test_heads_equal_hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = getattr(transformers, kind)(transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_labels=
        3 if "Sequence" in kind else 2, intermediate_size=64, max_position_embeddings=24)).eval()
    for name, p in theirs.named_parameters():  # so that every weight shows in the logits
        nn.init.normal_(p, float("norm" in name.lower() and "weight" in name), 0.4)
    config = tiny_bert(vocab_size=99, n_head=4, d_model=32, d_ff=64, max_len=24).bert.config
    ours = bert.Classifier(config, 3) if "Sequence" in kind else bert.SpanReader(config)
    weights, head = theirs.state_dict(), "classifier" if "Sequence" in kind else "qa_outputs"
    mapped = bert.from_huggingface(weights, config)
    mapped |= {f"head.{part}": weights[f"{head}.{part}"] for part in ("weight", "bias")}
    missing = ours.state_dict().keys() - bert.load_weights(ours, mapped, "theirs", partial=True)
    assert missing == (set() if "Sequence" in kind else {"bert.pooler.weight", "bert.pooler.bias"})
    ids, types = torch.randint(99, (3, 20)), torch.randint(2, (3, 20))
    mask = torch.arange(20) < torch.tensor([[20], [13], [5]])
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask.long(), token_type_ids=types)
        logits = ours.eval()(ids, mask, types)
    if "Sequence" in kind:
        assert expected.logits.std() > 0.5
        return torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-4)
    for mine, name in zip(logits.unbind(2), ("start_logits", "end_logits"), strict=True):
        assert expected[name].std() > 0.1
        torch.testing.assert_close(mine[mask], expected[name][mask], rtol=0, atol=1e-4)


def class_pairs():
    """(labels, predictions): random ones, and those that have no correlation or no class 1."""
    rng = np.random.default_rng(0)
    pairs = [rng.integers(0, 2, (2, n)) for n in (1, 2, 3, 7, 40, 500) for _ in range(5)]
    pairs += [(rng.integers(0, 2, 50), np.full(50, n)) for n in (0, 1)]
    constant = [(np.full(9, a), np.full(9, b)) for a in (0, 1) for b in (0, 1)]
    return pairs + [(b, a) for a, b in pairs] + constant


@pytest.mark.filterwarnings("ignore")
def test_class_metrics_equal_scikit_learns():
    theirs = pytest.importorskip("sklearn.metrics")
    for labels, predictions in class_pairs():
        for ours, name, more in [("accuracy", "accuracy_score", {}),
                                 ("f1", "f1_score", {"zero_division": 0}),
                                 ("matthews_correlation", "matthews_corrcoef", {})]:
            expected = getattr(theirs, name)(labels, predictions, **more)
            found = tasks.METRICS[ours](labels, predictions)
            assert type(found) is float and found == pytest.approx(expected, abs=1e-12), ours


@pytest.mark.filterwarnings("ignore")
def test_correlations_equal_scipys():
    """Also with ties, in constant input, and in values that rounding makes almost constant."""
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    pairs = [rng.normal(size=(2, n)) for n in (2, 3, 10, 300)]
    pairs += [rng.integers(0, 4, (2, n)).astype(float) for n in (5, 30, 300)]  # ties
    pairs += [(rng.integers(0, 26, 99) / 5, rng.normal(size=99)), (np.arange(9.0), np.arange(9.0)),
              (np.arange(9.0), -np.arange(9.0) ** 3), (np.ones(9), np.arange(9.0)),
              (np.arange(9.0), np.full(9, 0.1)), (np.ones(9), np.ones(9)),
              (1e6 + rng.normal(size=50), 1e-9 * rng.normal(size=50))]
    for x, y in pairs:
        for ours, theirs in [(tasks.pearson, stats.pearsonr), (tasks.spearmanr, stats.spearmanr)]:
            found = ours(x, y)
            assert type(found) is float
            assert found == pytest.approx(theirs(x, y).statistic, abs=1e-9, nan_ok=True)


def official_words(answer):
    """evaluate-v1.1.py's rules, read a second time: character by character."""
    words, word = [], ""
    for c in answer.lower() + " ":
        if ord(c) in (*range(33, 48), *range(58, 65), *range(91, 97), *range(123, 127)):
            continue
        if c.isspace():
            words, word = words + [word] * (word != ""), ""
        else:
            word += c
    return words


def official_scores(prediction, references):
    """An article is a word of its own, so without a letter, digit or _ at its sides."""
    def words(answer):
        found = []
        for word in official_words(answer):
            pieces = "".join(c if c.isalnum() or c == "_" else f" {c} " for c in word).split()
            kept = [p for p in pieces if p not in ("a", "an", "the")]
            if kept != pieces:  # what is left of a word around an article: "the–x" is "–x"
                found += "".join(" " if p in ("a", "an", "the") else p for p in pieces).split()
            else:
                found.append(word)
        return found

    exact, f1 = 0.0, 0.0
    for reference in references:
        ours, theirs = words(prediction), words(reference)
        exact = max(exact, float(ours == theirs))
        left, common = list(theirs), 0
        for word in ours:
            if word in left:
                left.remove(word)
                common += 1
        if common:
            precision, recall = common / len(ours), common / len(theirs)
            f1 = max(f1, 2 * precision * recall / (precision + recall))
    return 100 * exact, 100 * f1


SQUAD_CASES = [  # prediction, references
    ("The Denver Broncos!", ["Denver Broncos"]), ("Denver", ["Denver Broncos", "the Broncos"]),
    ("an apple a day", ["Apple, day", "apple day"]), ("", ["x"]), ("x", ["the"]), ("", ["a."]),
    ("U.S.", ["US", "u s"]), ("theatre", ["the atre"]), ("a an the", ["x"]), ("1,000", ["1000"]),
    ("café Ünïcode", ["Café ünïcode"]), ("the–end", ["–end"]), ("x the–a y", ["x – y"]),
    ("one  two\tthree\xa0four", ["one two three four"]), ("red red blue", ["red blue blue"]),
    ("“the” end", ["“ ” end"]), ("£5 a_b", ["£5", "a_b"]), ("he's", ["hes"]), ("it is", ["is it"])]


@pytest.mark.parametrize("prediction, references", SQUAD_CASES)
def test_squad_scores(prediction, references):
    question = tasks.Question("q", "?", 0, [(0, text) for text in references])
    found = tasks.score_squad([question], {"q": prediction})
    exact, f1 = official_scores(prediction, references)
    assert found == pytest.approx({"exact_match": exact, "f1": f1})


def test_squad_scores_are_means():
    """Known numbers: F1 of 2 words against 3 with 2 in common is 80, and of none 0."""
    questions = [tasks.Question(n, "?", 0, [(0, "big red dog")]) for n in "abcd"]
    said = {"a": "a big red dog.", "b": "red dog", "c": "", "d": "cat"}
    assert tasks.score_squad(questions, said) == pytest.approx({"exact_match": 25, "f1": 45})
    rng, words = random.Random(0), ["the", "a", "Red", "dog", "big", "!", "U.S."]
    for _ in range(200):
        texts = [" ".join(rng.choices(words, k=rng.randrange(5))) for _ in range(3)]
        question = tasks.Question("q", "?", 0, [(0, text) for text in texts[1:]])
        assert tuple(tasks.score_squad([question], {"q": texts[0]}).values()) == pytest.approx(
            official_scores(texts[0], texts[1:]))


@pytest.mark.skipif(not (SHARED / "squad").is_dir(), reason="no SQuAD on this machine")
def test_squad_gold_answers_come_back():
    """Scored, dev's first answers are all right; labelled in windows and mapped back, they and a
    tenth of train's are the text, but for those that end inside a token."""
    tokenizer = prepare_data.build_tokenizer(SHARED / "bert-vocab/vocab.txt")
    for split, every, n_windows in (("dev", 1, 10833), ("train", 10, None)):
        contexts, questions = tasks.read_squad(SHARED / f"squad/{split}-v1.1.json")
        kept = set(range(0, len(contexts), every))
        questions = [q for q in questions if q.context in kept]
        contexts = [text if n in kept else "" for n, text in enumerate(contexts)]
        gold = {q.id: q.answers[0][1] for q in questions}
        assert tasks.score_squad(questions, gold) == {"exact_match": 100, "f1": 100}
        found, fates = tasks.windows(tokenizer, contexts, questions, 384, 128)
        assert n_windows in (None, len(found.ids))
        labelled = found.labels[:, 0] > 0
        back = tasks.answers(found, np.where(labelled, 0, -np.inf), found.labels)
        wrong = {key for key, text in gold.items() if back[key] != text}
        assert wrong == {key for fate, keys in fates.items() if fate != "exact" for key in keys}
        assert 0 < len(wrong) < 0.005 * len(gold) and fates.keys() == {"exact", "cuts a token"}


FOX = "The Café's 1990s fox — \"Ünïcode\" — sat.  It sat on  the cat."


@pytest.fixture
def fox():
    words = "the cafe s 1990 ##s fox sat it on cat . ? \" '"
    return prepare_data.build_tokenizer([*prepare_data.SPECIALS, *words.split()])


@pytest.mark.parametrize("answer, fate", [
    ("Café's 1990s fox", "exact"), ("1990", "exact"), ("\"Ünïcode\" — sat.", "exact"),
    ("cat", "exact"), ("It sat on  the", "exact"), (FOX, "in no window whole"),
    ("1990s f", "cuts a token"), ("99", "cuts a token"), ("  ", "without a token")])
def test_answers_come_back_through_windows(fox, answer, fate):
    """Of 13 tokens, 7 of them the paragraph's, beginning 2 apart; the last one holds its end."""
    question = tasks.Question("q", "it sat?", 0, [(FOX.index(answer), answer)])
    found, fates = tasks.windows(fox, [FOX], [question], 13, 2)
    tokens = fox.encode(FOX).ids
    assert fates == {fate: ["q"]} and len(found.ids) == math.ceil((len(tokens) - 7) / 2) + 1
    seen = set()
    for n, ids in enumerate(found.ids):
        begin = found.begin[n]
        head = fox.encode("[CLS] it sat ? [SEP]").ids
        assert ids.tolist() == [*head, *tokens[begin:begin + 7], 3]
        seen.update(range(begin, begin + len(ids) - 6))
    assert seen == set(range(len(tokens)))
    labelled = np.flatnonzero(found.labels[:, 0])
    assert len(labelled) > 0 or fate not in ("exact", "cuts a token")
    for n in labelled:
        only = np.where(np.arange(len(found.ids)) == n, 0, -np.inf)
        assert found.labels[n, 1] < found.lengths[n] - 1  # not on the [SEP]
        assert (tasks.answers(found, only, found.labels)["q"] == answer) == (fate == "exact")
    question.answers = [(FOX.index(answer) + 1, answer)]
    found, fates = tasks.windows(fox, [FOX], [question], 13, 2, train=True)
    assert fates == {"not at its offset": ["q"]} and not found.ids


def test_a_window_steps_over_nothing_and_a_long_question_is_cut(fox):
    """The step is no more than what a window holds."""
    question = tasks.Question("q", "it " * 90, 0, [(0, "The")])
    found, _ = tasks.windows(fox, [FOX, ""], [question, dataclasses.replace(
        question, context=1)], 40, 128)
    assert all(ids[:22].tolist() == [2, *[12] * 20, 3] for ids in found.ids)
    assert found.begin.tolist() == [0, 17, 0] and found.question.tolist() == [0, 0, 1]
    assert len(found.ids[2]) == 23


def best_span_by_hand(logits, first, length, n=20, longest=30):
    """All pairs of one window, one by one."""
    places = range(first, length - 1)
    starts, ends = (sorted(places, key=lambda i: -logits[i, k])[:n] for k in (0, 1))
    pairs = [(float(logits[s, 0] + logits[e, 1]), s, e) for s in starts for e in ends
             if 0 <= e - s < longest]
    return max(pairs, default=(-math.inf, 0, 0))


@pytest.mark.parametrize("n, longest", [(20, 30), (3, 30), (5, 2), (1, 1)])
def test_best_spans(n, longest):
    torch.manual_seed(n)
    lengths, first = torch.tensor([40, 31, 12, 7, 6]), torch.tensor([5, 3, 9, 5, 5])  # last: empty
    logits = torch.randn(5, 40, 2, dtype=torch.float64)
    logits[0, 2] = logits[1, 30] = logits[2, 20] = 99  # in the question, its [SEP], the padding
    scores, spans = finetune.best_spans(logits, torch.arange(40) < lengths[:, None], first, n,
                                        longest)
    for row in range(5):
        score, *span = best_span_by_hand(logits[row], first[row].item(), lengths[row].item(), n,
                                         longest)
        assert scores[row].item() == pytest.approx(score)
        assert spans[row].tolist() == span or score == -math.inf
    assert scores[4] == -math.inf


def test_the_best_window_answers(fox):
    question = tasks.Question("q", "it?", 0, [(0, "The")])
    found, _ = tasks.windows(fox, [FOX], [question, dataclasses.replace(question, id="r")], 12, 7)
    of_q = np.flatnonzero(found.question == 0)
    scores, spans = np.full(len(found.ids), -np.inf), np.zeros((len(found.ids), 2), int)
    for n, score in zip(of_q, (1.0, 3.0, 2.0), strict=False):
        scores[n], spans[n] = score, found.first[n]  # the window's first token
    texts = tasks.answers(found, scores, spans)
    offsets = fox.encode(FOX).offsets[found.begin[of_q[1]]]
    assert texts == {"q": FOX[slice(*offsets)], "r": ""}


MRPC = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
SPLITS_OF = {  # the official layouts, a few rows each: split, content, the texts and labels in it
    "cola": [("train", 'gj04\t1\t\tThe "cat sat.\ngj04\t0\t*\tSat cat.\n',
              [(('The "cat sat.',), 1), (("Sat cat.",), 0)]),
             ("dev", "gj04\t1\t\tA cat\n", [(("A cat",), 1)]),
             ("test", "index\tsentence\n0\tcat\n", [(("cat",), None)])],
    "sst2": [("train", "sentence\tlabel\nhide new \t0\nit 's \"good\u2028\t1\n",
              [(("hide new ",), 0), (('it \'s "good\u2028',), 1)]),
             ("test", "index\tsentence\n0\tcat\n", [(("cat",), None)])],
    "mrpc": [("msr_paraphrase_train",
              f'{MRPC}\r\n1\t7\t8\tA\tB "q\r\n0\t8\t7\tC\tD\r\n1\t5\t6\tE\tF\r\n', None),
             ("mrpc_dev_ids", "8\t7\n", None),
             ("msr_paraphrase_test", f"{MRPC}\r\n1\t1\t2\tG\tH\r\n", None),
             ("train", None, [(("A", 'B "q'), 1), (("E", "F"), 1)]),
             ("dev", None, [(("C", "D"), 0)]), ("test", None, [(("G", "H"), None)])],
    "stsb": [("train", "index\tgenre\tsentence1\tsentence2\tscore\n0\tx\tA\tB\t3.800\n",
              [(("A", "B"), 3.8)]),
             ("test", "index\tgenre\tsentence1\tsentence2\n0\tx\tA\tB\n",
              [(("A", "B"), None)])],
    "qqp": [("train", ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
                       "1\t2\t3\tA?\tB?\t0\n4\t5\t6\tcut off\n7\t8\t9\tC?\tD?\t1\n"),
             [(("A?", "B?"), 0), (("C?", "D?"), 1)]),
            ("test", "id\tquestion1\tquestion2\n0\tA\tB\n", [(("A", "B"), None)])],
    "mnli": [("train", ("index\tsentence1\tsentence2\tlabel1\tgold_label\n"
                        "0\tA\tB\tneutral\tcontradiction"), [(("A", "B"), 0)]),
             ("dev_matched", ("index\tsentence1\tsentence2\tlabel1\tlabel2\tgold_label\n"
                              "0\tA\tB\tneutral\tneutral\tentailment"), [(("A", "B"), 1)]),
             ("dev_mismatched", "sentence1\tsentence2\tgold_label\nA\tB\tneutral\n",
              [(("A", "B"), 2)]),
             ("test_matched", "index\tsentence1\tsentence2\n0\tA\tB\n", [(("A", "B"), None)])],
    "qnli": [("dev", "index\tquestion\tsentence\tlabel\n0\tA?\tB.\tnot_entailment\n",
              [(("A?", "B."), 1)])],
    "rte": [("dev", "index\tsentence1\tsentence2\tlabel\n0\tA\tB\tentailment\n",
             [(("A", "B"), 0)])],
}


@pytest.mark.parametrize("name", SPLITS_OF)
def test_official_files(tmp_path, capsys, name):
    folder = tmp_path / "glue" / tasks.GLUE[name][0]
    folder.mkdir(parents=True)
    for split, content, _ in SPLITS_OF[name]:
        if content:
            ending = "txt" if split.startswith("msr") else "tsv"
            (folder / f"{split}.{ending}").write_bytes(content.encode())
    task = tasks.find(tasks.GLUE[name][0], tmp_path)
    assert task == tasks.find(name, tmp_path)
    for split, _, expected in SPLITS_OF[name]:
        if expected:
            rows = tasks.read(task, split)
            assert [(row.texts, row.label) for row in rows] == expected
    left_out = "train.tsv:3: 4 fields, expected 6; 1 of 3 rows left out"
    assert (left_out in capsys.readouterr().out) == (name == "qqp")
    if name == "mnli":
        assert task.dev == {"": "dev_matched", "_mm": "dev_mismatched"}
    if name == "mrpc":  # as GLUE's own script lays it out
        (folder / "dev.tsv").write_text(f"{MRPC}\n0\t1\t2\tX\tY\n", encoding="utf-8")
        assert [row.texts for row in tasks.read(task, "dev")] == [("X", "Y")]


@pytest.mark.skipif(not (SHARED / "glue").is_dir(), reason="no GLUE on this machine")
@pytest.mark.parametrize("name, folder, counts", [
    ("sst2", "SST-2", (67349, 872, 1821)), ("rte", "RTE", (2490, 277, 3000))])
def test_official_counts(name, folder, counts):
    task = tasks.find(name, SHARED)
    found = [tasks.read(task, split) for split in ("train", "dev", "test")]
    assert task.folder == SHARED / "glue" / folder and tuple(map(len, found)) == counts
    assert {row.label for row in found[0]} == {row.label for row in found[1]} == {0, 1}


@pytest.mark.parametrize("split, content, message", [
    ("train", "sentence\tlabel\na\tx\nb\tx\n", "train.tsv: every label is 'x'"),
    ("train", "sentence\tlabel\n", "train.tsv: no row"), ("train", "", "train.tsv:1: columns []"),
    ("train", "text\tlabel\na\tx\n", "train.tsv:1: columns ['text', 'label']"),
    ("train", "sentence\na\n", "train.tsv:1: columns ['sentence']"),
    ("train", "sentence\tlabel\n" + "a\tx\nb\ty\n" * 70 + "a\n" * 3,
     "train.tsv:142: 1 fields, expected 2 (3 of 143 rows are malformed)"),
    ("train", "sentence\tlabel\na\t \nb\t\n", "train.tsv:2: no label (2 of 2"),
    ("train", "sentence\tlabel\na\tx\ncaf\udce9\ty\n", "train.tsv:3: 0xe9 at byte 3"),
    ("train", "sentence\tscore\na\t1\nb\tnan\nc\thigh\n", "train.tsv:3: nan is no score (2 of 3"),
    ("dev", "sentence\tlabel\na\tx\n\nb\tz\n", "dev.tsv:4: label 'z' is none of x, y"),
    ("dev", "sentence\tlabel\na\tx\nb\n", "dev.tsv:3: 1 fields, expected 2"),
    ("dev", "sentence\tlabel\na\tb\tx\n", "dev.tsv:2: 3 fields, expected 2"),
    ("dev", "sentence\n", "dev.tsv:1: columns ['sentence']"), 
    ("dev", None, "dev.tsv: no such file"),
    ("test", "index\tsentence\n0\n", "test.tsv:2: 1 fields, expected 2"),
    ("test", "index\ttext\n0\ta\n", "test.tsv:1: columns ['index', 'text']")])
def test_a_malformed_tsv(tmp_path, split, content, message):
    good = {"train": "sentence\tlabel\na\tx\nb\ty\n"}
    for name, text in {**good, split: content}.items():
        if text is not None:
            (tmp_path / f"{name}.tsv").write_bytes(text.encode(errors="surrogateescape"))
    task = tasks.find(str(tmp_path))
    with pytest.raises(UserError) as error:
        for name in dict.fromkeys(["train", split]):
            tasks.read(task, name)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(str(tmp_path))


def test_an_official_label_is_not_learned_from_a_typing_error(tmp_path, capsys):
    (tmp_path / "glue/RTE").mkdir(parents=True)
    rows = ["0\ta\tb\tentailment", "1\ta\tb\tentailmnt", "2\ta\tb\tnot_entailment"]
    (tmp_path / "glue/RTE/train.tsv").write_text("\n".join([
        "index\tsentence1\tsentence2\tlabel", *rows]))
    assert [row.label for row in tasks.read(tasks.find("rte", tmp_path), "train")] == [0, 1]
    assert "train.tsv:3: label 'entailmnt' is none of" in capsys.readouterr().out


@pytest.mark.parametrize("name, message", [
    ("rte", "python prepare_data.py glue RTE"), ("squad", "python prepare_data.py squad"),
    ("nowhere", "expected docs, squad, cola,")])
def test_a_missing_task(tmp_path, name, message):
    with pytest.raises(UserError) as error:
        tasks.find(name, tmp_path)
    assert message in str(error.value)


def test_a_folder_of_ones_own_may_have_an_official_name(tmp_path):
    (tmp_path / "rte").mkdir()
    task = tasks.find(str(tmp_path / "rte"), tmp_path)
    assert task.folder == tmp_path / "rte" and task.name == "own_rte" and task.labels is None


def squad_file(path):
    qas = [{"id": f"q{n}", "question": "no cat ?", "answers": [{"answer_start": 4, "text": "cat"}]}
           for n in range(2)]
    data = {"version": "1.1", "data": [{"title": "t", "paragraphs": [
        {"context": "the cat saw the dog . " * 6, "qas": qas}]}]}
    path.write_text(json.dumps(data, indent=1))
    return data


def test_a_malformed_squad_file(tmp_path):
    path = tmp_path / "train-v1.1.json"
    data = squad_file(path)
    text, question = path.read_text(), data["data"][0]["paragraphs"][0]["qas"][1]
    cases = [(text[:300], f"{path}:{text[:300].count(chr(10)) + 1}: truncated or damaged"),
             ("[]", "not a file of SQuAD 1.1"), ("\xff", "not a file of SQuAD 1.1")]
    for change, message in [(lambda: question.update(answers=[]), "question q1 has no answer"),
                            (lambda: question.pop("answers"), "after question q0: KeyError")]:
        change()
        cases.append((json.dumps(data), message))
    for content, message in cases:
        path.write_bytes(content.encode("latin-1"))
        with pytest.raises(UserError) as error:
            tasks.read_squad(path)
        assert message in str(error.value) and "\n" not in str(error.value)


def test_encode_cuts_the_longer_text(fox):
    def encoded(*texts, max_len):
        found = tasks.encode(fox, [tasks.Row(1, texts, 0)], max_len)
        return found.ids[0].tolist(), found.first.tolist()

    fox.encode_special_tokens = True
    cat, sat, it = (fox.token_to_id(word) for word in ("cat", "sat", "it"))
    assert encoded("cat sat", max_len=9) == ([2, cat, sat, 3], [4])
    assert encoded("cat " * 9, max_len=5) == ([2, *[cat] * 3, 3], [5])
    assert encoded("cat " * 9, "sat", max_len=8) == ([2, *[cat] * 4, 3, sat, 3], [6])
    assert encoded("cat", "sat " * 9, max_len=8) == ([2, cat, 3, *[sat] * 4, 3], [3])
    assert encoded("cat " * 5, "sat " * 4, max_len=8) == ([2, *[cat] * 3, 3, sat, sat, 3], [5])
    assert encoded("", "sat", max_len=8) == ([2, 3, sat, 3], [2])
    assert encoded("[SEP] it", max_len=9) == ([2, 1, 1, 1, it, 3], [6])  # text, not the token
    rows = [tasks.Row(1, ("cat", "sat it"), 0), tasks.Row(2, ("it", "sat"), 1)]
    both = tasks.encode(fox, rows, 9)
    ids, types, lengths = both.pad(np.array([1, 0]), 7, 4)
    assert ids.tolist() == [[2, it, 3, sat, 3, 7, 7, 7], [2, cat, 3, sat, it, 3, 7, 7]]
    assert types.tolist() == [[0] * 3 + [1] * 5] * 2 and lengths.tolist() == [5, 6]


def test_batches_are_of_one_length_and_complete():
    lengths = np.random.default_rng(0).integers(3, 128, 5003)
    found = [tasks.batches(lengths, 16, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    for batches in (*found, tasks.batches(lengths, 16)):
        assert sorted(np.concatenate(batches).tolist()) == list(range(5003))
        assert collections.Counter(map(len, batches)) == {16: 312, 11: 1}
        padding = sum(len(b) * lengths[b].max() for b in batches) / lengths.sum() - 1
        assert padding < 0.05
    assert [b.tolist() for b in found[0]] == [b.tolist() for b in found[1]]
    assert {tuple(b) for b in found[0]}.isdisjoint({tuple(b) for b in found[2]})
    longest = [lengths[b].max() for b in found[0]]
    assert np.corrcoef(np.arange(len(longest)), longest)[0, 1] < 0.2  # no order in time


@pytest.fixture
def tuned(place):
    """A pretrained tiny model with memory, a task of one's own and tune.py."""
    assert train("--max_steps=4", "--eval_interval=100") == 0
    rng, vocabulary = random.Random(1), Path("tiny.txt").read_text().split()[6:]
    for name, columns in (("own", "sentence\tlabel"), ("pairs", "sentence1\tsentence2\tscore")):
        for split, n in (("train", 200), ("dev", 30), ("test", 7)):
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
    Path("tune.py").write_text("task = 'own'\ninit_from = 'out/tiny'\nmax_len = 32\nepochs = 3\n"
                               "batch_size = 8\nlr = 5e-3\nvalue_lr = 1e-2\nlog_interval = 5\n"
                               "checkpoint_interval = 5\ndevice = 'cpu'\n")
    return place


def tune(*args):
    return finetune.main(["tune.py", *args])


def scores(run):
    return json.loads(Path(run, "eval_results.json").read_text())


def test_a_fine_tuned_run_leaves_what_it_promises(tuned, capsys):
    assert tune("--seeds=3", "--out=out/run") == 0
    run = Path("out/run/seed1")
    assert sorted(p.name for p in run.iterdir()) == [
        "best", "config.json", "eval_results.json", "log.jsonl", "predictions.tsv", "step_000075",
        "submission", "vocab.txt"]
    each = [scores(f"out/run/seed{n}") for n in range(3)]
    assert len({str(result) for result in each}) > 1  # seeds matter
    for seed, result in enumerate(each):
        evaluations = {r["epoch"]: r["accuracy"] for r in log(f"out/run/seed{seed}")
                       if "accuracy" in r}
        assert list(evaluations) == [1, 2, 3] and result["eval_samples"] == 30
        assert result["eval_accuracy"] == max(evaluations.values())
        assert result["epoch"] == max(evaluations, key=evaluations.get)
        assert (result["last_epoch"], result["last_accuracy"]) == (3, evaluations[3])
    summary = scores("out/run")
    assert summary["eval_accuracy"] == sorted(r["eval_accuracy"] for r in each)[1] > 0.7
    assert list(summary["seeds"].values()) == each
    assert "median of 3: accuracy" in capsys.readouterr().out

    gold = [line.split("\t")[1] for line in Path("own/dev.tsv").read_text().splitlines()[1:]]
    lines = Path(run, "predictions.tsv").read_text().splitlines()
    found = [line.split("\t") for line in lines[1:]]
    assert lines[0] == "index\tprediction" and [n for n, _ in found] == [str(n) for n in range(30)]
    right = [a == b for (_, a), b in zip(found, gold, strict=True)]
    assert np.mean(right) == each[1]["eval_accuracy"]
    submitted = Path(run, "submission/own.tsv").read_text().splitlines()
    assert len(submitted) == 8 and {line.split("\t")[1] for line in submitted[1:]} <= {
        "animal", "none"}
    saved = torch.load(run / "step_000075/model.pt", weights_only=True)
    assert saved["head"] == "classifier" and saved["labels"] == ["animal", "none"]
    assert type(bert.load_model(run / "best")) is bert.Classifier
    assert saved["config"]["memory_layers"] == (2, 3)

    before = files()
    assert tune("--seeds=3", "--out=out/run") == 0 and files() == before  # it was done


def test_the_best_epoch_counts(tuned, monkeypatch):
    """Of equals the first; nan is worse than any."""
    values = iter([math.nan, 0.5, 0.7, 0.7, 0.6] + [0.7])
    weights, evaluate = [], finetune.Trainer.evaluate

    def fake(trainer):
        weights.append(trainer.model.head.weight.detach().clone())
        return {"accuracy": next(values)}, evaluate(trainer)[1]

    monkeypatch.setattr(finetune.Trainer, "evaluate", fake)
    assert tune("--epochs=5", "--train_examples=16", "--out=out/run") == 0
    assert scores("out/run/seed0")["epoch"] == 3
    assert torch.equal(weights[5], weights[2]) and not torch.equal(weights[5], weights[4])


def test_regression_and_frozen_values(tuned):
    """A score's column makes a regression; update_memory = False keeps the value tables."""
    for update in (True, False):
        assert tune("--task=pairs", f"--update_memory={update}") == 0
        run = Path(f"out/tiny_pairs{'' if update else '_fixed'}/seed0")
        weights = [torch.load(path / "model.pt", weights_only=True)["weights"] for path in
                   (Path("out/tiny/step_000004"), run / "step_000075")]
        for name in weights[0].keys() & weights[1].keys():
            same = torch.equal(weights[0][name], weights[1][name])
            assert same == ("values" in name and not update), name
    result = scores(run)
    assert result["eval_pearson"] > 0.2 and -1 <= result["eval_spearmanr"] <= 1
    assert torch.load(run / "best/model.pt", weights_only=True)["labels"] == []


def test_submitted_scores_are_possible_ones(tuned, monkeypatch):
    """Inside the range of the training data's, whatever the model says."""
    def column(path):
        lines = Path("out/tiny_pairs/seed0", path).read_text().splitlines()[1:]
        return [float(line.split("\t")[-1]) for line in lines]

    monkeypatch.setattr(finetune.Trainer, "predict",
                        lambda trainer, examples: np.linspace(-99, 99, len(examples.ids)))
    assert tune("--task=pairs", "--max_steps=1") == 0
    assert (min(column("predictions.tsv")), max(column("predictions.tsv"))) == (-99, 99)
    found = column("submission/pairs.tsv")
    assert len(found) == 7 and (min(found), max(found)) == (0, 3)


def test_squad_is_learned_by_heart(tuned, capsys):
    """Two questions with the same answer, in windows; another one is not where it should be."""
    args = ["--task=squad", "--max_len=24", "--doc_stride=8", "--dropout=0", "--max_steps=60"]
    assert tune(*args) == 0
    result, run = scores("out/tiny_squad/seed0"), Path("out/tiny_squad/seed0")
    assert (result["eval_f1"], result["eval_exact_match"], result["eval_samples"]) == (100, 100, 2)
    assert json.loads((run / "predictions.json").read_text()) == {"q0": "cat", "q1": "cat"}
    assert torch.load(run / "best/model.pt", weights_only=True)["head"] == "span"
    assert type(bert.load_model(run / "best")) is bert.SpanReader
    data = squad_file(Path("data/squad/train-v1.1.json"))
    data["data"][0]["paragraphs"][0]["qas"][1]["answers"][0]["answer_start"] = 5
    Path("data/squad/train-v1.1.json").write_text(json.dumps(data))
    capsys.readouterr()
    assert tune(*args[:3], "--max_steps=1", "--out=out/other") == 0
    assert "labels 1 exact, 1 not at its offset (the first: q1)" in capsys.readouterr().out


def test_padding_changes_no_prediction_and_no_loss(tuned):
    """Neither the loss of classes nor that of spans, in training mode, nor what is learned."""
    config = finetune.Config(task="squad", max_len=24, doc_stride=8, dropout=0.0, batch_size=4)
    tokenizer = prepare_data.build_tokenizer(Path("out/tiny/vocab.txt"))
    data = finetune.Data(tasks.find("squad"), tokenizer, config)
    sizes = bert.BertConfig(**{**bert.load_file("out/tiny/step_000004/model.pt")["config"],
                               "dropout": 0.0})
    results, pad = [], data.train.pad
    index = np.array([0, len(data.train.ids) // 2 - 1])  # the first window, and a short one
    assert len(set(data.train.lengths[index])) == 2
    for multiple, pad_id in ((1, 0), (16, 9)):
        torch.manual_seed(0)
        trainer = finetune.Trainer(config, data, bert.SpanReader(sizes).double(),
                                   torch.device("cpu"), torch.float32)
        data.train.pad = lambda index, _, __, m=multiple, p=pad_id: pad(index, p, m)
        data.pad_id = pad_id
        logits, mask = trainer.forward(trainer.model, data.train, index)
        loss = finetune.loss_of(logits.double(), torch.from_numpy(data.train.labels[index]), mask)
        loss.backward()
        results.append([loss, *(p.grad for p in trainer.model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 20
    for ours, padded in zip(*results, strict=True):
        torch.testing.assert_close(ours, padded, rtol=1e-4, atol=1e-6)  # logits are float32


def assert_same_tuning(run, reference):
    def timeless(path):
        return [{k: v for k, v in r.items() if k not in ("examples_per_s", "elapsed")}
                for r in log(path)]

    assert_same(timeless(run), timeless(reference), "log")
    assert scores(run) == scores(reference)
    ours, theirs = (Path(path, "predictions.tsv").read_bytes() for path in (run, reference))
    assert ours == theirs
    for name in (f"{bert.find_checkpoint(reference).name}/{part}.pt" for part in
                 ("model", "optimizer")):
        assert_same(*(torch.load(Path(p, name), weights_only=True) for p in (run, reference)), name)


def test_a_killed_fine_tuning_ends_as_if_it_had_not_been(tuned):
    """SIGKILL at random moments: in steps, in evaluations, while something is written."""
    args = ["--epochs=8", "--checkpoint_interval=2", "--train_examples=64"]
    assert tune(*args, "--out=out/whole") == 0
    rng, kills = random.Random(), 0
    while not Path("out/killed/seed0/eval_results.json").exists() and kills < KILLS / 2:
        before = steps_saved("out/killed/seed0")
        with subprocess.Popen([sys.executable, str(ROOT / "finetune.py"), "tune.py", *args,
                               "--out=out/killed"], stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE) as process:
            while process.poll() is None and steps_saved("out/killed/seed0") == before:
                time.sleep(0.002)
            time.sleep(rng.random() * 0.15)
            process.kill()
        assert process.returncode in (0, -signal.SIGKILL), process.stderr
        kills += 1
    assert kills > 1
    assert tune(*args, "--out=out/killed") == 0
    assert_same_tuning("out/killed/seed0", "out/whole/seed0")
    assert not list(Path("out/killed").rglob(".tmp_*"))


@pytest.mark.parametrize("at", [1, 8, 24])  # the end of an epoch, and of the first seed
def test_a_signal_saves_and_fine_tuning_goes_on(tuned, monkeypatch, capsys, at):
    step, args = finetune.Trainer.step, ["--seeds=2", "--train_examples=64"]

    def interrupted(trainer, n):
        if n == at - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, n)

    with monkeypatch.context() as patch:
        patch.setattr(finetune.Trainer, "step", interrupted)
        assert tune(*args) == 128 + signal.SIGTERM
    assert steps_saved("out/tiny_own/seed0") == at and not Path("out/tiny_own/seed1").exists()
    assert f"python finetune.py tune.py {' '.join(args)}" in capsys.readouterr().out
    assert tune(*args) == 0
    assert tune(*args, "--out=out/whole") == 0
    for seed in ("seed0", "seed1"):
        assert_same_tuning(f"out/tiny_own/{seed}", f"out/whole/{seed}")


def test_bfloat16_fine_tuning(tuned):
    """Another program, nearly the same losses."""
    found = []
    for dtype in ("float32", "bfloat16"):
        assert tune("--dropout=0", "--epochs=1", f"--out=out/{dtype}", f"--dtype={dtype}") == 0
        found.append([r["loss"] for r in log(f"out/{dtype}/seed0") if "loss" in r])
    assert found[0] == pytest.approx(found[1], abs=0.05) and found[0] != found[1]


@pytest.mark.parametrize("args, words", [
    (["--task="], ["expected docs"]), (["--task=nothing"], ["nothing", "expected docs, squad"]),
    (["--task=rte"], ["data/glue/RTE", "prepare_data.py glue RTE"]),
    (["--init_from="], ["init_from"]), (["--init_from=out/none"], ["out/none", "no weights"]),
    (["--max_len=500"], ["max_len", "500", "128"]), (["--epochs=0"], ["epochs"]),
    (["--compile=maybe"], ["compile", "'maybe'"]), (["--seeds=0"], ["seeds"]),
    (["--learning_rate=1"], ["'learning_rate'"])])
def test_a_wrong_fine_tuning_is_one_line(tuned, capsys, args, words):
    before = files()
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        configs.run(lambda: tune(*args))
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert all(word in error for word in words) and files() == before, error


def test_other_settings_are_another_fine_tuning(tuned):
    assert tune("--max_steps=2") == 0
    with pytest.raises(UserError, match="lr = 0.005, not 0.002"):
        tune("--max_steps=2", "--lr=2e-3")


def test_recipes_of_fine_tuning(capsys):
    """Table 3."""
    recipes = {p.stem: configs.load(finetune.Config, [str(p)])
               for p in sorted(ROOT.glob("configs/*finetune*.py"))}
    assert recipes.keys() == {"demo_finetune", "finetune_glue", "finetune_squad"}
    for name, values in {"finetune_squad": (5e-5, 3, 0.06, 0.01, 384),
                         "finetune_glue": (2e-5, 10, 0.06, 0.1, 128)}.items():
        c = recipes[name]
        assert (c.lr, c.epochs, c.warmup, c.weight_decay, c.max_len) == values
        assert (c.batch_size, c.value_lr, c.dropout, c.update_memory) == (32, 1e-3, 0.1, True)
    assert recipes["finetune_squad"].doc_stride == 128
    demo = recipes["demo_finetune"]
    assert (demo.task, demo.init_from) == ("docs", "out/demo")


def test_the_task_of_docs(workdir, monkeypatch):
    files = [(package, [f"First of {package}\nline {n}.\n\nMore.", f"{package}'s tab\there {n}."])
             for n in range(20) for package in ("Python", "torch")]
    monkeypatch.setattr(prepare_data, "_read_docs", lambda: ("somewhere", files))
    task = tasks.find("docs")
    rows = tasks.read(task, "train")
    assert task.labels == ["Python", "torch"] and len(rows) == 72
    assert [(row.texts, row.label) for row in rows[:3]] == [
        (("First of Python line 0.",), 0), (("Python's tab here 0.",), 0),
        (("First of torch line 0.",), 1)]
    assert [row.texts[0] for row in tasks.read(task, "dev")] == [
        "First of Python line 9.", "Python's tab here 9.", "First of Python line 19.",
        "Python's tab here 19."]
    assert [row.label for row in tasks.read(task, "test")] == [None] * 4


def test_glue_prints_the_papers_columns(workdir, capsys):
    """Medians, Table 4's average, and what is missing as missing."""
    paper = {"squad": {"exact_match": 83.9, "f1": 90.8},
             "mnli": {"accuracy": 0.86, "accuracy_mm": 0.858}, "qqp": {"accuracy": 0.914, "f1": 0.9},
             "QNLI": {"accuracy": 0.904}, "SST-2": {"accuracy": 0.94},
             "cola": {"matthews_correlation": 0.641, "accuracy": 0.8}}
    for system, most in (("out/f", 6), ("out/g", 5)):
        for updated in (True, False):
            for task, results in list(paper.items())[:most if updated else 1]:
                for seed, shift in ((0, 0), (1, -0.1), (2, 0.05)):
                    folder = Path(f"{system}_{task}{updated}", f"seed{seed}")
                    folder.mkdir(parents=True)
                    settings = {"init_from": system, "update_memory": updated, "task": task,
                                "seed": seed, "tokenizer_hash": "", "init_checkpoint": "",
                                "first_step": 0}
                    (folder / "config.json").write_text(json.dumps(settings))
                    (folder / "eval_results.json").write_text(json.dumps(
                        {f"eval_{key}": value + shift for key, value in results.items()}))
    measure.main(["glue", *map(str, sorted(Path("out").iterdir())), "--out", "table4"])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]]
            for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert rows[0] == ["initial model", "memory update", "seeds", "SQuAD 1.1 (EM/F1)",
                       "MNLI-(m/mm)", "QQP", "QNLI", "SST-2", "CoLA (Matt)", "Avg"]
    cells = ["83.9/90.8", "86.0/85.8", "91.4", "90.4", "94.0", "64.1", "85.3"]
    found = {tuple(row[:3]): row[3:] for row in rows[2:]}
    assert found == {("out/f", "Y", "3"): cells, ("out/g", "Y", "3"): [*cells[:5], "-", "-"],
                     **{(f"out/{name}", "N", "3"): [cells[0], *"------"] for name in "fg"}}
    assert json.loads(Path("table4.json").read_text())[0]["seeds"]["mnli"].keys() == {"0", "1", "2"}
    (folder.parent / "seed3").mkdir()
    with pytest.raises(UserError, match="out: no fine-tuned run"):
        measure.main(["glue", "out"])


def test_distances_of_classes():
    rng = np.random.default_rng(0)
    positive, negative = rng.integers(0, 9, (2, 50))
    found = measure.class_distances(positive, 3 * negative)
    p, q = positive / positive.sum(), negative / negative.sum()
    assert found["iou"] == pytest.approx(sum(map(min, p, q)) / sum(map(max, p, q)))
    p, q = (positive + 1) / (positive + 1).sum(), (3 * negative + 1) / (3 * negative + 1).sum()
    assert found["kl"] == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    assert measure.class_distances(positive, positive) == pytest.approx({"kl": 0, "iou": 1})
    apart = measure.class_distances(np.array([1000, 0]), np.array([0, 7]))
    assert apart["iou"] == 0 and apart["kl"] == pytest.approx(
        1001 / 1002 * math.log(1001 / 1002 * 9) + math.log(9 / 8 / 1002) / 1002)


def test_usage_on_a_task(tuned, capsys):
    """Table 6 and Figure 4 count the reads of the real tokens of the best model, and no more."""
    pytest.importorskip("matplotlib")
    assert tune("--epochs=2") == 0
    run = Path("out/tiny_own")
    capsys.readouterr()
    measure.main(["table", str(run), "--out", "table6"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()
            if line.startswith("| out")]
    assert [cell.strip() for cell in rows[0][2:5]] == ["own", "200", "2/3"]

    tokenizer = prepare_data.build_tokenizer(Path("out/tiny/vocab.txt"))
    rows = [line.split("\t") for line in Path("own/train.tsv").read_text().splitlines()[1:]]
    expected = {label: [0, 0] for label in ("animal", "none")}
    before = {label: [0, 0] for label in expected}
    for place, counts in ((run / "seed0/best", expected), ("out/tiny", before)):
        model, top1 = bert.load_model(bert.find_weights(place)[0]).eval(), {}
        with measure.watch(model, lambda n, slots, _, top1=top1: top1.update({n: slots[..., 0]})):
            for text, label in rows:
                model.bert(torch.tensor([tokenizer.encode(f"[CLS] {text} [SEP]").ids]))
                for i, n in enumerate((2, 3)):
                    counts[label][i] = counts[label][i] + top1[n].flatten().bincount(minlength=64)
    layers = json.loads(Path("table6.json").read_text())[0]["layers"]
    for i, n in enumerate(("2", "3")):
        both = expected["animal"][i] + expected["none"][i]
        assert layers[n]["top1_mu"] == (both > 0).float().mean()
        assert layers[n]["accesses"] == both.sum()

    measure.main(["by_class", str(run / "seed0"), "out/tiny", "--data", "own", "--out", "figure4"])
    found = json.loads(Path("figure4.json").read_text())
    assert [(own["run"], own["when"], own["layer"]) for own in found] == [
        (str(run / "seed0"), "before", 2), (str(run / "seed0"), "before", 3),
        (str(run / "seed0"), "after", 2), (str(run / "seed0"), "after", 3),
        ("out/tiny", "before", 2), ("out/tiny", "before", 3)]
    for own in found:
        counts = expected if own["when"] == "after" else before
        none, animal = (counts[label][own["layer"] - 2].numpy() for label in ("none", "animal"))
        reference = measure.class_distances(none, animal)  # class 1 is "none"
        assert (own["kl"], own["iou"]) == pytest.approx((reference["kl"], reference["iou"]), rel=0.02)
        assert own["accesses"] == [none.sum(), animal.sum()]
    assert Path("figure4.png").read_bytes()[1:4] == b"PNG"
    for args, message in [(["by_class", "out/tiny"], "--data TASK"),
                          (["by_class", str(run), "--data", "pairs"], "pairs has 0 classes"),
                          (["table", "out/tiny", str(run)], "table takes runs of pretraining"),
                          (["table", "out/tiny"], "table takes runs of pretraining"),
                          (["glue", "out/tiny"], "no fine-tuned run")]:
        with pytest.raises(UserError, match=message):
            measure.main(args)
