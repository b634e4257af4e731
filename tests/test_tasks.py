"""
Tasks: their official files, encodings as Hugging Face's, predictions and scores.
"""
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from finetune import Settings, TrainingBatches
from lib import tasks
from lib.settings import UserError
from lib.tokenizer import SPECIALS, full_tokenizer, wordpiece_tokenizer, write_vocab
from model import Classifier
from prepare_data import FILES
from tests.helpers import tiny_bert

MRPC = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
SPLITS_OF = {  # the official layouts, a few rows each: split, content, the texts and labels in it
    "cola": [("train", 'gj04\t1\t\tThe "cat sat.\ngj04\t0\t*\tSat cat.\n',
              [(('The "cat sat.',), 1), (("Sat cat.",), 0)])],
    "sst2": [("train", "sentence\tlabel\nhide new \t0\nit 's \"good\u2028\t1\n",
              [(("hide new ",), 0), (('it \'s "good\u2028',), 1)])],
    "mrpc": [("msr_paraphrase_train",
              f'{MRPC}\r\n1\t6\t7\tA\tB "q\r\n0\t8\t7\tC\tD\r\n1\t8\t6\tE\tF\r\n', None),
             ("mrpc_dev_ids", "8\t7\n", None),
             ("train", None, [(("A", 'B "q'), 1), (("E", "F"), 1)]),
             ("dev", None, [(("C", "D"), 0)])],
    "stsb": [("train", "index\tgenre\tsentence1\tsentence2\tscore\n0\tx\tA\tB\t3.800\n",
              [(("A", "B"), 3.8)])],
    "qqp": [("train", ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
                       "1\t2\t3\tA?\tB?\t0\n4\t5\t6\tcut off\n" + "7\t8\t9\tC?\tD?\t1\n" * 2),
             [(("A?", "B?"), 0), *[(("C?", "D?"), 1)] * 2])],
    "mnli": [("train", ("index\tsentence1\tsentence2\tlabel1\tgold_label\n"
                        "0\tA\tB\tneutral\tcontradiction"), [(("A", "B"), 0)]),
             ("dev_matched", ("index\tsentence1\tsentence2\tlabel1\tlabel2\tgold_label\n"
                              "0\tA\tB\tneutral\tneutral\tentailment"), [(("A", "B"), 1)]),
             ("dev_mismatched", "sentence1\tsentence2\tgold_label\nA\tB\tneutral\n",
              [(("A", "B"), 2)])],
    "qnli": [("dev", "index\tquestion\tsentence\tlabel\n0\tA?\tB.\tnot_entailment\n",
              [(("A?", "B."), 1)])],
    "rte": [("dev", "index\tsentence1\tsentence2\tlabel\n0\tA\tB\tentailment\n",
             [(("A", "B"), 0)])],
}


@pytest.mark.parametrize("name", SPLITS_OF)
def test_official_files(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = Path(tasks.TASKS[name].folder)
    folder.mkdir(parents=True)
    for split, content, _ in SPLITS_OF[name]:
        if content:
            ending = "txt" if split.startswith("msr") else "tsv"
            (folder / f"{split}.{ending}").write_bytes(content.encode())
    task = tasks.find_task(folder.name)  # "SST-2"
    assert task == tasks.find_task(name) == tasks.TASKS[name]
    assert task.archives and FILES.keys() >= set(task.archives)
    for split, _, expected in SPLITS_OF[name]:
        if expected:
            texts, labels = tasks.read_split(task, split)
            assert texts == [text for text, _ in expected]
            assert labels.tolist() == pytest.approx([label for _, label in expected])


def test_a_folder_of_ones_own(tmp_path, monkeypatch):
    """A path may have an official name. Columns say whether it has classes or scores."""
    train = tmp_path / "rte/train.tsv"
    train.parent.mkdir()
    train.write_text("id\tsentence\tlabel\n1\ta\ty\n2\t\tx\n3\tc\ty\n\n")
    task = tasks.find_task(str(tmp_path / "rte"))
    assert (task.name, task.labels, task.metrics) == ("own_rte", ["x", "y"], ["accuracy"])
    texts, labels = tasks.read_split(task, "train")  # an empty sentence is a row
    assert texts == [("a",), ("",), ("c",)] and labels.tolist() == [1, 0, 1]
    train.write_text("sentence1\tsentence2\tscore\na\tb\t1.5\n")
    task = tasks.find_task(str(tmp_path / "rte"))
    assert (task.labels, task.metrics) == ([], ["pearson", "spearmanr"])
    assert tasks.read_split(task, "train")[0] == [("a", "b")]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="'rte': not there"):
        tasks.find_task("rte")
    for score in ("high", "nan", "1/0"):
        train.write_text(f"sentence1\tsentence2\tscore\na\tb\t{score}\n")
        with pytest.raises(UserError, match=f"train.tsv:2: label '{score}'"):
            tasks.read_split(task, "train")


