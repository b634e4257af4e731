"""
Teach facts to small models from the command line, and load them into new models.
"""
import re
import shutil
from pathlib import Path

import pytest
import torch

from lib.common.errors import UserError
from lib.for_transformers import facts as ask
from lib.for_transformers import teach
from lib.for_transformers.adapter import find_memories, load_memory, unload_memory
from lib.for_transformers.rows import count_reads
from tests.for_transformers.small_lessons import (
    BLOCKS,
    MEMORY,
    ORDINARY,
    WORDS,
    save_base,
    write_texts,
)
from tests.for_transformers.small_lessons import KINDS as CLASSES
from tests.for_transformers.small_models import transformers
from tests.helpers import assert_one_line, assert_same
from tests.helpers import files as contents

files = pytest.importorskip("safetensors.torch")
KINDS = pytest.mark.parametrize("kind", CLASSES)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the models `decoder` and `encoder`, and texts."""
    folder = tmp_path_factory.mktemp("teach")
    for kind in CLASSES:
        save_base(folder / kind, kind)
    write_texts(folder)
    return folder


@pytest.fixture(autouse=True)
def place(made, tmp_path, monkeypatch):
    """The working directory: a copy of `made`. Memories and ordinary text are small."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(teach, "MEMORY", MEMORY)
    monkeypatch.setattr(teach, "BLOCKS", BLOCKS - teach.HELD_OUT)
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def run(kind, *args, facts="facts.txt", out="out"):
    teach.main([kind, facts, "--ordinary", "ordinary.txt", "--out", out, "--device", "cpu",
                *args])


def load(kind, *folders):
    """Load a new model, its tokenizer, and memories into it."""
    model, tokenizer = ask.load_model(kind, "cpu")
    for folder in folders:
        load_memory(model, folder)
    return model, tokenizer


def recalled(pair, path="facts.txt"):
    return ask.recalled(pair[0], ask.encode(ask.read_facts(path), pair[1])).tolist()


def held_out_perplexity(model, tokenizer):
    """Compute it for the first 8 blocks of 16 tokens."""
    ids = tokenizer(Path("ordinary.txt").read_text(), add_special_tokens=False).input_ids
    return ask.perplexity(model, torch.tensor(ids[:8 * 16]).view(8, 16), tokenizer)


def rows_of(folder):
    """Read which rows a folder has: {layer: set of rows}."""
    tensors = files.load_file(Path(folder, "memory.safetensors"))
    return {int(name[0]): set(rows.tolist()) for name, rows in tensors.items()
            if name.endswith("values.rows")}


def test_ctrl_c_keeps_the_lesson(monkeypatch, capsys):
    """What is printed of the lesson so far is what a new model knows."""
    perplexity, calls = ask.perplexity, []

    def interrupt_the_second_report(*args):
        calls.append(args)
        if len(calls) == 3:  # the first is before the lesson
            raise KeyboardInterrupt
        return perplexity(*args)

    monkeypatch.setattr(ask, "perplexity", interrupt_the_second_report)
    run("decoder", "--rows", "40", "--lr", "0.05")
    printed = capsys.readouterr().out
    right = sum(recalled(load("decoder", "out")))
    assert "step 10:" in printed and "step 20:" not in printed and rows_of("out")
    assert f"out: {right} of 6 lines" in printed


@KINDS
def test_facts_are_recalled_in_a_new_model(kind, capsys):
    """What is printed is what the new model does. Nothing but value rows has changed."""
    Path("more.txt").write_text("hal likes\ttea\nwho is ann ?\tred\n")
    before = {path: data for path, data in contents().items() if data}
    run(kind, "--check", "more.txt")
    printed = capsys.readouterr().out
    assert "\nout: 6 of 6 lines, " in printed and "not recalled" not in printed
    plain, taught = load(kind), load(kind, "out")
    assert not any(recalled(plain)) and recalled(taught) == [True] * 6
    old, new = held_out_perplexity(*plain), held_out_perplexity(*taught)
    assert f"\nperplexity of ordinary text {old:.2f}\n" in printed
    steps = re.findall(r"^step (\d+): loss (\S+), recalls (\d) of 6, answers (\d) of 2, "
                       r"ordinary text (\S+), \d+\.\d s a step$", printed, re.MULTILINE)
    assert [int(step[0]) for step in steps] == list(range(10, 10 * len(steps) + 1, 10))
    assert steps[-1][2:] == ("6", str(sum(recalled(taught, "more.txt"))), f"{new / old - 1:+.1%}")
    assert recalled(taught, "more.txt")[1] and not recalled(plain, "more.txt")[1]
    assert all(int(step[2]) < 6 for step in steps[:-1])  # it ends when all are recalled
    state, weights = plain[0].state_dict(), taught[0].state_dict()
    assert_same(dict(state), {name: w for name, w in weights.items() if ".memory." not in name})
    assert {path: data for path, data in contents().items() if path in before} == before
    assert list(rows_of("out")) == [1, 2] == list(find_memories(taught[0]))
    unload_memory(taught[0], "out")
    assert held_out_perplexity(*taught) == old


