"""
Evaluation of language models, against section 3.2 read by read.
"""
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from lib.corpus import Corpus, masked_heldout
from lib.errors import UserError
from lib.usage import (
    check_same_text,
    comparable_evaluations,
    count_reads,
    describe_evaluation,
    evaluate_language_model,
)
from model import BertConfig
from tests.helpers import record_search, tiny_bert


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


def batch(ids, positions, labels, mask=None):
    """Make a batch of tensors or lists as evaluate_language_model takes it."""
    arrays = {"ids": ids, "positions": positions, "labels": labels, "mask": mask}
    return {name: np.asarray(array) for name, array in arrays.items() if array is not None}


def test_evaluate_counts_every_read_but_padding_and_knows_the_uniform_model():
    model = tiny_bert(memory_layers=(1, 3)).train()
    calls = record_search(model)
    nn.init.zeros_(model.bert.words.weight)  # the tied decoder: all logits 0
    masks = [None, torch.arange(12) < torch.tensor([[12], [5], [1], [9]]), None]
    batches = [batch(torch.randint(40, (n, 12)), torch.randint(12, (n, 2)),
                     torch.randint(40, (n, 2)), mask)
               for n, mask in zip((4, 4, 1), masks, strict=True)]
    batches[0]["labels"][0] = -100
    before = [b.clone() for b in model.buffers()]
    results, counts = evaluate_language_model(model, batches, torch.device("cpu"))
    assert model.training and all(map(torch.equal, before, model.buffers()))
    assert results["perplexity"] == pytest.approx(40) and results["masked_tokens"] == 16
    assert results["accuracy"] == sum((b["labels"] == 0).sum() for b in batches) / 16
    assert calls.keys() == results["layers"].keys() == {1, 3}
    for layer, reads in calls.items():
        slots, weights = (torch.cat(part).flatten(0, 1).tolist()
                          for part in zip(*reads, strict=True))
        assert len(slots) == (5 * 12 + 27) * 2  # real tokens x heads
        metrics, read, top1, weight = plain_usage(slots, weights, 16)
        assert counts[layer]["read"].tolist() == read and counts[layer]["top1"].tolist() == top1
        assert counts[layer]["weight"].tolist() == pytest.approx(weight)
        assert results["layers"][layer] == pytest.approx(metrics, rel=1e-6, abs=1e-6)


class Stub(nn.Module):
    """A model that always predicts token 1 at 1/2, 2 at 1/4, 3 at 1/8."""

    def __init__(self):
        super().__init__()
        self.bert = nn.Module()
        self.bert.layers, self.bert.config = nn.ModuleList(), BertConfig()

    def forward(self, ids, positions, mask=None):
        return torch.tensor([0.1, 0.5, 0.25, 0.125, 0.025]).log().expand(*positions.shape, 5)


def test_perplexity_of_a_stub():
    batches = [batch(np.zeros((2, 4), int), np.zeros((2, 2), int), labels)
               for labels in ([[1, -100], [2, 3]], [[-100, -100]] * 2)]
    results, _ = evaluate_language_model(Stub(), batches, torch.device("cpu"))
    assert results["perplexity"] == pytest.approx((2 * 4 * 8) ** (1 / 3), rel=1e-6)
    assert results["masked_tokens"] == 3 and results["accuracy"] == pytest.approx(1 / 3)


def test_a_text_without_words_has_no_perplexity():
    nothing = [batch(np.zeros((2, 4), int), np.zeros((2, 2), int), [[-100, -100]] * 2)]
    with pytest.raises(UserError, match="no word to predict"):
        evaluate_language_model(Stub(), nothing, torch.device("cpu"))


def test_perplexity_depends_on_neither_batch_size_nor_padding(place):
    corpus, device = Corpus("tiny"), torch.device("cpu")
    model = tiny_bert(memory_layers=(2,), vocab_size=corpus.vocab_size).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    reference, counts = evaluate_language_model(model, masked_heldout(corpus, "test", 16, 8),
                                                device)
    *whole, last = masked_heldout(corpus, "test", 16, 8)
    ids, mask = last["ids"], last["mask"]
    assert ids.shape == (1, 16) and not mask.all()
    bare = batch(ids[:, :mask.sum()], last["positions"], last["labels"])
    cut = [*whole, bare]  # the last one not padded
    other = [*whole, {**last, "ids": np.where(mask, ids, 7)}]  # padded with something else
    padded, unpadded = (evaluate_language_model(model, [b], device)[0]["loss"]
                        for b in (last, bare))
    assert padded == pytest.approx(unpadded, rel=1e-5)
    for batches in (cut, other, *(masked_heldout(corpus, "test", 16, n) for n in (1, 5, 1000))):
        results, same = evaluate_language_model(model, batches, device)
        assert results["perplexity"] == pytest.approx(reference["perplexity"], rel=1e-5)
        assert results["layers"][2] == pytest.approx(reference["layers"][2], rel=1e-6)
        assert np.array_equal(same[2]["read"], counts[2]["read"])


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_leaves_the_mode_as_it_was(training):
    model = Stub().train(training)
    batches = [batch(np.zeros((1, 4), int), np.zeros((1, 2), int), [[1, 2]])]
    evaluate_language_model(model, batches, torch.device("cpu"))
    assert model.training == training


