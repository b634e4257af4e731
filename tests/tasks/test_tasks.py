"""
Downstream tasks: their official files, SQuAD's windows, and scores as officially computed.
"""
import argparse
import collections
import json
import math
import random
import types

import numpy as np
import pytest

import prepare_data
from lib.errors import UserError
from lib.squad import Question, best_answers, make_windows, read_squad
from lib.tasks import (
    GLUE,
    METRICS,
    TASKS,
    Examples,
    TrainingBatches,
    batches_by_length,
    encode_examples,
    find_task,
    read_split,
    row_names,
    score_squad,
    tsv_text,
)
from lib.tokenizer import SPECIALS, load_tokenizer, wordpiece_tokenizer
from tests.helpers import SHARED, prepare, squad_file

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
                       "1\t2\t3\tA?\tB?\t0\n4\t5\t6\tcut off\n" + "7\t8\t9\tC?\tD?\t1\n" * 98),
             [(("A?", "B?"), 0), *[(("C?", "D?"), 1)] * 98]),
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


def rows(task, split):
    """The texts of a split, and its labels or Nones."""
    texts, labels = read_split(task, split)
    if labels is None:
        return texts, [None] * len(texts)
    assert labels.dtype == (np.int64 if task.labels else np.float32)
    return texts, [round(label, 5) for label in labels.tolist()]


@pytest.mark.parametrize("name", SPLITS_OF)
def test_official_files(tmp_path, capsys, name):
    folder = tmp_path / "glue" / GLUE[name].title
    folder.mkdir(parents=True)
    for split, content, _ in SPLITS_OF[name]:
        if content:
            ending = "txt" if split.startswith("msr") else "tsv"
            (folder / f"{split}.{ending}").write_bytes(content.encode())
    task = find_task(GLUE[name].title, tmp_path)
    assert task == find_task(name, tmp_path)
    for split, _, expected in SPLITS_OF[name]:
        if expected:
            assert list(zip(*rows(task, split), strict=True)) == expected
    left_out = "train.tsv:3: 4 fields, expected 6; 1 of 100 rows left out"
    assert (left_out in capsys.readouterr().out) == (name == "qqp")
    if name == "mnli":
        assert task.dev == {"": "dev_matched", "_mm": "dev_mismatched"}


@pytest.mark.skipif(not (SHARED / "glue").is_dir(), reason="no GLUE on this machine")
@pytest.mark.parametrize("name, folder, counts", [
    ("sst2", "SST-2", (67349, 872, 1821)), ("rte", "RTE", (2490, 277, 3000))])
def test_official_counts(name, folder, counts):
    task = find_task(name, SHARED)
    texts, labels = zip(*(read_split(task, split) for split in ("train", "dev", "test")),
                        strict=True)
    assert task.folder == SHARED / "glue" / folder and tuple(map(len, texts)) == counts
    assert set(labels[0].tolist()) == set(labels[1].tolist()) == {0, 1} and labels[2] is None


def test_an_official_label_is_not_learned_from_a_typing_error(tmp_path, capsys):
    (tmp_path / "glue/RTE").mkdir(parents=True)
    lines = ["0\ta\tb\tentailment", "1\ta\tb\tentailmnt", *["2\ta\tb\tnot_entailment"] * 98]
    (tmp_path / "glue/RTE/train.tsv").write_text("\n".join([
        "index\tsentence1\tsentence2\tlabel", *lines]))
    texts, labels = read_split(find_task("rte", tmp_path), "train")
    assert len(texts) == 99 and labels.tolist() == [0, *[1] * 98]
    message = "train.tsv:3: label 'entailmnt': expected entailment, not_entailment; 1 of 100 rows"
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("good, bad", [(2, 1), (98, 1), (99, 1), (197, 2), (198, 2), (200, 3)])
def test_at_most_one_in_a_hundred_rows_is_left_out(tmp_path, good, bad):
    lines = ["a cat\tx", *["a mat\ty"] * (good - 1), *["cut off"] * bad]
    (tmp_path / "train.tsv").write_text("\n".join(["sentence\tlabel", *lines]))
    if bad / (good + bad) <= 0.01:
        assert len(read_split(find_task(str(tmp_path)), "train")[0]) == good
    else:
        with pytest.raises(UserError, match=rf"\({bad} of {good + bad} rows are malformed\)"):
            read_split(find_task(str(tmp_path)), "train")


