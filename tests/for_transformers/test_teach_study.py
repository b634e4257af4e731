"""
Run the study of teaching on small models.
"""
import json
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize(("method", "stop"), [
    ("rows", 3), ("rows", 7), *((method, 17) for method in METHODS)])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(place, monkeypatch, method, stop):
    """Stop before the first save, after it, and in the second lesson."""
    if method == "lora":
        pytest.importorskip("peft")
    expected = run("whole.jsonl", *METHODS[method])
    assert len(expected) == 3 and expected[1]["loss"] != expected[2]["loss"]
    predict, calls = teach.ask.predict, iter(range(10_000))

    def kill(model, *args):
        if torch.is_grad_enabled() and next(calls) == stop:
            raise KeyboardInterrupt
        return predict(model, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(teach.ask, "predict", kill)
        run("cut.jsonl", *METHODS[method])
    assert not Path("cut.jsonl").exists()
    if stop > 4:
        with pytest.raises(UserError, match="other settings"):
            run("cut.jsonl", *METHODS[method], "--batch=3")
    assert run("cut.jsonl", *METHODS[method]) == expected
    assert not list(Path(".").glob("*.saved"))