@pytest.mark.parametrize("train, words", [
    ("sentence\tlabel\na\tx\nb\tx\n", "'x'"),
    ("sentence\tlabel\na\tx\nb\ty\nc\t \n", "' '"),
    ("sentence\tlabel\na\tx\nb\tx \nc\ty\n", "'x '"),
    ("sentence\tlabel\n" + "".join(f"a\t{n / 9:.2f}\n" for n in range(30)), "column score"),
    ("sentence\tlabel\tlabel\na\tx\ty\n", "'label', 'label'"),
    ("sentence\tlabel\na\tx\nb\ty\tz\nc\ty\n", "3 fields"),
    ("sentence\tsentence1\tsentence2\tlabel\na\tb\tc\tx\n", "sentence1 and sentence2")])
def test_a_task_that_is_none(tmp_path, train, words):
    (tmp_path / "train.tsv").write_text(train)
    with pytest.raises(UserError, match=f"train.tsv:.*{words}"):
        tasks.find_task(str(tmp_path))


@pytest.mark.parametrize("dev, place", [
    (b"sentence\tlabel\na\tx\n\nb\ty\n", "dev.tsv:3"),
    (b"sentence\tlabel\na\tx\nb\ty\tz\n", "dev.tsv:3"),
    (b"sentence\tlabel\na\tx\nb\tz\n", "dev.tsv:3: label 'z'"),
    (b"text\tlabel\na\tx\n", "dev.tsv:1"),
    (b"sentence1\tlabel\na\tx\n", "dev.tsv:1"),
    (b"sentence\tlabel\n", "dev.tsv"),
    ("sentence\tlabel\né\tx\n".encode("latin-1"), "dev.tsv")])
def test_a_bad_row_of_ones_own_is_named(tmp_path, dev, place):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\na\tx\nb\ty\n")
    (tmp_path / "dev.tsv").write_bytes(dev)
    with pytest.raises(UserError, match=place):
        tasks.read_split(tasks.find_task(str(tmp_path)), "dev")


@pytest.fixture
def fox():
    words = "the cat sat it on 1990 ##s fox . ?"
    return wordpiece_tokenizer([*SPECIALS, *words.split()])


@pytest.mark.parametrize("texts, max_len, expected", [
    (["cat " * 9], 5, "[CLS] cat cat cat [SEP]"),
    (["cat " * 9, "sat"], 8, "[CLS] cat cat cat cat [SEP] sat [SEP]"),
    (["cat", "sat " * 9], 8, "[CLS] cat [SEP] sat sat sat sat [SEP]"),
    (["cat " * 5, "sat " * 4], 8, "[CLS] cat cat cat [SEP] sat sat [SEP]"),
    (["", "sat"], 8, "[CLS] [SEP] sat [SEP]")])
def test_encoding_cuts_the_longer_text(fox, texts, max_len, expected):
    [example] = tasks.encode_examples(fox, [texts], [0], max_len)
    found = [fox.id_to_token(token) for token in example.ids]
    assert found == expected.split()
    assert example.first_length == found.index("[SEP]") + 1


def test_batches_are_those_of_hugging_faces_tokenizer(fox, tmp_path):
    """Ids, token types and mask of padded pairs, from tokenizers' own template and padding."""
    texts = [("the cat", "it sat on it"), ("sat", "fox"), ("it ? it", "cat . 1990s")]
    write_vocab(tmp_path, fox)
    theirs = full_tokenizer(tmp_path).encode_batch(texts)
    ours = tasks.pad(tasks.encode_examples(fox, texts, [0] * 3, 64))
    mask = np.array([encoding.attention_mask for encoding in theirs], bool)
    assert (ours["ids"] == [encoding.ids for encoding in theirs]).all() and not mask.all()
    assert (ours["mask"] == mask).all() and ours["ids"].dtype == np.int64
    assert (ours["token_types"] == [encoding.type_ids for encoding in theirs])[mask].all()
    [alone, *_] = tasks.encode_examples(fox, texts, [0] * 3, 64)
    assert "mask" not in tasks.pad([alone])  # nothing is padded
    assert tasks.pad([])["ids"].shape == (0, 1)


def test_batches_are_of_one_length_and_complete():
    """Sorted only within 64 batches: a batch of 128 batches' examples has every second length."""
    lengths = np.random.default_rng(0).integers(3, 128, 5003)
    examples = [tasks.Example(np.zeros(length), 3, 0) for length in lengths]
    batches = tasks.batches_by_length(examples, 16)
    assert sorted(np.concatenate(batches).tolist()) == list(range(5003))
    assert Counter(map(len, batches)) == {16: 312, 11: 1}
    assert sum(len(b) * lengths[b].max() for b in batches) < 1.05 * lengths.sum()
    settings = Settings(batch_size=16, accumulation=1, max_steps=128)
    examples = [tasks.Example(np.zeros(length), 3, 0) for length in range(128 * 16)]
    steps = TrainingBatches(examples, settings).steps
    assert np.mean([np.ptp(batch) for batch in steps]) == pytest.approx(2 * 15, abs=2)


