"""
What reads a slot: contexts, the page of measure.py browse, and the examples of a task.
"""
import collections
import json
import math
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from lib.browse import (
    class_distances,
    count_task_reads,
    draw_halves,
    page_data,
    page_html,
    training_examples,
)
from lib.errors import UserError
from lib.tokenizer import SPECIALS, wordpiece_tokenizer
from model import Classifier
from tests.helpers import PIECES, save_model, tiny_bert


def tokenizer_of(words):
    """One token a word, whatever is in it."""
    ids = {word: n for n, word in enumerate([*SPECIALS, *words])}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[UNK]"))


def corpus_reads(ids, tokenizer, layers=(1,), n_keys=2):
    """Stand in for a CorpusReads, with random reads by 2 heads of the best 3 slots."""
    rng, reads = np.random.default_rng(0), {}
    for layer in layers:
        slots = [[rng.permutation(n_keys**2)[:3] for _ in "ab"] for _ in range(ids.size)]
        weights = np.sort(rng.dirichlet(np.ones(3), (ids.size, 2)))[..., ::-1].astype(np.float32)
        reads[layer] = torch.tensor(np.array(slots)), torch.tensor(weights.copy())
    return types.SimpleNamespace(ids=ids, tokenizer=tokenizer, layers=reads, n_keys=n_keys)


def test_the_pages_data_are_those_of_a_count_one_by_one():
    rng, words = np.random.default_rng(0), list("abcdefgh")
    ids = rng.integers(5, 5 + len(words), (6, 20))
    corpus = corpus_reads(ids, tokenizer_of(words), (2, 4), 4)
    found = page_data(corpus, 3)
    assert found["seq_len"] == 20
    assert "".join(found["pieces"][n] for n in found["text"][:20]) == "".join(
        f" {words[i - 5]}" for i in ids[0])
    for layer, (number, reads) in zip(found["layers"], corpus.layers.items(), strict=True):
        slots, weights = (part.numpy() for part in reads)
        contexts, shares = [collections.Counter() for _ in range(16)], collections.Counter()
        for token, (heads, parts) in enumerate(zip(slots, weights, strict=True)):
            for slot, weight in zip(heads.flat, parts.flat, strict=True):
                contexts[slot][token] += weight
                shares[words[ids.flat[token] - 5], slot] += weight
        assert layer["layer"] == number
        assert layer["read"] == [(slots == slot).sum() for slot in range(16)]
        assert layer["top1"] == [(slots[..., 0] == slot).sum() for slot in range(16)]
        for slot in range(16):
            best = sorted(contexts[slot].items(), key=lambda item: -item[1])[:3]
            assert layer["contexts"][slot] == [
                number for token, w in best for number in (token, round(100 * w.item()))]
        for piece, pairs in zip(found["pieces"], layer["tokens"], strict=True):
            word = piece.strip()
            count = (ids == 5 + words.index(word)).sum()
            best = sorted((-shares[word, slot], slot) for slot in range(16))[:8]
            assert pairs[::2] == [slot for _, slot in best]
            assert pairs[1::2] == [round(-100 * share.item() / (2 * count)) for share, _ in best]


def test_a_context_that_stands_twice_is_shown_once():
    tokenizer = wordpiece_tokenizer([*SPECIALS, "value", "##error", "raises"])
    ids = np.array([[2, *tokenizer.encode("raises valueerror value").ids, 3]] * 2)
    found = page_data(corpus_reads(ids, tokenizer), 99)
    assert found["pieces"] == [" [CLS]", " [SEP]", " value", "error", " raises"]
    [layer] = found["layers"]
    assert {token for pairs in layer["contexts"] for token in pairs[::2]} == set(range(6))


def test_no_text_breaks_out_of_the_page():
    text = '</script><img/src=x/onerror="window.broken=1"><!--<script>'
    data = page_html({"title": text}).split('id="data">')[1].split("</script>")[0]
    assert "<" not in data
    assert json.loads(data) == {"title": text}


def write_own_task(labels="xyxyx"):
    """A fine-tuned run of a task in own/."""
    bert = tiny_bert(vocab_size=len(PIECES), memory_layers=(2,), dropout=0.5).bert
    save_model("out/run/seed0", Classifier(bert.config, 2), ["x", "y"])
    shutil.copy("vocab.txt", "out/run/seed0")
    settings = {"task": "own", "max_len": 8, "doc_stride": 4}
    Path("out/run/seed0/config.json").write_text(json.dumps(settings))
    Path("own").mkdir()
    texts = ["cat [SEP]", "mat", "cat " * 20, "the", "sat"]
    rows = [f"{text}\t{label}\n" for text, label in zip(texts, labels, strict=True)]
    Path("own/train.tsv").write_text("".join(["sentence\tlabel\n", *rows]))


def test_training_examples_are_those_of_fine_tuning(workdir):
    """They have the run's max_len, a "[SEP]" in a text is text, and reads are without dropout."""
    write_own_task()
    task, examples = training_examples("out/run", None)
    assert (task, [example.label for example in examples]) == ("own", [0, 1, 0, 1, 0])
    assert [example.ids.tolist() for example in examples] == [
        [2, 6, 1, 1, 1, 3], [2, 9, 3], [2, *[6] * 6, 3], [2, 5, 3], [2, 7, 3]]
    spread = training_examples("out/run", 3)[1]
    assert [len(example.ids) for example in spread] == [6, 8, 3]
    counts = [count_task_reads("out/run", examples, torch.device("cpu"))[2] for _ in range(2)]
    assert counts[0]["top1"].sum() == (6 + 3 + 8 + 3 + 3) * 2  # tokens x heads
    assert np.array_equal(counts[0]["weight"], counts[1]["weight"])


def test_halves_are_parts_of_their_class():
    examples = [types.SimpleNamespace(label=label) for label in [0] * 9 + [1] * 5]
    halves = draw_halves("out/a", examples)
    assert [[example.label for example in half] for half in halves] == [[0, 0]] * 2 + [[1, 1]] * 2
    assert len({id(example) for half in halves for example in half}) == 8
    examples[0].label = 2
    with pytest.raises(UserError, match=r"expected two classes .* found \[8, 5, 1\] examples"):
        draw_halves("out/a", examples)


def test_distances_of_classes_slot_by_slot():
    """Figure 4: KL(p || 0.9 q + 0.1 p) and IOU, each beside its floor."""
    def shares(counts):
        return [count / sum(counts) for count in counts.tolist()]

    def kl(a, b):
        return sum(p * math.log(p / (0.9 * q + 0.1 * p)) for p, q in zip(a, b, strict=True) if p)

    def overlap(a, b):
        return sum(map(min, a, b))

    positive, negative = np.random.default_rng(0).integers(0, 9, (2, 2, 50))
    found = class_distances(positive, 3 * negative)
    (a, b), (c, d) = map(shares, positive), map(shares, negative)
    between = (a, c), (a, d), (b, c), (b, d)
    floor = (a, b), (b, a), (c, d), (d, c)
    for kind, pairs in {"between": between, "floor": floor}.items():
        assert found[f"kl_{kind}"] == pytest.approx(sum(kl(*pair) for pair in pairs) / 4)
        common = sum(overlap(*pair) for pair in pairs) / 4
        assert found[f"iou_{kind}"] == pytest.approx(common / (2 - common))
    apart = class_distances(np.array([[3, 1, 0]] * 2), np.array([[0, 0, 7]] * 2))
    assert (apart["kl_between"], apart["iou_between"]) == pytest.approx((math.log(10), 0))
