"""
Train, measure and sample causal language models.
"""
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import measure
import pretrain
from lib.corpus import Corpus, causal_heldout
from lib.slots import continue_text
from lib.tokenizer import load_tokenizer
from lib.training import evaluate_language_model
from lib.weights import load_model
from tests.helpers import TINY, tiny_bert, train

SYSTEMS = [{}, {"memory_layers": (2,)}, {"memory_layers": (2,), "alpha": 0.0}]


@pytest.mark.parametrize("system", SYSTEMS, ids=["plain", "ResM", "PKM"])
def test_no_bit_comes_from_later_tokens(system):
    model = tiny_bert(causal=True, max_len=48, d_model=16, **system).eval()
    ids = torch.randint(40, (2, 48))
    with torch.no_grad():
        logits = model(ids)
        for time in (1, 7, 32, 47):
            other = ids.clone()
            other[:, time:] = (other[:, time:] + torch.randint(1, 40, (2, 48 - time))) % 40
            changed = model(other)
            assert torch.equal(changed[:, :time], logits[:, :time])
            assert (changed[:, time:] != logits[:, time:]).any(2).all()
            mask = torch.arange(48).expand(2, 48) < time  # padded to the right
            assert torch.allclose(model(ids, mask)[:, :time], logits[:, :time], atol=1e-5)


@pytest.mark.parametrize("system", SYSTEMS[:2], ids=["plain", "ResM"])
def test_loss_is_that_of_every_next_token(place, system):
    """Sum over single predictions in float64, each from earlier tokens only."""
    corpus = Corpus("tiny")
    batch, _ = pretrain.CausalBatches(corpus, pretrain.Settings(**TINY)).get(3, 1)
    ids, labels = (torch.from_numpy(batch[name].copy()) for name in ("ids", "labels"))
    model = tiny_bert(causal=True, **system).double().eval()
    losses = []
    for row, following in zip(ids, labels, strict=True):
        assert row[1:].tolist() == following[:-1].tolist()
        for n in range(1, len(row) + 1):
            scores = model(row[None, :n])[0, -1].exp()
            losses.append(-(scores[following[n - 1]] / scores.sum()).log().item())
    assert len(losses) == 2 * 16
    loss = model(ids, labels=labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-6)
    labels[0, 3:] = -100  # padding does not count
    assert model(ids, labels=labels).item() == pytest.approx(
        np.mean(losses[:3] + losses[16:]), rel=1e-6)


@pytest.mark.parametrize("stride", [16, 8, 5, 1])
@pytest.mark.parametrize("system", SYSTEMS[:2], ids=["plain", "ResM"])
def test_perplexity_of_a_split_equals_brute_force(place, system, stride):
    """Predict each token once, from the tokens of its window."""
    corpus = Corpus("tiny")
    model = tiny_bert(causal=True, **system).eval()
    text, loss = [corpus.special_ids.sep, *corpus.split("test").tolist()], 0.0
    predicted = 0  # tokens, up to here
    for start in [*range(0, len(text) - 17, stride), len(text) - 17]:
        with torch.no_grad():
            logits = model(torch.tensor([text[start:start + 16]]))[0].double().log_softmax(1)
        while predicted < start + 16:
            loss -= logits[predicted - start, text[predicted + 1]].item()
            assert predicted < 16 or predicted - start >= 16 - stride
            predicted += 1
    assert predicted == len(text) - 1
    for size in (1, 3, 100):
        batches = causal_heldout(corpus, "test", 16, size, stride=stride)
        assert all(len(batch["ids"]) <= size for batch in batches)
        results, _ = evaluate_language_model(model, batches, torch.device("cpu"))
        assert results["perplexity"] == pytest.approx(math.exp(loss / predicted), rel=1e-5)
        assert results["predicted_tokens"] == predicted
    short = causal_heldout(corpus, "test", len(text) + 4, 8)  # less than one sequence
    assert short[0]["ids"].tolist() == [text[:-1]] and short[0]["labels"].tolist() == [text[1:]]
    some = causal_heldout(corpus, "test", 16, 2, sequences=3, stride=stride)
    assert [batch["ids"].shape for batch in some] == [(2, 16), (1, 16)]


def test_a_causal_run_is_measured(place, capsys):
    args = ["--objective=causal", "--max_steps=12"]
    assert train(*args) == 0 and train(*args, "--memory_layers=", "--out=out/plain") == 0
    runs = ["out/plain", "out/tiny"]
    measure.main(["table", *runs, "--data", "tiny", "--device", "cpu", "--out", "results/t"])
    saved = json.loads(Path("results/t.json").read_text())["runs"][1]["results"]["tiny"]
    corpus, model = Corpus("tiny"), load_model("out/tiny")
    batches = causal_heldout(corpus, "test", 16, 8, stride=8)
    results, _ = evaluate_language_model(model, batches, torch.device("cpu"))
    assert saved["predicted_tokens"] == len(corpus.split("test"))
    assert saved["perplexity"] == pytest.approx(results["perplexity"], rel=1e-6)
    assert saved["layers"]["2"]["accesses"] == 2 * sum(batch["ids"].size for batch in batches)


def test_sample_goes_on_with_a_text(place, capsys):
    """Add the likeliest token at temperature 0, otherwise one by the seed."""
    assert train("--objective=causal", "--max_steps=12") == 0
    model, corpus = load_model("out/tiny").eval(), Corpus("tiny")
    tokenizer = load_tokenizer(corpus.folder)

    def run(*args):
        capsys.readouterr()
        measure.main(["sample", "out/tiny", "the old cat saw", "--device", "cpu", *args])
        return capsys.readouterr().out.splitlines()[-1]

    text = run("--temperature", "0", "--tokens", "30")
    ids = [corpus.special_ids.sep, *tokenizer.encode("the old cat saw").ids]
    for _ in range(30):  # longer than a window of 16
        with torch.no_grad():
            ids.append(model(torch.tensor([ids[-16:]]))[0, -1].argmax().item())
    assert tokenizer.encode(text).ids == ids[1:]
    first, again, other = (run("--tokens", "6", "--seed", seed) for seed in "001")
    assert first == again != other


def test_sampled_tokens_are_among_the_50_likeliest():
    """Sample at a high temperature. A low one leaves the likeliest token alone."""
    model = tiny_bert(causal=True, vocab_size=99).eval()
    model.bias.data.normal_(std=3)

    def sample(temperature):
        generator = torch.Generator().manual_seed(0)
        return continue_text(model, [1, 2], 100, 8, temperature, generator)

    ids, places = sample(100.0), []
    for n in range(2, len(ids)):
        with torch.no_grad():
            logits = model(torch.tensor([ids[max(0, n - 8):n]]))[0, -1]
        places.append((logits > logits[ids[n]]).sum().item())
    assert len(places) == 100 and 40 < max(places) < 50
    assert sample(1e-3) == sample(1e-40) == sample(5e-324) == sample(0) != ids