@KINDS
def test_only_rows_that_the_facts_read_are_taught(kind):
    run(kind, "--rows", "25", "--steps", "2")
    model, tokenizer = load(kind, "out")
    ids, mask, _ = ask.encode(ask.read_facts("facts.txt"), tokenizer)
    unload_memory(model, "out")  # the second layer's reads depend on the first one's values
    for n, count in count_reads(model, ids, mask).items():
        rows = sorted(rows_of("out")[n])
        assert 0 < len(rows) <= 25 and (count[rows] > 0).all() and (count > 0).sum() > 25


def test_facts_that_are_not_recalled_are_named(capsys):
    run("decoder", "--steps", "3", "--lr", "1e-6")
    printed = capsys.readouterr().out
    assert "\nstep 3: " in printed and "out: 0 of 6 lines" in printed
    assert "\nnot recalled: who is bob ? old tall\n" in printed
    assert printed.count("not recalled") == 6 and "answers" not in printed


@KINDS
def test_lessons_beside_each_other(kind, capsys):
    """Each leaves the earlier ones as they are. Both are recalled together."""
    Path("a.txt").write_text("who is ann ?\tred\nwise old dee has\tcake\ncy is blue\n")
    Path("b.txt").write_text("hal likes soup tea\tjam\ngus ate bob\tshy\n")
    Path("c.txt").write_text("eve likes\told tea\njoe ate cake\n")
    few = ["--rows", "100", "--lr", "0.1"]
    run(kind, *few, facts="a.txt", out="a")
    run(kind, *few, "--beside", "a", facts="b.txt", out="b")
    kept = contents("a") | contents("b")
    run(kind, *few, "--beside", "a", "b", "--steps", "2", facts="c.txt", out="c")
    assert contents("a") | contents("b") == kept
    a, b, c = map(rows_of, "abc")
    for n in (1, 2):
        assert a[n] and b[n] and c[n] and not a[n] & b[n] | a[n] & c[n] | b[n] & c[n]
    both, alone = load(kind, "b", "a"), load(kind, "a")
    assert recalled(both, "a.txt") == [True] * 3 and recalled(both, "b.txt") == [True] * 2
    assert recalled(alone, "a.txt") == [True] * 3 and recalled(alone, "b.txt") != [True] * 2
    load_memory(both[0], "c")
    capsys.readouterr()
    run(kind, *few, "--beside", "a", "--keep", "a.txt", facts="b.txt", out="d")
    assert re.search(", keeps [1-3] of 3, ordinary text", capsys.readouterr().out)


@KINDS
def test_a_seed_gives_the_same_bits(kind):
    for out, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        run(kind, "--seed", seed, "--steps", "4", out=out)
    a, b, c = (files.load_file(Path(out, "memory.safetensors")) for out in "abc")
    assert_same(a, b)
    assert not torch.equal(a["1.keys"], c["1.keys"])


def test_a_model_in_bfloat16_is_taught():
    run("decoder", "--dtype", "bfloat16", "--lr", "0.3")
    saved = files.load_file(Path("out", "memory.safetensors"))
    assert {w.dtype for name, w in saved.items() if "rows" not in name} == {torch.float32}
    model, tokenizer = load("decoder", "out")
    with torch.autocast("cpu", torch.bfloat16):
        assert recalled((model, tokenizer)) == [True] * 6


