"""
What slots know: measure.py's slots and browse, beside reads of one sequence after the other; fill.
"""
import collections
import json
import random
import shutil
from pathlib import Path

import pytest
import torch

import measure
from lib.corpus import Corpus, cut_split
from lib.slots import page_html
from lib.tokenizer import load_tokenizer
from lib.usage import watch_reads
from lib.weights import load_model
from model import value_tables
from tests.helpers import PIECES, prepare, save_model, tiny_bert, write_settings


def data_of(page):
    """Return the text in a page that holds its data."""
    return page.split('id="data">')[1].split("</script>")[0]


def test_no_text_breaks_out_of_the_page():
    text = '</script><img/src=x/onerror="window.broken=1"><!--<script>'
    data = data_of(page_html({"title": text}))
    assert "<" not in data
    assert json.loads(data) == {"title": text}


def save_run(**settings):
    """Save a random model in out/run, with predictions that differ. Returns it."""
    model = tiny_bert(vocab_size=len(PIECES), init_std=0.5, **settings).eval()
    save_model("out/run", model)
    shutil.copy("vocab.txt", "out/run")
    return model


@pytest.fixture
def run(workdir):
    """Write out/run with 9 slots in layer 2. A sequence is in its corpus three times."""
    save_run(memory_layers=(2,), n_keys=3)
    write_settings("out/run", seq_len=16, dataset="books", trained_on=[])
    twice = "the cat sat . the mat .\n" * 6  # two lines are a sequence
    others = random.Random(0).choices(["the", "cat", "sat", "mat", "."], k=60)
    Path("books.txt").write_text(f"cat\n\nmat\n\n{twice}{' '.join(others)}\n")
    prepare("text", "books", "books.txt", "--vocab", "vocab.txt")


def test_slots_are_those_that_contexts_read_most(run):
    """A context that stands twice is listed once."""
    measure.main(["slots", "out/run", "--layer", "2", "--contexts", "4", "--device", "cpu",
                  "--out", "s"])
    measure.main(["browse", "out/run", "--contexts", "4", "--device", "cpu", "--out", "m.html"])
    page = json.loads(data_of(Path("m.html").read_text(encoding="utf-8")))
    [layer] = page["layers"]

    model, tokenizer = load_model("out/run").eval(), load_tokenizer("out/run")
    counts, top1, reads = collections.Counter(), collections.Counter(), {}
    strength = collections.defaultdict(dict)  # {slot: {context: weight}}
    text = []
    tables = value_tables(model)
    with torch.no_grad(), watch_reads(tables, lambda *read: reads.update({read[0]: read[1:]})):
        for ids in torch.from_numpy(cut_split(Corpus("books"), "test", 16)):
            model.bert(ids[None])
            words = [tokenizer.id_to_token(i) for i in ids.tolist()]
            for t, (slots, weights) in enumerate(zip(*reads[2], strict=True)):
                context = "".join([*words[max(0, t - 8):t], f"«{words[t]}»", *words[t + 1:t + 9]])
                text.append(context)
                counts.update(slots.flatten().tolist())
                top1.update(slots[:, 0].tolist())
                for slot in slots.unique().tolist():
                    weight = weights[slots == slot].sum().item()
                    strength[slot][context] = max(strength[slot].get(context, 0), weight)
    assert len(set(text)) <= len(text) - 32

    found = json.loads(Path("s.json").read_text())
    most = sorted((counts[slot] for slot in range(9)), reverse=True)
    assert [slot["reads"] for slot in found] == most
    for slot in found:
        assert (slot["reads"], slot["top1"]) == (counts[slot["slot"]], top1[slot["slot"]])
        for (weight, context), (token, rounded) in zip(
                slot["contexts"], layer["contexts"][slot["slot"]], strict=True):
            assert context.replace(" ", "") == text[token]
            assert rounded == round(weight, 2)
            assert strength[slot["slot"]][text[token]] == pytest.approx(weight, rel=1e-5)
    for slot, contexts in enumerate(layer["contexts"]):
        best = sorted(strength[slot].values(), reverse=True)[:4]
        assert [weight for _, weight in contexts] == pytest.approx(best, abs=0.006)
        assert (layer["read"][slot], layer["top1"][slot]) == (counts[slot], top1[slot])
    pieces = [page["pieces"][n].strip() for n in page["text"]]
    assert all(f"«{piece}»" in context for piece, context in zip(pieces, text, strict=True))


def test_fill_guesses_from_the_text_between_cls_and_sep(workdir, capsys):
    """A model without memory needs no corpus."""
    model = save_run()
    measure.main(["fill", "out/run", "the [MASK] sat", "--device", "cpu"])
    with torch.no_grad():
        best = model(torch.tensor([[2, 5, 4, 7, 3]]))[0, 2].softmax(0).topk(5)
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    lines = map(str.split, capsys.readouterr().out.splitlines())
    assert [line for line in lines if line[0].endswith("%")] == [
        [f"{p:.1%}", PIECES[i]] for p, i in pairs]


def test_fill_shows_what_else_reads_a_slot(run, capsys):
    measure.main(["slots", "out/run", "--layer", "2", "--contexts", "2", "--out", "s"])
    capsys.readouterr()
    measure.main(["fill", "out/run", "the [MASK] cat", "--contexts", "2"])
    text = capsys.readouterr().out
    slot = int(text.split("layer 2, head 1: slot ")[1].split()[0])
    [contexts] = [found["contexts"] for found in json.loads(Path("s.json").read_text())
                  if found["slot"] == slot]
    assert len(contexts) == 2
    for weight, context in contexts:
        assert f"({weight:.2f}) {context}" in text