def test_no_row_takes_the_place_of_an_empty_one(tmp_path):
    """An empty sentence is a row. A line without a field is an error, except at the end."""
    (tmp_path / "train.tsv").write_text("sentence\tlabel\na\tx\nb\ty\n")
    task = find_task(str(tmp_path))

    def test_split(text):
        (tmp_path / "test.tsv").write_text(text)
        return [text for text, in read_split(task, "test")[0]], row_names(task, "test")

    assert test_split("index\tsentence\n7\ta\n9\t\n8\tb\n\n") == (["a", "", "b"], ["7", "9", "8"])
    assert test_split("sentence\tid\na\tx1\n\tx0\n") == (["a", ""], ["x1", "x0"])
    assert test_split("sentence\na\n\nb\n\n\n") == (["a", "", "b"], ["0", "1", "2"])
    with pytest.raises(UserError, match=r"test.tsv:3: 1 fields, expected 2 \(1 of 3"):
        test_split("index\tsentence\n0\ta\n\n1\tb\n")


def test_a_folder_of_ones_own_may_have_an_official_name(tmp_path):
    (tmp_path / "rte").mkdir()
    (tmp_path / "rte/train.tsv").write_text("sentence\tlabel\na\ty\nb\tx\nc\ty\n")
    task = find_task(str(tmp_path / "rte"), tmp_path)
    assert task.folder == tmp_path / "rte" and task.name == "own_rte"
    assert (task.labels, task.metrics) == (["x", "y"], ["accuracy"])
    (tmp_path / "rte/train.tsv").write_text("sentence\tscore\na\t1\n")
    task = find_task(str(tmp_path / "rte"), tmp_path)
    assert (task.labels, task.metrics) == ([], ["pearson", "spearmanr"])


def test_the_task_of_docs(workdir, monkeypatch):
    files = [(package, [f"First of {package}\nline {n}.\n\nMore.", f"{package}'s tab\there {n}."])
             for n in range(20) for package in ("Python", "torch")]
    monkeypatch.setattr(prepare_data, "docstrings", lambda: ("somewhere", files))
    monkeypatch.setattr("lib.tasks.run_script", lambda script, *command: prepare(*command))
    task = find_task("docs")
    texts, labels = read_split(task, "train")
    assert task.labels == ["Python", "torch"] and len(texts) == len(labels) == 72
    assert texts[:3] == [("First of Python line 0.",), ("Python's tab here 0.",),
                         ("First of torch line 0.",)]
    assert labels[:3].tolist() == [0, 0, 1]
    assert read_split(task, "dev")[0] == [
        ("First of Python line 9.",), ("Python's tab here 9.",), ("First of Python line 19.",),
        ("Python's tab here 19.",)]
    texts, labels = read_split(task, "test")
    assert len(texts) == 4 and labels is None


@pytest.fixture
def fox():
    words = "the cafe s 1990 ##s fox sat it on cat . ? \" '"
    return wordpiece_tokenizer([*SPECIALS, *words.split()])


