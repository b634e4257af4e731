"""
Slot usage and perplexity, against section 3.2 read by read and plain loops in float64.
"""
import math

import numpy as np
import pytest
import torch
from torch import nn

from lib.corpus import Corpus, masked_heldout
from lib.training import evaluate_language_model
from lib.usage import count_reads, record_reads, usage_metrics, watch_reads
from model import value_tables
from pkm import PKM
from tests.helpers import tiny_bert

CPU = torch.device("cpu")


def spread_weights(model, std=0.5):
    """Make a model whose predictions differ."""
    for p in model.parameters():
        nn.init.normal_(p, std=std)
    return model.eval()


def search_all_slots(memory, hidden):
    """Find what a memory reads for (tokens, d_model) hidden states, by the scores of all slots."""
    tokens = len(hidden)
    heads, _, _, half = memory.keys.shape
    query = memory.query_norm(memory.query(hidden)).view(tokens, heads, 2, half)
    first, second = (torch.einsum("thd,hkd->thk", query[:, :, n], memory.keys[:, n])
                     for n in (0, 1))
    scores = (first[..., :, None] + second[..., None, :]).flatten(2)  # slot = n_keys * i + j
    best = scores.topk(memory.topk)
    return best.indices, best.values.softmax(2)


def metrics_read_by_read(slots, weights, n_slots):
    """Compute section 3.2 in plain Python. slots, weights: (tokens, heads, topk)."""
    slots, weights = slots.flatten(0, 1).tolist(), weights.flatten(0, 1).tolist()
    read, top1, weight, effective_k = [0] * n_slots, [0] * n_slots, [0.0] * n_slots, 0.0
    for access, shares in zip(slots, weights, strict=True):
        top1[access[0]] += 1
        effective_k += math.prod(share ** -share for share in shares)
        for slot, share in zip(access, shares, strict=True):
            read[slot] += 1
            weight[slot] += share

    def kl(counts):
        total = sum(counts)
        return sum(c / total * math.log(c / total * n_slots) for c in counts if c)

    return {"mu": sum(map(bool, read)) / n_slots, "top1_mu": sum(map(bool, top1)) / n_slots,
            "kl_u": kl(read), "kl_w": kl(weight), "effective_k": effective_k / len(slots),
            "accesses": len(slots)}, read, top1, weight


@torch.no_grad()
def test_counts_are_those_of_a_search_over_all_slots():
    """With and without a mask; padding is not counted."""
    model = tiny_bert(memory_layers=(1,), n_layer=1).eval()
    memory, x = model.bert.layers[0].memory, torch.randn(5, 7, 8)
    for mask in (None, torch.arange(7) < torch.tensor([7, 5, 1, 6, 2])[:, None]):
        with count_reads({1: memory.values}) as counts:
            memory(x, mask)
        real = x.flatten(0, 1) if mask is None else x[mask]
        expected, read, top1, weight = metrics_read_by_read(*search_all_slots(memory, real), 16)
        assert counts[1]["read"].tolist() == read
        assert counts[1]["top1"].tolist() == top1
        assert counts[1]["weight"] == pytest.approx(weight, rel=1e-5)
        found = usage_metrics(**counts[1])
        assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)


def test_uniform_usage_is_that_of_random_slots():
    rng, n_slots, topk, accesses = np.random.default_rng(0), 64, 4, 20
    shares = []
    for _ in range(2000):
        slots = np.array([rng.choice(n_slots, topk, replace=False) for _ in range(accesses)])
        read = np.bincount(slots.ravel(), minlength=n_slots)
        top1 = np.bincount(slots[:, 0], minlength=n_slots)
        shares.append([(read > 0).mean(), (top1 > 0).mean()])
    m = usage_metrics(read, top1, read, effective_k=1)
    assert [m["mu_uniform"], m["top1_mu_uniform"]] == pytest.approx(np.mean(shares, 0), abs=0.005)


def plain_loss(model, batches):
    """Return loss, accuracy and number of all predicted positions, one by one in float64."""
    losses, right = [], []
    for batch in batches:
        for ids, positions, labels in zip(batch["ids"], batch["positions"], batch["labels"],
                                          strict=True):
            with torch.no_grad():
                scores = model(torch.tensor(ids)[None])[0].double()
            for position, label in zip(positions, labels, strict=True):
                if label != -100:
                    losses.append(-scores[position].log_softmax(0)[label].item())
                    right.append(scores[position].argmax().item() == label)
    return np.mean(losses), np.mean(right), len(losses)