def test_an_evaluation_has_the_dtype_of_training():
    model, rng = tiny_bert(), np.random.default_rng(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    batches = [batch(*rng.integers(12, size=(3, 2, 12)))]
    full, half = (evaluate_language_model(model, batches, torch.device("cpu"), dtype)[0]["loss"]
                  for dtype in (torch.float32, torch.bfloat16))
    assert full == pytest.approx(half, rel=0.05) and full != half


@pytest.mark.parametrize(("key", "what"), [
    ("tokenizer_hash", "vocabulary"), ("dataset", "corpus"), ("objective", "objective"),
    ("data", "text of the same name"), ("seq_len", "sequence length")])
def test_perplexities_of_other_texts_are_not_compared(tmp_path, key, what):
    values = {"data": ({"val": "1"}, {"val": "2"}), "seq_len": (32, 64)}
    one, two = values.get(key, ("one", "two"))
    for name, value in (("a", one), ("b", one), ("c", two)):
        settings = {"tokenizer_hash": "h", "dataset": "tiny", "objective": "masked", "seq_len": 16,
                    key: value}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(settings))
    same = [tmp_path / name for name in "ab"]
    assert check_same_text(same) == ("one" if key == "dataset" else "tiny")
    with pytest.raises(UserError, match=f"c has another {what} than"):
        check_same_text([*same, tmp_path / "c"])
    if key == "data":  # runs of older versions do not say
        del settings["data"]
        (tmp_path / "c" / "config.json").write_text(json.dumps(settings))
        for order in ([*same, tmp_path / "c"], [tmp_path / "c", *same]):
            assert check_same_text(order) == "tiny"


def test_curves_of_other_sequences_are_not_compared(tmp_path):
    for name, tokens in (("a", [50, 60]), ("b", [60, 60]), ("c", [60, 50])):
        settings = {"tokenizer_hash": "h", "dataset": "tiny", "objective": "masked", "seq_len": 16,
                    "first_step": 0}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(settings))
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(
            {"step": n, "perplexity": 9.0, "accuracy": 0.5, "layers": {}, "masked_tokens": count})
            + "\n" for n, count in enumerate(tokens)))
    runs = [tmp_path / name for name in "abc"]
    corpus, found = comparable_evaluations(runs[:2])
    assert corpus == "tiny" and list(found) == runs[:2] and len(found[runs[0]]) == 2
    with pytest.raises(UserError, match="c was evaluated on 50 tokens, .*a on 60"):
        comparable_evaluations(runs)


def test_an_evaluation_is_said_in_lines():
    usage = {"mu": 0.5, "mu_uniform": 0.75, "top1_mu": 0.25, "top1_mu_uniform": 0.375, "kl_u": 1.5,
             "kl_w": 2.5, "effective_k": 3.5, "accesses": 4000}
    results = {"perplexity": 36.138, "accuracy": 0.3821, "layers": {2: usage}}
    first, second = describe_evaluation(results)
    assert first == "perplexity 36.14, accuracy 38.2%"
    assert second == ("layer 2: MU 50.0% (uniform use: 75.0%), top-1 MU 25.0% (37.5%), KL_u 1.50, "
                      "KL_w 2.50, 4,000 accesses")


def test_a_compiled_model_is_measured_through_its_raw_module():
    """Compiled and called before: hooks that come later are not seen by its graph."""
    model = tiny_bert(memory_layers=(1, 3)).eval()
    ids, positions = torch.randint(40, (2, 12)), torch.tensor([[1], [2]])
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(ids, positions=positions)
        with count_reads(compiled) as counts:
            compiled(ids, positions=positions)
    assert all(layer["read"].sum() == 0 for layer in counts.values())  # which is the trap
    batches = [batch(ids, positions, [[7], [9]])]
    results, counts = evaluate_language_model(compiled, batches, torch.device("cpu"))
    torch._dynamo.reset()
    expected, reference = evaluate_language_model(model, batches, torch.device("cpu"))
    assert results == expected and results["layers"][1]["accesses"] == 2 * 12 * 2
    assert all(np.array_equal(counts[n]["read"], reference[n]["read"]) for n in (1, 3))