def test_encode_cuts_the_longer_text(fox):
    def encoded(*texts, max_len):
        found = encode_examples(fox, [texts], np.array([0]), max_len)
        return found.ids[0].tolist(), found.first_length.tolist()

    fox.encode_special_tokens = True
    cat, sat, it = (fox.token_to_id(word) for word in ("cat", "sat", "it"))
    assert encoded("cat sat", max_len=9) == ([2, cat, sat, 3], [4])
    assert encoded("cat " * 9, max_len=5) == ([2, *[cat] * 3, 3], [5])
    assert encoded("cat " * 9, "sat", max_len=8) == ([2, *[cat] * 4, 3, sat, 3], [6])
    assert encoded("cat", "sat " * 9, max_len=8) == ([2, cat, 3, *[sat] * 4, 3], [3])
    assert encoded("cat " * 5, "sat " * 4, max_len=8) == ([2, *[cat] * 3, 3, sat, sat, 3], [5])
    assert encoded("", "sat", max_len=8) == ([2, 3, sat, 3], [2])
    assert encoded("[SEP] it", max_len=9) == ([2, 1, 1, 1, it, 3], [6])  # text, not the token
    both = encode_examples(fox, [("cat", "sat it"), ("it", "sat")], np.array([0, 1]), 9)
    assert both.pad_id == 0
    both.pad_id = 7
    batch = both.pad(np.array([1, 0]), "cuda")
    assert list(batch) == ["ids", "token_types", "mask"] and batch["ids"].dtype == np.int64
    assert batch["ids"].tolist() == [[2, it, 3, sat, 3, 7, 7, 7], [2, cat, 3, sat, it, 3, 7, 7]]
    assert batch["token_types"].tolist() == [[0] * 3 + [1] * 5] * 2
    assert batch["mask"].tolist() == [[n < length for n in range(8)] for length in (5, 6)]
    assert list(both.pad(np.array([0]))) == ["ids", "token_types"]  # nothing is padded


