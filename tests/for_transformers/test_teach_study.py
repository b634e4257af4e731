"""
Run the study of teaching on small models.
"""
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from lib.common.errors import UserError
from results import teach
from tests.for_transformers.small_lessons import WORDS, save_base, write_texts

pytest.importorskip("transformers")
METHODS = {"rows": ["--method=rows"], "sgd": ["--method=rows", "--sgd=True", "--lr=10"],
           "query": ["--method=rows", "--query_lr=1e-3"], "full": ["--method=full", "--lr=1e-3"],
           "lora": ["--method=lora", "--lr=1e-3"]}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory: a decoder, and short texts. A lesson is saved every 4 steps."""
    monkeypatch.chdir(tmp_path)
    save_base("decoder", "decoder")
    write_texts(".")
    monkeypatch.setattr(teach, "SAVE_EVERY", 4)
    monkeypatch.setattr(teach, "COUNTRIES", ",".join(f"France {word}" for word in WORDS[5:]))
    monkeypatch.setattr(teach.Study, "blocks", lambda self, path, most, begin:
                        torch.randint(5, 40, (most, 16), generator=torch.manual_seed(most)))


def run(out, *settings):
    """Run the study. Returns its log, without seconds and the log's own name."""
    teach.main(["--model=decoder", "--ordinary=ordinary.txt", "--wikitext=ordinary.txt",
                "--novels=ordinary.txt", "--dtype=float32", "--facts=6", "--lessons=2",
                "--steps=10", "--batch=4", "--layers=1,2", "--n_keys=16", "--rows=40",
                "--topk=4", "--key_dim=16", "--blocks=8", f"--out={out}", *settings])
    lines = [json.loads(line) for line in Path(out).read_text().splitlines()]
    return [{key: line[key] for key in line.keys() - {"seconds", "out"}} for line in lines]


def run_and_kill(monkeypatch, stop, out, *settings):
    """Run the study until a step of training has begun, counted from 0."""
    predict, calls = teach.ask.predict, iter(range(10_000))

    def kill(model, *args, **inputs):
        if torch.is_grad_enabled() and next(calls) == stop:
            raise KeyboardInterrupt
        return predict(model, *args, **inputs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(teach.ask, "predict", kill)
        run(out, *settings)


@pytest.mark.parametrize(("method", "stop"), [
    ("rows", 3), ("rows", 7), *((method, 17) for method in METHODS)])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(place, monkeypatch, method, stop):
    """Stop before the first save, after it, and in the second lesson."""
    if method == "lora":
        pytest.importorskip("peft")
    expected = run("whole.jsonl", *METHODS[method])
    assert len(expected) == 3 and expected[1]["loss"] != expected[2]["loss"]
    run_and_kill(monkeypatch, stop, "cut.jsonl", *METHODS[method])
    assert not Path("cut.jsonl").exists()
    if stop > 4:
        with pytest.raises(UserError, match="other settings"):
            run("cut.jsonl", *METHODS[method], "--batch=3")
    assert run("cut.jsonl", *METHODS[method]) == expected
    assert not list(Path(".").glob("*.saved"))


def test_each_sentence_of_earlier_lessons_counts_as_ordinary_text(place, monkeypatch):
    """An interrupted run has the same counts."""
    choose_rows, seen = teach.choose.choose_rows, []
    settings = "--keep_lessons=True", "--others=5", "--lessons=3"

    def record(model, data, counts, batches, *args, **score):
        seen.append((batches, {n: count.tolist() for n, count in counts.items()}))
        return choose_rows(model, data, counts, batches, *args, **score)

    monkeypatch.setattr(teach.choose, "choose_rows", record)
    run("whole.jsonl", *settings)
    assert [batches for batches, _ in seen] == [8 + 5, 8 + 5 + 6 * 3, 8 + 5 + 6 * 3 * 2]
    run_and_kill(monkeypatch, 17, "cut.jsonl", *settings)
    run("cut.jsonl", *settings)
    assert seen[-1] == seen[2] != seen[1]


def test_sentences_in_one_row_do_not_see_each_other(place):
    """The gradients are those of a padded batch, and of a batch with one sentence more they are
    not."""
    model, tokenizer = teach.ask.load_model("decoder", "cpu", attn_implementation="eager")
    model.double().requires_grad_(True)
    study, gradients = SimpleNamespace(model=model), []
    rows = []
    data = teach.ask.encode([("who is ann ?", "red"), ("cy is", "old blue"), ("eve is", "shy")],
                            tokenizer, end=False)
    assert not data[1].all()
    model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    for predict, pick in ((teach.ask.predict, [0, 1]), (teach.Study.predict, [0, 1]),
                          (teach.Study.predict, [0, 1, 2])):
        of = model if predict is teach.ask.predict else study
        logits, labels = predict(of, *teach.ask.take(data, pick, "cpu"))
        F.cross_entropy(logits, labels, reduction="sum").backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    assert rows[1:] == [1, 1] and rows[0] > 1
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-9)
    assert (gradients[2] - gradients[0]).norm() > 0.1 * gradients[0].norm()
