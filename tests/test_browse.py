"""
The page of measure.py browse, the examples of a task, and distances of classes.
"""
import json
import math
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from lib.browse import (
    CorpusReads,
    class_distances,
    count_task_reads,
    draw_parts,
    page_html,
    task_examples,
    task_usage,
    whole_distances,
)
from lib.tokenizer import load_tokenizer
from model import Classifier
from tests.helpers import PIECES, save_model, squad_file, tiny_bert

CPU = torch.device("cpu")


def test_no_text_breaks_out_of_the_page():
    text = '</script><img/src=x/onerror="window.broken=1"><!--<script>'
    data = page_html({"title": text}).split('id="data">')[1].split("</script>")[0]
    assert "<" not in data
    assert json.loads(data) == {"title": text}


def test_a_context_that_stands_twice_is_listed_once(workdir):
    corpus = CorpusReads.__new__(CorpusReads)
    corpus.ids = np.array([[2, 6, 3]] * 2)
    corpus.tokenizer = load_tokenizer(".")
    corpus.reads = {1: (torch.arange(1.0, 7)[:, None], [np.arange(6)])}  # one slot, one head
    assert corpus.contexts(1, 0, 9) == [
        (6, "[CLS] cat «[SEP]»", 5), (5, "[CLS] «cat» [SEP]", 4), (4, "«[CLS]» cat [SEP]", 3)]


@pytest.fixture
def own_task(workdir):
    """A fine-tuned run of a task in own/, with 16 slots and 2 heads."""
    bert = tiny_bert(vocab_size=len(PIECES), memory_layers=(2,), dropout=0.5).bert
    save_model("out/run/seed0", Classifier(bert.config, 2), ["x", "y"])
    shutil.copy("vocab.txt", "out/run/seed0")
    settings = {"task": "own", "max_len": 8, "doc_stride": 4}
    Path("out/run/seed0/config.json").write_text(json.dumps(settings))
    Path("own").mkdir()
    write_split("train", ["cat [SEP]", "mat", "cat " * 20, "the", "sat"])


def write_split(split, texts):
    lines = ["sentence\tlabel", *(f"{text}\tx" for text in texts[1:]), f"{texts[0]}\ty"]
    Path(f"own/{split}.tsv").write_text("\n".join(lines))


def test_examples_are_those_of_fine_tuning(own_task):
    """They have the run's max_len, a "[SEP]" in a text is text, and reads are without dropout."""
    facts, examples = task_examples("out/run", "train")
    assert facts == {"task": "own", "split": "train", "examples": 5}
    assert [example.ids.tolist() for example in examples] == [
        [2, 9, 3], [2, *[6] * 6, 3], [2, 5, 3], [2, 7, 3], [2, 6, 1, 1, 1, 3]]
    first, second = (count_task_reads("out/run", examples, CPU)[2] for _ in "ab")
    assert first["top1"].sum() == 23 * 2  # tokens x heads
    assert np.array_equal(first["weight"], second["weight"])


@pytest.mark.parametrize(("texts", "split", "accesses"), [(7, "train", 46), (8, "dev", 48)])
def test_usage_is_of_dev_if_it_has_three_accesses_a_slot(own_task, texts, split, accesses):
    """1 - (15/16)^n reaches 95% at n = 47 (47 = ceil(log 0.05 / log 15/16))."""
    write_split("dev", ["mat"] * texts)  # 3 tokens x 2 heads each
    usage = task_usage("out/run", CPU)
    assert (usage["split"], usage["layers"][2]["accesses"]) == (split, accesses)


def test_usage_of_squad_is_that_of_all_windows(own_task):
    settings = {"task": "squad", "max_len": 16, "doc_stride": 4}
    Path("out/run/seed0/config.json").write_text(json.dumps(settings))
    Path("data/squad").mkdir(parents=True)
    squad_file(Path("data/squad/dev-v1.1.json"))
    usage = task_usage("out/run", CPU)
    _, windows = task_examples("out/run", "dev")
    assert (usage["task"], usage["split"], usage["examples"]) == ("squad", "dev", len(windows))
    assert usage["layers"][2]["accesses"] == 2 * sum(len(window.ids) for window in windows)


def test_parts_of_the_two_largest_classes():
    examples = [types.SimpleNamespace(label=label) for label in [2] * 9 + [1] * 3 + [0] * 5]
    parts = draw_parts(examples)
    assert [[example.label for example in part] for part in parts] == [
        [0, 0], [0, 0], [0], [2, 2], [2, 2], [2] * 5]
    assert len({id(example) for part in parts for example in part}) == 14


def shares(counts):
    return [count / sum(counts) for count in counts]


def kl(a, b):
    return sum(p * math.log(p / q) for p, q in zip(a, b, strict=True) if p)


def test_distances_of_halves_slot_by_slot():
    """Figure 4: KL(p || 0.9 q + 0.1 p) and IOU, each beside its floor."""
    positive, negative = np.random.default_rng(0).integers(0, 9, (2, 2, 50))
    found = class_distances(positive, 3 * negative)
    a, b, c, d = map(shares, [*positive.tolist(), *negative.tolist()])
    for kind, pairs in {"between": [(a, c), (a, d), (b, c), (b, d)],
                        "floor": [(a, b), (b, a), (c, d), (d, c)]}.items():
        bounded = [kl(p, [0.9 * y + 0.1 * x for x, y in zip(p, q)]) for p, q in pairs]
        assert found[f"kl_{kind}"] == pytest.approx(sum(bounded) / 4)
        common = sum(sum(map(min, p, q)) for p, q in pairs) / 4
        assert found[f"iou_{kind}"] == pytest.approx(common / (2 - common))


def test_distances_of_whole_classes_slot_by_slot():
    """The paper's formulas; KL over the slots that both classes read."""
    positive, negative = np.random.default_rng(0).integers(0, 4, (2, 50))
    p, q = shares(positive.tolist()), shares(negative.tolist())
    both = [(x, y) for x, y in zip(positive.tolist(), negative.tolist()) if x and y]
    assert 20 < len(both) < 40
    assert whole_distances(positive, negative) == pytest.approx({
        "kl_whole": kl(*map(shares, zip(*both))),
        "iou_whole": sum(map(min, p, q)) / sum(map(max, p, q))})