def test_batches_are_of_one_length_and_complete():
    lengths = np.random.default_rng(0).integers(3, 128, 5003)
    found = [batches_by_length(lengths, 16, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    for batches in (*found, batches_by_length(lengths, 16)):
        assert sorted(np.concatenate(batches).tolist()) == list(range(5003))
        assert collections.Counter(map(len, batches)) == {16: 312, 11: 1}
        padding = sum(len(b) * lengths[b].max() for b in batches) / lengths.sum() - 1
        assert padding < 0.05
    assert [b.tolist() for b in found[0]] == [b.tolist() for b in found[1]]
    assert {tuple(b) for b in found[0]}.isdisjoint({tuple(b) for b in found[2]})
    longest = [lengths[b].max() for b in found[0]]
    assert np.corrcoef(np.arange(len(longest)), longest)[0, 1] < 0.2  # no order in time


def test_batches_are_sorted_within_64_at_a_time():
    """A batch of 16 has every second length: it is cut from half of the 128 batches' examples."""
    lengths = np.arange(128 * 16)
    found = batches_by_length(lengths, 16, np.random.default_rng(0))
    assert np.mean([np.ptp(lengths[batch]) for batch in found]) == pytest.approx(2 * 15, abs=2)


def test_a_step_is_split_evenly_and_every_example_counts_once(workdir):
    """Three micro-batches of 8 examples; of the last 2 examples one micro-batch has none."""
    ids = [np.array([2, n, 3]) for n in range(10)]
    examples = Examples(ids, np.full(10, 3), np.arange(10), 0)
    config = argparse.Namespace(seed=1, batch_size=8, accumulation=3, train_examples=0,
                                device="cpu")
    batches = TrainingBatches(examples, config)
    assert [batches.loss_weight(0, n) for n in range(3)] == [3 / 8, 3 / 8, 2 / 8]
    assert [batches.loss_weight(1, n) for n in range(3)] == [1 / 2, 1 / 2, 0]
    counted = [label for step in (0, 1) for n in range(3) if batches.loss_weight(step, n)
               for label in batches.get(step, n)["labels"].tolist()]
    assert sorted(counted) == list(range(10)) and len(batches.get(1, 2)["ids"]) == 1
    config.train_examples = 4
    chosen = TrainingBatches(examples, config).chosen.tolist()
    config.seed = 2
    assert chosen == TrainingBatches(examples, config).chosen.tolist() and len(chosen) == 4


def test_a_malformed_squad_file(tmp_path):
    path = tmp_path / "train-v1.1.json"
    data = squad_file(path)
    text, question = path.read_text(), data["data"][0]["paragraphs"][0]["qas"][1]
    cases = [(text[:300], f"line {text[:300].count(chr(10)) + 1} column"),
             ("[]", "no JSON object"), ("\xff", "not readable"),
             ("[" * 100_000, "not readable")]
    for good, bad in (('"answer_start": 4', '"answer_start": "4"'), ('"no cat ?"', "null"),
                      ('"text": "cat"', '"text": 5'), ('"context": "', '"context": ["a"], "b": "')):
        cases.append((text.replace(good, bad), "not a file of SQuAD 1.1: "))
    cases += [(text.replace('"answer_start": 4', f'"answer_start": {start}'),
               "question q0 has no answer in its paragraph") for start in (5, -128, 10**30)]
    cases += [(text.replace('"q0"', wrong), f"not a file of SQuAD 1.1: {words}") for wrong, words in
              (("5", "TypeError: question 5: 5 is no text"), ('["q"]', "TypeError: question ['q']"),
               (r'"\ud800"', "UnicodeEncodeError: "))]
    cases += [(text.replace('"text": "cat"', '"text": ""'), "question q0 has no answer"),
              (text.replace('"q0"', '"q1"'), "2 questions have the id 'q1'"),
              ('{"data": []}', "no question in it")]
    for change, message in [(lambda: question.update(answers=[]), "question q1 has no answer"),
                            (lambda: question.pop("answers"), "not a file of SQuAD 1.1: KeyError")]:
        change()
        cases.append((json.dumps(data), message))
    for content, message in cases:
        path.write_bytes(content.encode("latin-1"))
        with pytest.raises(UserError) as error:
            read_squad(path)
        assert message in str(error.value) and "\n" not in str(error.value)


def begins(tokenizer, windows):
    """The index of the paragraph's token that each window begins with."""
    return [tokenizer.encode(question.context).offsets.index(tuple(offsets[0])) if len(offsets)
            else 0 for question, offsets in zip(windows.question_of_window, windows.offsets,
                                                strict=True)]


FOX = "The Café's 1990s fox — \"Ünïcode\" — sat.  It sat on  the cat."


@pytest.mark.parametrize("answer, fate", [
    ("Café's 1990s fox", "exact"), ("1990", "exact"), ("\"Ünïcode\" — sat.", "exact"),
    ("cat", "exact"), ("It sat on  the", "exact"), (FOX, "in no window"),
    ("1990s f", "cuts a token"), ("99", "cuts a token"), ("  ", "in no window")])
def test_answers_come_back_through_windows(fox, answer, fate):
    """Windows have 13 tokens, 7 of the paragraph, and begin 2 apart; the last one has its end."""
    question = Question("q", "it sat?", FOX, [(FOX.index(answer), answer)])
    found = make_windows(fox, [question], 13, 2)
    tokens = fox.encode(FOX).ids
    assert len(found.ids) == math.ceil((len(tokens) - 7) / 2) + 1
    seen = set()
    for n, ids in enumerate(found.ids):
        begin = begins(fox, found)[n]
        head = fox.encode("[CLS] it sat ? [SEP]").ids
        assert ids.tolist() == [*head, *tokens[begin:begin + 7], 3]
        seen.update(range(begin, begin + len(ids) - 6))
    assert seen == set(range(len(tokens)))
    labelled = np.flatnonzero(found.labels[:, 0])
    assert (len(labelled) == 0) == (fate == "in no window")
    for n in labelled:
        only = np.where(np.arange(len(found.ids)) == n, 0, -np.inf)
        texts, _ = best_answers(found, np.column_stack([only, found.labels]))
        assert found.labels[n, 1] < found.lengths[n] - 1  # not on the [SEP]
        assert (texts["q"] == answer) == (fate == "exact")


def test_a_window_steps_over_nothing_and_a_long_question_is_cut(fox):
    """The step is no more than what a window holds."""
    questions = [Question("q", "it " * 90, text, [(0, "The")]) for text in (FOX, "")]
    found = make_windows(fox, questions, 40, 128)
    assert all(ids[:22].tolist() == [2, *[12] * 20, 3] for ids in found.ids)
    assert begins(fox, found) == [0, 17, 0]
    assert [question.context for question in found.question_of_window] == [FOX, FOX, ""]
    assert len(found.ids[2]) == 23
    found = make_windows(fox, questions[:1], 200, 128)
    assert found.first_length.tolist() == [66]  # 64 tokens of the question


def max_context_by_hand(spans, position):
    """As run_squad.py has it, token by token; spans: (start, length)."""
    best, window = None, None
    for n, (start, length) in enumerate(spans):
        end = start + length - 1
        if not start <= position <= end:
            continue
        score = min(position - start, end - position) + 0.01 * length
        if best is None or score > best:
            best, window = score, n
    return window


@pytest.mark.parametrize("room, stride", [(320, 128), (9, 1), (9, 4), (9, 9), (110, 64), (500, 3)])
def test_an_answer_starts_where_it_has_most_context(fox, room, stride):
    """One window of each token, as run_squad.py chooses it."""
    rng = random.Random(room)
    for total in (1, room - 1, room, room + 1, rng.randrange(2000), rng.randrange(2000)):
        question = Question("q", "it", "cat " * total, [(0, "cat")])
        found = make_windows(fox, [question], room + 4, stride)
        spans, start = [], 0
        while not spans or sum(spans[-1]) < total:  # run_squad.py's windows
            spans.append((start, min(room, total - start)))
            start += min(spans[-1][1], stride)
        assert found.lengths.tolist() == [length + 4 for _, length in spans]
        windows = [max_context_by_hand(spans, t) for t in range(total)]
        for n, (start, length) in enumerate(spans):
            expected = [t for t in range(start, start + length) if windows[t] == n]
            assert [start + at - 3 for at in range(*found.starts[n])] == expected


def test_the_best_window_answers(fox):
    questions = [Question(name, "it?", FOX, [(0, "The")]) for name in "qr"]
    found = make_windows(fox, questions, 12, 7)
    of_q = [n for n, question in enumerate(found.question_of_window) if question.id == "q"]
    predictions = np.zeros((len(found.ids), 3))
    predictions[:, 0] = -np.inf
    for n, score in zip(of_q, (1.0, 3.0, 2.0), strict=False):
        first = found.first_length[n]  # the window's first token
        predictions[n] = score, first, first
    texts, scores = best_answers(found, predictions)
    offsets = fox.encode(FOX).offsets[begins(fox, found)[of_q[1]]]
    assert texts == {"q": FOX[slice(*offsets)], "r": ""} and scores == {"q": 3, "r": -np.inf}


@pytest.mark.skipif(not (SHARED / "squad").is_dir(), reason="no SQuAD on this machine")
def test_squad_gold_answers_come_back():
    """Dev's first answers score 100. Labelled in windows and mapped back they are the same text,
    and so is a tenth of train's, unless an answer ends inside a token."""
    tokenizer = load_tokenizer(SHARED / "bert-vocab/vocab.txt")
    for split, every, n_windows, n_wrong in (("dev", 1, 10833, 34), ("train", 10, None, None)):
        questions = read_squad(SHARED / f"squad/{split}-v1.1.json")
        kept = set(list(dict.fromkeys(q.context for q in questions))[::every])
        questions = [q for q in questions if q.context in kept]
        gold = {q.id: q.answers[0][1] for q in questions}
        assert score_squad(questions, gold) == {"exact_match": 100, "f1": 100}
        found = make_windows(tokenizer, questions, 384, 128)
        assert n_windows in (None, len(found.ids))
        best = np.where(found.labels[:, 0] > 0, 0, -np.inf)
        back, _ = best_answers(found, np.column_stack([best, found.labels]))
        wrong = [key for key, text in gold.items() if back[key] != text]
        assert n_wrong in (None, len(wrong)) and 0 < len(wrong) < 0.005 * len(gold)
        assert all(gold[key] in back[key] for key in wrong)


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
    """Score by hand. An article has no letter, digit or _ beside it."""
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
    question = Question("q", "?", "", [(0, text) for text in references])
    found = score_squad([question], {"q": prediction})
    exact, f1 = official_scores(prediction, references)
    assert found == pytest.approx({"exact_match": exact, "f1": f1})


def test_squad_scores_are_means():
    """Known numbers: the F1 of 2 words against 3, with 2 in common, is 80; of none it is 0."""
    questions = [Question(n, "?", "", [(0, "big red dog")]) for n in "abcd"]
    said = {"a": "a big red dog.", "b": "red dog", "c": "", "d": "cat"}
    assert score_squad(questions, said) == pytest.approx({"exact_match": 25, "f1": 45})
    rng, words = random.Random(0), ["the", "a", "Red", "dog", "big", "!", "U.S."]
    for _ in range(200):
        texts = [" ".join(rng.choices(words, k=rng.randrange(5))) for _ in range(3)]
        question = Question("q", "?", "", [(0, text) for text in texts[1:]])
        assert tuple(score_squad([question], {"q": texts[0]}).values()) == pytest.approx(
            official_scores(texts[0], texts[1:]))


def class_pairs():
    """Pairs of labels and predictions: random, without correlation, and without class 1."""
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
            found = METRICS[ours](labels, predictions)
            assert found == pytest.approx(expected, abs=1e-12), ours


def test_equal_numbers_share_their_mean_rank():
    labels, predictions = np.array([1, 2, 2, 3]), np.array([1, 2, 3, 4])
    assert METRICS["spearmanr"](labels, predictions) == pytest.approx(0.9 ** 0.5)


@pytest.mark.parametrize("labels, predictions, accuracy, f1, matthews", [
    # true positives, false positives, false negatives, true negatives: 2, 1, 3, 4
    ([1, 1, 1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 1, 0, 0, 0, 0], 0.6, 2 * 2 / (2 * 2 + 1 + 3),
     (2 * 4 - 1 * 3) / math.sqrt(3 * 5 * 5 * 7)),
    ([0, 0, 0, 0], [0, 0, 0, 1], 0.75, 0, 0), ([0, 0], [0, 0], 1, 0, 0),
    ([1, 0], [1, 1], 0.5, 2 / 3, 0)])
def test_class_metrics_of_counted_examples(labels, predictions, accuracy, f1, matthews):
    expected = {"accuracy": accuracy, "f1": f1, "matthews_correlation": matthews}
    for name, value in expected.items():
        assert METRICS[name](np.array(labels), np.array(predictions)) == pytest.approx(value), name


def test_correlations_by_hand():
    """Deviations (-2, -1, 3) and (1, -4, 3) give 11 / sqrt(14 * 26); ranks 1, 2, 3 and 2, 1, 3."""
    labels, predictions = np.array([8.0, 9.0, 13.0]), np.array([3.0, -2.0, 5.0])
    assert METRICS["pearson"](labels, predictions) == pytest.approx(11 / math.sqrt(14 * 26))
    assert METRICS["spearmanr"](labels, predictions) == pytest.approx(0.5)
    for name in ("pearson", "spearmanr"):  # a constant is correlated with nothing
        assert np.isnan(METRICS[name](labels, np.ones(3)))


def test_the_metrics_that_are_official():
    """The first picks the best epoch. The columns are the titles that name them."""
    first = {name: task.metrics[0] for name, task in TASKS.items()}
    assert first == {**dict.fromkeys(TASKS, "accuracy"), "cola": "matthews_correlation",
                     "stsb": "pearson", "squad": "f1"}
    columns = {task.table_title: list(task.table_metrics) for task in TASKS.values()}
    assert columns == {
        "SQuAD 1.1 (EM/F1)": ["exact_match", "f1"], "MNLI-(m/mm)": ["accuracy", "accuracy_mm"],
        "QQP": ["accuracy"], "QNLI": ["accuracy"], "SST-2": ["accuracy"],
        "CoLA (Matt)": ["matthews_correlation"], "MRPC (Acc/F1)": ["accuracy", "f1"],
        "STS-B (P/S)": ["pearson", "spearmanr"], "RTE": ["accuracy"]}
    assert {name: task.scale for name, task in TASKS.items() if task.scale != 100} == {"squad": 1}


def test_submissions_of_mnli_are_of_their_split(tmp_path):
    (tmp_path / "glue/MNLI").mkdir(parents=True)
    task = find_task("mnli", tmp_path)
    assert task.test == {"MNLI-m": "test_matched", "MNLI-mm": "test_mismatched"}
    assert task.file("test_mismatched").name == "test_mismatched.tsv"


@pytest.mark.parametrize("split", ["train", "dev"])
def test_only_training_may_leave_out_rows(tmp_path, split):
    """A dev split is scored as a whole, or not at all."""
    for name in ("train", "dev"):
        rows = ["a\tx", *["b\ty"] * 198, "cut off" if name == split else "b\ty"]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
    task = find_task(str(tmp_path))
    if split == "train":
        assert len(read_split(task, "train")[0]) == 199 and len(read_split(task, "dev")[0]) == 200
    else:
        with pytest.raises(UserError, match=r"dev.tsv:201: 1 fields, expected 2 \(1 of 200"):
            read_split(task, "dev")


def test_a_cell_is_one_field_of_a_table():
    assert tsv_text([["a\tb", "c\r\nd"], [1, 0.5]]) == "a b\tc  d\n1\t0.5\n"


def test_an_answer_has_no_space_around_it():
    """A token of byte-level BPE has the space before its word."""
    question = Question("q", "it?", "the cat sat", [])
    windows = types.SimpleNamespace(questions=[question], question_of_window=[question],
                                    offsets=[np.array([[0, 3], [3, 7], [7, 11]])], first_length=[4])
    assert best_answers(windows, np.array([[1.0, 5, 5]])) == ({"q": "cat"}, {"q": 1.0})


def test_the_first_answer_is_the_label(fox):
    question = Question("q", "it?", "cat sat", [(4, "sat"), (0, "cat")])
    found = make_windows(fox, [question], 16, 8)
    assert found.labels.tolist() == [[5, 5]]  # after [CLS] it ? [SEP] cat


def test_only_the_chosen_examples_are_trained_on(workdir):
    """Each once an epoch, and the same ones in every epoch."""
    ids = [np.array([2, n, 3]) for n in range(10)]
    examples = Examples(ids, np.full(10, 3), np.arange(10), 0)
    config = argparse.Namespace(seed=1, batch_size=2, accumulation=1, train_examples=4,
                                device="cpu")
    batches = TrainingBatches(examples, config)
    assert batches.steps_per_epoch == 2 and batches.chosen.tolist() != [0, 1, 2, 3]
    for epoch in range(3):
        trained = [label for n in range(2) for label in batches.get(2 * epoch + n)["labels"]]
        assert sorted(trained) == batches.chosen.tolist()


@pytest.mark.filterwarnings("ignore")
def test_correlations_equal_scipys():
    """Also with ties, constant input, and input that is almost constant after rounding."""
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    pairs = [rng.normal(size=(2, n)) for n in (2, 3, 10, 300)]
    pairs += [rng.integers(0, 4, (2, n)).astype(float) for n in (5, 30, 300)]  # ties
    pairs += [(rng.integers(0, 26, 99) / 5, rng.normal(size=99)), (np.arange(9.0), np.arange(9.0)),
              (np.arange(9.0), -np.arange(9.0) ** 3), (np.ones(9), np.arange(9.0)),
              (np.arange(9.0), np.full(9, 0.1)), (np.ones(9), np.ones(9)),
              (1e6 + rng.normal(size=50), 1e-9 * rng.normal(size=50))]
    for x, y in pairs:
        for name, theirs in [("pearson", stats.pearsonr), ("spearmanr", stats.spearmanr)]:
            expected = theirs(x, y).statistic
            assert METRICS[name](x, y) == pytest.approx(expected, abs=1e-9, nan_ok=True)