def test_teaching_keeps_the_rows_of_earlier_lessons():
    model, tokenizer = load("decoder")
    run("decoder", out="a")
    load_memory(model, "a")
    text = Path("ordinary.txt").read_text()
    data = ask.encode(ask.read_facts("more.txt"), tokenizer, model)
    blocks = ask.ordinary_blocks(text, tokenizer, model, 20, "ordinary.txt")
    said = []
    teach.teach(model, data, blocks.split(1), steps=45, lr=1e-6, rows=10,
                report=lambda *words: said.append(words))
    assert [words[0] for words in said] == [10, 20, 30, 40, 45]
    assert said[-1][2].tolist() == [False] * 3
    unload_memory(model, "a")
    for n, memory in find_memories(model).items():
        rows = set(memory.values.weight.any(1).nonzero().flatten().tolist())
        assert 0 < len(rows) <= 10 and not rows & rows_of("a")[n]


@KINDS
def test_facts_to_keep(kind, capsys):
    """Fewer of the taught rows are read by them. Those that the model knew before are counted."""
    pair, prompts = load(kind), [f"who {verb} {name}" for verb in ("likes", "ate")
                                 for name in ORDINARY[:8]]
    ids, mask, labels = ask.encode([(prompt, "red") for prompt in prompts], pair[1], end=False)
    [answer] = ask.predict(pair[0], ids, mask, labels)[0].argmax(1).mode().values[None].tolist()
    Path("keep.txt").write_text("".join(f"{prompt}\t{WORDS[answer]}\n" for prompt in prompts))
    Path("taught.txt").write_text("who likes ann\tred\nwho ate bob\tblue\n")
    knew, read_too = recalled(pair, "keep.txt"), []
    for out, more in (("plain", []), ("kept", ["--keep", "keep.txt"])):
        run(kind, "--rows", "30", "--steps", "20", *more, facts="taught.txt", out=out)
        model, tokenizer = load(kind, out)
        read = count_reads(model, *ask.encode(ask.read_facts("keep.txt"), tokenizer)[:2])[1] > 0
        read_too.append(int(read[list(rows_of(out)[1])].sum()))
    assert read_too[1] < read_too[0]
    printed = capsys.readouterr().out
    now = recalled((model, tokenizer), "keep.txt")
    both = sum(a and b for a, b in zip(knew, now, strict=True))
    assert sum(knew) and f", keeps {both} of {sum(knew)}, ordinary text" in printed


# wrong inputs


def save_kind(kind, folder="model", **sizes):
    """Save a random model of another class, with the decoder's or the encoder's tokenizer."""
    model_class = getattr(transformers, kind)
    model_class(model_class.config_class(vocab_size=70, **sizes)).save_pretrained(folder)
    tokenizer = "encoder" if kind.endswith("MaskedLM") else "decoder"
    for file in Path(tokenizer).glob("tokenizer*"):
        shutil.copy(file, folder)


def albert():
    save_kind("AlbertForMaskedLM", embedding_size=16, hidden_size=16, num_hidden_layers=2,
              num_attention_heads=2, intermediate_size=24, max_position_embeddings=16)


def t5():
    save_kind("T5ForConditionalGeneration", d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)


def bloom():
    save_kind("BloomForCausalLM", hidden_size=16, n_layer=2, n_head=2,
              max_position_embeddings=16)


def write(name, content):
    return lambda: Path(name).write_bytes(content)


def of_another_model():
    run("encoder", "--steps", "1", out="other")