@pytest.mark.parametrize("metric, labels, predictions, expected", [
    ("accuracy", [0, 1, 1, 0, 2], [0, 1, 0, 0, 2], 4 / 5),
    # class 1: 2 found, 1 missed, 2 wrong; F1 = 2 * 2 / (2 * 2 + 1 + 2)
    ("f1", [1, 0, 1, 1, 0, 0], [1, 1, 0, 1, 1, 0], 4 / 7),
    ("f1", [0, 0], [0, 1], 0),
    ("f1", [0, 0], [0, 0], 0),
    # 2 true and 1 false positive, 2 true and 1 false negative: (2 * 2 - 1) / sqrt(3 * 3 * 3 * 3)
    ("matthews_correlation", [1, 0, 1, 1, 0, 0], [1, 1, 0, 1, 0, 0], 1 / 3),
    # 2 true positives, 1 true and 1 false negative: (2 * 1 - 0) / sqrt(2 * 3 * 1 * 2)
    ("matthews_correlation", [1, 1, 1, 0], [1, 1, 0, 0], 0.5773503),
    ("matthews_correlation", [1, 0, 1], [1, 1, 1], 0),  # scikit-learn's convention
    ("matthews_correlation", [1], [1], 0),
    # deviations -1 0 1 and -4/3 -1/3 5/3: 3 / sqrt(2 * 14/3)
    ("pearson", [1, 2, 3], [1, 2, 4], 0.9819805),
    ("pearson", [1e6 + 1, 1e6 + 2, 1e6 + 3], [-1e-9, -2e-9, -4e-9], -0.9819805),
    ("pearson", [1, 2, 3], [0.1, 0.1, 0.1], np.nan),
    # ranks 1 2 3 4 and 2 3 4 1: 1 - 6 * (1 + 1 + 1 + 9) / (4 * 15)
    ("spearmanr", [10, 20, 30, 40], [1, 8, 27, -5], -0.2),
    # ranks 1 2.5 2.5 4 and 1 3 2 4, deviations from 2.5: 4.5 / sqrt(4.5 * 5)
    ("spearmanr", [1, 2, 2, 3], [0, 0.3, 0.2, 9], 0.9486833),
    ("spearmanr", [1, 2, 2, 3], [5, 5, 5, 5], np.nan)])
def test_metrics_are_those_computed_by_hand(metric, labels, predictions, expected):
    """By the formulas of the comments, with ties and with classes that never occur."""
    found = tasks.METRICS[metric](np.array(labels), np.array(predictions))
    assert found == pytest.approx(expected, abs=1e-7, nan_ok=True)


SCORES = {  # the first one picks the epoch; of 6 labels 3 are 1, and 4 predictions
    "mnli": {"accuracy": 5 / 6, "accuracy_mm": 1 / 6}, "qqp": {"accuracy": 5 / 6, "f1": 6 / 7},
    "cola": {"matthews_correlation": 6 / 72**0.5, "accuracy": 5 / 6},  # 6 = 3 * 2 - 0 * 1
    "stsb": {"pearson": 0.9819805, "spearmanr": 1.0}, "rte": {"accuracy": 5 / 6}}


@pytest.mark.parametrize("name", SCORES)
def test_the_scores_of_each_task(name):
    task, labels, said = tasks.TASKS[name], [1, 0, 1, 1, 0, 0], [1, 0, 1, 1, 1, 0]
    predictions = {"": np.eye(2)[said], "_mm": 1 - np.eye(2)[said]}
    if name == "stsb":
        labels, predictions = [1, 2, 3], {"": np.array([[1], [2], [4]])}
    examples = [tasks.Example(np.zeros(3), 3, label) for label in labels]
    found = tasks.score_dev(task, dict.fromkeys(task.dev, examples), predictions)
    assert found == pytest.approx(SCORES[name])
    assert task.metrics[0] == next(iter(SCORES[name]))


def test_padding_changes_no_prediction_and_dropout_none():
    """A model that is training predicts in evaluation mode, and trains on with a frozen memory."""
    model = Classifier(tiny_bert(dropout=0.5, memory_layers=(2,)).bert.config, 3).train()
    memory, rng = model.bert.layers[1].memory.eval(), np.random.default_rng(0)
    examples = [tasks.Example(rng.integers(5, 40, length), 3, None) for length in (3, 16, 9, 12)]
    together, again = (tasks.predict_examples(model, examples) for _ in range(2))
    alone = tasks.predict_examples(model, examples, batch_size=1)
    assert (together == again).all()
    assert model.training and not memory.training
    np.testing.assert_allclose(together, alone, atol=1e-6)
    rounded = tasks.predict_examples(model, examples, dtype=torch.bfloat16)
    assert 0 < abs(rounded - together).max() < 0.01


def test_students_interval():
    """By a table of Student's t: 2.776 for 5 numbers, 2.032 for 35."""
    assert tasks.student_interval([1, 2, 3, 4, 5]) == pytest.approx((3, 2.776 * 2.5**0.5 / 5**0.5))
    _, reach = tasks.student_interval(range(35))
    assert reach == pytest.approx(2.032 * np.std(range(35), ddof=1) / 35**0.5, rel=0.004)
    assert np.isnan(tasks.student_interval([7])[1])
