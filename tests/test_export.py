"""
Exported folders: transformers loads them, and so does this project.
"""
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from for_transformers.add_memory import find_layers
from for_transformers.export import export, main
from lib.errors import UserError
from lib.tokenizer import SPECIALS
from lib.weights import load_model, load_run
from model import BertConfig, build_model, value_tables
from tests.helpers import assert_near, assert_same, save_model
from values import LazyAdam

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

HEADS = {None: "MaskedLM", "classifier": "SequenceClassification", "span": "QuestionAnswering"}


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    """A folder for the code that transformers copies from models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE",
                      str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", [*sys.path])
        yield


def batch():
    """Draw three padded sentences: ids, a mask of 0 and 1, and token types."""
    mask = torch.arange(20) < torch.tensor([[20], [13], [5]])
    return torch.randint(40, (3, 20)), mask.long(), torch.randint(2, (3, 20))


def exported(tmp_path, head=None, labels=("a", "b", "c"), words=35, **settings):
    """Make a model whose weights all show in its outputs, save it as a run, export it to out/."""
    torch.manual_seed(0)
    sizes = {"vocab_size": words + 5, "n_layer": 3, "n_head": 4, "d_model": 32, "d_ff": 64,
             "max_len": 24, "n_keys": 4, "memory_heads": 2, "topk": 3, "key_dim": 4,
             "dropout": 0.0}
    labels = labels if head == "classifier" else ()
    model = build_model(BertConfig(**{**sizes, **settings}), head, labels)
    for name, p in model.named_parameters():
        nn.init.normal_(p, float("norm" in name and "weight" in name), 0.4)
    with torch.no_grad():
        model.train()(*batch())  # the batch norm has statistics now
    run = tmp_path / "run"
    run.mkdir()
    (run / "vocab.txt").write_text("\n".join([*SPECIALS, *(f"w{n}" for n in range(words))]) + "\n")
    settings = {"task": "RTE", "first_step": 0, "pooler_trained": False}
    (run / "config.json").write_text(json.dumps(settings))
    lines = [{"step": step, "perplexity": 9.0 + step, "accuracy": 0.5, "layers": {}}
             for step in (2, 4)]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_model(run, model.eval(), labels)
    main([str(run), str(tmp_path / "out")])
    return model, tmp_path / "out"


def load(folder, head=None):
    auto = getattr(transformers, f"AutoModelFor{HEADS[head]}")
    model, loading = auto.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    return model


def logits(model, ids, mask, types):
    """Compute a head's outputs: of a classifier, or of the real tokens."""
    out = model(ids, attention_mask=mask, token_type_ids=types)
    if "start_logits" in out:
        return torch.stack([out.start_logits, out.end_logits], 2)[mask.bool()]
    return out[0] if out[0].shape[0] == 3 and out[0].dim() == 2 else out[0][mask.bool()]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("settings", [
    {}, {"type_vocab": 0}, {"memory_layers": (1, 3), "alpha": 0.0, "beta": 0.7},
    {"memory_layers": (1, 3), "alpha": 0.6, "beta": 1.5}], ids=["BERT", "no types", "PKM", "ResM"])
def test_logits_are_the_same(tmp_path, head, settings):
    """transformers gives ours, also after it saved the folder again, and load_model reads both."""
    model, folder = exported(tmp_path, head, **settings)
    theirs, (ids, mask, types) = load(folder, head), batch()
    where = ... if head == "classifier" else mask.bool()
    if "type_vocab" in settings:
        types = torch.zeros_like(types)
    with torch.no_grad():
        ours = model.double()(ids, mask, types)[where]
        assert_near(logits(theirs.double(), ids, mask, types), ours, 1e-12)
        model.float()
        before = logits(theirs.float(), ids, mask, types)
        theirs.save_pretrained(tmp_path / "again")
        again = load(tmp_path / "again", head)
        assert torch.equal(logits(again, ids, mask, types), before)
    transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True).save_pretrained(
        tmp_path / "again")
    state = {n: w for n, w in model.state_dict().items()
             if head == "classifier" or "pooler" not in n}
    for path in (folder, tmp_path / "again"):
        back = load_model(path).state_dict()
        assert_same(state, {n: back[n] for n in state})
    tokens = load_run(tmp_path / "again")[1].encode("w3 w5").tokens
    assert tokens == ["[CLS]", "w3", "w5", "[SEP]"]


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForTokenClassification"])
def test_hidden_states_are_the_same(tmp_path, auto):
    model, folder = exported(tmp_path, memory_layers=(1, 3), alpha=0.6, beta=1.5)
    theirs = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
    ids, mask, types = batch()
    with torch.no_grad():
        ours = model.double().bert(ids, mask, types)
        states = theirs.double()(ids, attention_mask=mask, token_type_ids=types,
                                 output_hidden_states=True).hidden_states
    assert_near(states[-1][mask.bool()], ours[mask.bool()], 1e-12)