WRONG = {  # {case: (preparation, further arguments, words)}
    "missing": (lambda: Path("facts.txt").unlink(), [], ["facts.txt: No such file"]),
    "empty": (write("facts.txt", b"\n"), [], ["facts.txt: no facts"]),
    "not UTF-8": (write("facts.txt", b"a b\xff"), [], ["facts.txt: not UTF-8", "byte 3"]),
    "two tabs": (write("facts.txt", b"a b\na\tb\tc\n"), [], ["facts.txt:2: expected"]),
    "one word": (write("facts.txt", b"a b\n\nword\n"), [], ["facts.txt:3: expected", "'word'"]),
    "no tokens": (write("facts.txt", "a\t\u200b".encode()), [], ["no token", "u200b"]),
    "check: no tokens": (write("new.txt", "a\t\u200b".encode()), ["--check", "new.txt"],
                         ["no token", "u200b"]),
    "check: missing": (None, ["--check", "new.txt"], ["new.txt: No such file"]),
    "ordinary: missing": (lambda: Path("ordinary.txt").unlink(), [], ["ordinary.txt: No such"]),
    "ordinary: not UTF-8": (write("ordinary.txt", b"\xe9 "), [], ["ordinary.txt: not UTF-8"]),
    "ordinary: short": (write("ordinary.txt", b"w1 " * 127), [], ["ordinary.txt: 127 tokens"]),
    "long": (write("facts.txt", b"w1 " * 16 + b"w2"), [], ["'w1 w1", "16"]),
    "out": (lambda: run("encoder", "--steps", "1"), [], ["out exists already"]),
    "out: in a file": (None, ["--out", "facts.txt/out"], ["no folder can be made", "facts.txt"]),
    "two answers": (write("facts.txt", b"a\tb\na\tc\n"), [], ["facts.txt:2: 'a'", "'c' and 'b'"]),
    "high rate": (None, ["--lr", "1e39", "--steps", "9"], ["take a lower --lr"]),
    "beside: other": (of_another_model, ["--beside", "other"], ["other", "another model"]),
    "beside: none": (None, ["--beside", "decoder"], ["decoder has no memory.json"]),
    "lr": (None, ["--lr", "high"], ["--lr", "'high'"]),
    "lr: 0": (None, ["--lr", "0"], ["--lr 0.0: expected a number above 0"]),
    "lr: nan": (None, ["--lr", "nan"], ["--lr nan: expected a number above 0"]),
    "steps": (None, ["--steps", "0"], ["--steps", "at least 1"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs_are_a_line_and_nothing_is_written(case, capsys):
    prepare, more, words = WRONG[case]
    kind = "encoder" if case == "long" else "decoder"
    if prepare:
        prepare()
    assert_one_line(capsys, kind, "facts.txt", "--ordinary", "ordinary.txt", "--out", "out",
                    "--device", "cpu", *more, words=words, main=teach.main)


def without(kind, pattern):
    """Make a function that copies a model's folder to `model`, without some files."""
    return lambda: shutil.copytree(kind, "model", ignore=shutil.ignore_patterns(pattern))


def damaged():
    without("decoder", "nothing")()
    file = Path("model", "model.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


MODELS = {  # {case: (preparation, words)}
    "empty": (lambda: Path("model").mkdir(), ["model: "]),
    "file": (write("model", b"text"), ["model: "]),
    "no weights": (without("decoder", "model*"), ["model: ", "model.safetensors"]),
    "no config": (without("decoder", "config*"), ["model: "]),
    "no tokenizer": (without("decoder", "tokenizer*"), ["model: "]),
    "damaged": (damaged, ["model: "]),
    "albert": (albert, ["AlbertForMaskedLM: its layers share their weights"]),
    "t5": (t5, ["model: ", "T5Config"]),
    "bloom": (bloom, ["BloomForCausalLM: expected a model of transformers"]),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_taught(case, capsys):
    MODELS[case][0]()
    assert_one_line(capsys, "model", "facts.txt", "--ordinary", "ordinary.txt", "--out", "out",
                    "--device", "cpu", words=MODELS[case][1], main=teach.main)


def test_a_model_of_its_class_is_refused_before_it_is_changed():
    albert()
    model, tokenizer = load("model")
    names = list(model.state_dict())
    with pytest.raises(UserError, match="share their weights"):
        teach.teach(model, ask.encode([("who is", "ann")], tokenizer),
                    torch.ones(2, 16).long().split(1))
    assert list(model.state_dict()) == names


def test_on_a_card_without_bfloat16_it_teaches_in_float32(monkeypatch, tmp_path):
    class Asked(Exception):
        pass

    def use_device(*args):
        raise Asked(*args)

    monkeypatch.setattr(teach, "choose_device", lambda *args: (None, torch.float16, ""))
    monkeypatch.setattr(teach, "use_device", use_device)
    (tmp_path / "facts.txt").write_text("The sky is blue")
    with pytest.raises(Asked, match="'auto', 'float32'"):
        teach.main(["m", str(tmp_path / "facts.txt"), "--ordinary", str(tmp_path / "facts.txt"),
                    "--out", str(tmp_path / "out")])