def test_masked_perplexity_is_that_of_a_plain_loop(place):
    """On a whole split, its shorter end included, in batches of any size."""
    corpus = Corpus("tiny")
    model = spread_weights(tiny_bert(memory_layers=(2,), vocab_size=corpus.vocab_size))
    batches = masked_heldout(corpus, "test", 16, 8)
    assert batches[-1]["ids"].shape[1] < 16
    loss, accuracy, number = plain_loss(model, batches)
    for size in (1, 5, 1000):
        results, counts = evaluate_language_model(model, masked_heldout(corpus, "test", 16, size),
                                                  CPU)
        assert results["loss"] == pytest.approx(loss, rel=1e-5)
        assert results["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        assert (results["accuracy"], results["predicted_tokens"]) == (accuracy, number)
        real = sum(batch["ids"].size for batch in batches)
        assert results["layers"][2]["accesses"] == counts[2]["top1"].sum() == 2 * real


def test_a_loss_of_bfloat16_logits_is_in_float32(place):
    """The perplexity of a bad model is large, but a number."""
    batch = masked_heldout(Corpus("tiny"), "test", 16, 8)[0]
    ids, positions, labels = (torch.from_numpy(batch[key]) for key in batch)
    for std in (2, 100):
        model = spread_weights(tiny_bert(), std)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = model(ids, positions=positions).double()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
        results, _ = evaluate_language_model(model, [batch], CPU, torch.bfloat16)
        assert loss > 7 and results["loss"] == pytest.approx(loss, rel=1e-6)
        assert results["perplexity"] == pytest.approx(math.exp(min(loss, 700)), rel=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_changes_nothing_in_the_model(training):
    model, rng = tiny_bert(memory_layers=(1, 3)).train(training), np.random.default_rng(0)
    ids, positions, labels = rng.integers(12, size=(3, 2, 12))
    before = [b.clone() for b in model.buffers()]
    evaluate_language_model(model, [{"ids": ids, "positions": positions, "labels": labels}], CPU)
    assert model.training == training
    assert all(map(torch.equal, before, model.buffers()))


@torch.no_grad()
def test_watching_ends_with_the_block():
    model, seen = tiny_bert(memory_layers=(2,)).eval(), []
    ids = torch.randint(40, (2, 12))
    with watch_reads(value_tables(model), lambda *read: seen.append(read)):
        model(ids)
    model(ids)
    [(layer, slots, weights)] = seen
    assert layer == 2 and slots.shape == weights.shape == (24, 2, 3)
    assert (weights.diff(dim=2) <= 0).all() and weights.sum(2).allclose(torch.ones(24, 2))


@torch.no_grad()
def test_contexts_are_the_tokens_that_a_search_over_all_slots_finds():
    """In any model, also a compiled one. Padded tokens have places, but no reads."""
    memory = PKM(8, n_keys=4, heads=2, topk=3, key_dim=4).eval()
    compiled = torch.compile(memory, backend="eager")
    x, mask = torch.randn(10, 7, 8), torch.arange(7) < torch.randint(1, 8, (10, 1))
    compiled(x[:5], mask[:5])
    with record_reads({"mine": memory.values}) as reads:
        for half in (slice(0, 5), slice(5, 10)):
            compiled(x[half], mask[half])
    found = reads["mine"]
    slots, weights = search_all_slots(memory, x.flatten(0, 1))
    expected = np.zeros((70, 16))  # of each token
    np.add.at(expected, (np.arange(70)[:, None], slots.flatten(1)), weights.flatten(1))
    expected[~mask.flatten()] = 0
    for slot in range(16):
        contexts = found.contexts(slot)
        assert [weight for weight, _ in contexts] == pytest.approx(
            sorted(expected[expected[:, slot] > 0, slot], reverse=True), rel=1e-5)
        for weight, token in contexts:
            assert weight == pytest.approx(expected[token, slot], rel=1e-5)
        assert found.contexts(slot, 2) == contexts[:2]
    read = np.bincount(slots[mask.flatten()].flatten(), minlength=16)
    assert found.counts["read"].tolist() == read.tolist()
    assert [read[slot] for slot in found.top_slots(5)] == sorted(read, reverse=True)[:5]