def test_an_exported_memory_trains(tmp_path):
    model, folder = exported(tmp_path, "classifier", memory_layers=(1, 3), alpha=0.5)
    theirs, (ids, mask, types) = load(folder, "classifier").train(), batch()
    model.train()
    labels = torch.tensor([0, 2, 1])
    values = [LazyAdam(value_tables(model).values(), lr=0.1), theirs.value_optimizer(lr=0.1)]
    rest = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, theirs)]
    for _ in range(3):
        model(ids, mask, types, labels).backward()
        theirs(ids, mask, types, labels=labels).loss.backward()
        for optimizer in (*rest, *values):
            optimizer.step()
            optimizer.zero_grad()
    ours = model.bert.layers[2].memory.values.weight
    assert_near(find_layers(theirs)[2].memory.values.weight, ours, 1e-5)


ELSEWHERE = """
import sys, torch, transformers
model = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.randint(40, (2, 9))
values = model.value_optimizer(lr=0.1)
before = model.tables[1].weight.clone()
model(ids, labels=ids).loss.backward()
values.step()
print(int((model.tables[1].weight != before).any(1).sum()))
"""


def test_an_exported_memory_needs_no_file_of_this_repository(tmp_path):
    _, folder = exported(tmp_path, memory_layers=(1, 3))
    for file in folder.glob("*.py"):
        modules = re.findall(r"(?m)^(?:from|import) ([\w.]+)", file.read_text())
        packages = {module.split(".")[0] for module in modules} - {""}
        assert packages <= sys.stdlib_module_names | {"torch", "transformers"}
    ended = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, folder], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0


def test_an_exported_model_cannot_lose_its_memory(tmp_path):
    """transformers' own classes refuse the folder and name the cure. Its pipelines work."""
    model, folder = exported(tmp_path, memory_layers=(1, 3))
    load(folder).save_pretrained(tmp_path / "again")
    for path in (folder, tmp_path / "again"):
        with pytest.raises(KeyError, match="trust_remote_code=True"):
            transformers.BertForMaskedLM.from_pretrained(path)
    pipeline = transformers.pipeline("fill-mask", str(folder), trust_remote_code=True)
    with torch.no_grad():
        best = model(torch.tensor([[2, 8, 4, 12, 3]]))[0, 2].softmax(0).max()
    assert pipeline("w3 [MASK] w7")[0]["score"] == pytest.approx(best.item(), rel=1e-5)


def test_tokenizer_and_classes_are_the_models(tmp_path):
    _, folder = exported(tmp_path, "classifier", labels=("no", "maybe", "yes"), dropout=0.2)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.id2label == {0: "no", 1: "maybe", 2: "yes"}
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.2
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pair = tokenizer("W3 w5", "w7 [MASK]")
    assert pair["input_ids"] == [2, 8, 10, 3, 12, 4, 3]
    assert pair["token_type_ids"] == [0] * 4 + [1] * 3
    assert tokenizer.model_max_length == 24


def test_the_card_has_settings_and_results(tmp_path):
    _, folder = exported(tmp_path, memory_layers=(1, 3))
    card = (folder / "README.md").read_text()
    assert '"task": "RTE"' in card and "(1, 3)" in card and "4 x 4 slots" in card
    assert 'AutoModelForMaskedLM.from_pretrained("out", trust_remote_code=True)' in card
    assert "perplexity 11.00" in card and "13.00" not in card  # the checkpoint is of step 3


def test_what_cannot_be_exported_is_refused(tmp_path):
    with pytest.raises(UserError, match="is a causal language model with memory"):
        exported(tmp_path, causal=True, memory_layers=(2,))
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out exists already"):
        export(tmp_path / "run", tmp_path / "out")
