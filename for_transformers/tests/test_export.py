"""
Exported folders: transformers and this project load them.
"""
import json
import re
import sys

import huggingface_hub
import pytest
import torch
from torch import nn

from for_transformers.export import USED, export, main
from for_transformers.tests.small_models import batch, layers_of, transformers
from lib.run import Run
from lib.settings import UserError
from lib.slots import load_with_tokenizer
from lib.tokenizer import SPECIALS
from lib.weights import model_file
from model import BertConfig, build_model, value_tables
from pkm import LazyAdam
from tests.helpers import assert_near, save_model, write_settings

HEADS = {None: "MaskedLM", "classifier": "SequenceClassification", "span": "QuestionAnswering"}
SIZES = {"vocab_size": 40, "n_layer": 3, "n_head": 4, "d_model": 32, "d_ff": 64, "max_len": 24,
         "n_keys": 4, "memory_heads": 2, "topk": 3, "key_dim": 4, "dropout": 0.0}
RESM = {"memory_layers": (1, 3), "alpha": 0.6, "beta": 1.5}


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    """Let transformers copy the code of models to a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE",
                      str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", [*sys.path])
        yield


def exported(tmp_path, head=None, init_checkpoint="", task="RTE", **settings):
    """Save a model as a run and export it. All its weights show in its outputs."""
    torch.manual_seed(0)
    labels = ("no", "maybe", "yes") if head == "classifier" else ()
    model = build_model(BertConfig(**{**SIZES, **settings}), head, labels)
    for name, p in model.named_parameters():
        nn.init.normal_(p, float("norm" in name and "weight" in name), 0.4)
    with torch.no_grad():
        model.train()(*batch())  # the batch norms have statistics now
    run = tmp_path / "run"
    run.mkdir()
    (run / "vocab.txt").write_text("\n".join([*SPECIALS, *(f"w{n}" for n in range(35))]) + "\n")
    write_settings(run, first_step=0, pooler_trained=False, task=task,
                   init_checkpoint=init_checkpoint)
    (run / "log.jsonl").write_text("".join(
        f'{{"kind": "eval", "step": {step}, "perplexity": {step}.5}}\n' for step in (2, 4)))
    save_model(run, model.eval(), labels)
    main([str(run), str(tmp_path / "exported")])
    return model, tmp_path / "exported"


def load(folder, head=None):
    auto = getattr(transformers, f"AutoModelFor{HEADS[head]}")
    model, loading = auto.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    return model


def logits(model, ids, mask, types):
    """Compute a head's outputs, as our models return them."""
    out = model(ids, attention_mask=mask, token_type_ids=types)
    return torch.stack([out.start_logits, out.end_logits], 2) if "start_logits" in out else out[0]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("settings", [
    {}, {"type_vocab": 0, "memory_layers": (2,), "beta": 0.0},
    {"memory_layers": (1, 3), "alpha": 0.0, "beta": 0.7}, RESM],
    ids=["BERT", "no types", "PKM", "ResM"])
def test_logits_are_the_same(tmp_path, head, settings):
    """transformers gives ours, also after it saved the folder again, and load_model reads both."""
    model, folder = exported(tmp_path, head, **settings)
    ids, mask = batch()
    types = torch.zeros_like(ids) if "type_vocab" in settings else ids % 2
    where = ... if head == "classifier" else mask.bool()
    for part in (load(folder, head),
                 transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)):
        part.save_pretrained(tmp_path / "again")
    for path in (folder, tmp_path / "again"):
        back = load_with_tokenizer(path)[0].state_dict()
        for name, w in model.state_dict().items():
            assert torch.equal(back[name], w) or ("pooler" in name and head != "classifier")
        with torch.no_grad():
            found = logits(load(path, head).double(), ids, mask, types)
            assert_near(found[where], model.double()(ids, mask, types)[where], 1e-12)
        model.float()


@pytest.mark.filterwarnings("ignore")
def test_onnxruntime_gives_the_same_logits(tmp_path):
    """For sentences of other numbers and lengths than the one of the export."""
    runtime = pytest.importorskip("onnxruntime")
    _, folder = exported(tmp_path, n_layer=1, **RESM | {"memory_layers": (1,)})
    theirs, names = load(folder).eval(), ("input_ids", "attention_mask")
    sizes = {0: "sentences", 1: "tokens"}
    torch.onnx.export(theirs, kwargs={name: torch.ones(2, 5, dtype=torch.long) for name in names},
                      f=tmp_path / "model.onnx", dynamic_shapes=dict.fromkeys(names, sizes))
    inputs = dict(zip(names, batch()))
    [found] = runtime.InferenceSession(tmp_path / "model.onnx").run(
        None, {name: x.numpy() for name, x in inputs.items()})
    with torch.no_grad():
        assert_near(torch.from_numpy(found), theirs(**inputs).logits, 1e-6)


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForTokenClassification"])
def test_hidden_states_are_the_same(tmp_path, auto):
    model, folder = exported(tmp_path, **RESM)
    theirs = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
    ids, mask = batch()
    with torch.no_grad():
        ours = model.bert(ids, mask)[mask.bool()]
        states = theirs(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    assert_near(states[-1][mask.bool()], ours, 1e-5)


def test_an_exported_memory_trains(tmp_path):
    model, folder = exported(tmp_path, "classifier", **RESM)
    theirs, (ids, mask) = load(folder, "classifier").train(), batch()
    labels = torch.tensor([0, 2, 1])
    optimizers = LazyAdam(value_tables(model).values(), lr=0.1), theirs.value_optimizer(lr=0.1)
    model.train()(ids, mask, labels=labels).backward()
    theirs(ids, mask, labels=labels).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    ours = model.bert.layers[2].memory.values.weight
    assert_near(layers_of(theirs)[2].memory.values.weight, ours, 1e-5)


def test_an_exported_memory_gets_all_settings_of_pkm(tmp_path):
    """A new argument of PKM gets the setting of its name, as an added one does here."""
    _, folder = exported(tmp_path, **RESM)
    for name, old, new in (
            ("pkm.py", "self, d_model,", "self, d_model, added=0,"),
            ("pkm.py", "self.n_keys = n_keys", "self.n_keys, self.added = n_keys, added"),
            ("config.json", '"n_keys"', '"added": 7, "n_keys"')):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(old, new, 1))
    assert layers_of(load(folder))[2].memory.added == 7


def test_an_exported_memory_needs_no_file_of_this_repository(tmp_path):
    _, folder = exported(tmp_path, **RESM)
    for file in folder.glob("*.py"):
        modules = re.findall(r"(?m)^(?:from|import) ([\w.]+)", file.read_text())
        packages = {module.split(".")[0] for module in modules} - {""}
        assert packages <= sys.stdlib_module_names | {"torch", "transformers"}


def test_an_exported_model_cannot_lose_its_memory(tmp_path):
    """transformers' own classes refuse the folder and name the cure. Its pipelines work."""
    model, folder = exported(tmp_path, **RESM)
    load(folder).save_pretrained(tmp_path / "again")
    for path in (folder, tmp_path / "again"):
        with pytest.raises(KeyError, match="trust_remote_code=True"):
            transformers.BertForMaskedLM.from_pretrained(path)
    pipeline = transformers.pipeline("fill-mask", str(folder), trust_remote_code=True)
    with torch.no_grad():
        best = model(torch.tensor([[2, 8, 4, 12, 3]]))[0, 2].softmax(0).max()
    assert pipeline("w3 [MASK] w7")[0]["score"] == pytest.approx(best.item(), rel=1e-5)


def test_tokenizer_and_classes_are_the_models(tmp_path):
    _, folder = exported(tmp_path, "classifier", dropout=0.2)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.id2label == {0: "no", 1: "maybe", 2: "yes"}
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.2
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pair = tokenizer("W3 w5", "w7 [MASK]")
    assert pair["input_ids"] == [2, 8, 10, 3, 12, 4, 3]
    assert pair["token_type_ids"] == [0] * 4 + [1] * 3
    assert tokenizer.model_max_length == 24


def test_the_card_has_settings_and_results(tmp_path, monkeypatch):
    """The weights are of step 3 and were measured at step 2. No path of this machine is told."""
    monkeypatch.chdir(tmp_path)
    save_model("out/first", build_model(BertConfig(**SIZES)))
    write_settings("out/first", init_checkpoint="/home/me/data/weights/bert-base-uncased")
    _, folder = exported(tmp_path, init_checkpoint="out/first/step_000003", task="/home/me/RTE/",
                         **RESM)
    card = (folder / "README.md").read_text()
    assert "(1, 3)" in card and "4 x 4 slots" in card
    [code, told] = re.findall(r"```(?:python)?\n(.*?)```", card, re.DOTALL)
    assert 'name = "YOU/exported"' in code
    assert "AutoModelForMaskedLM.from_pretrained(name, trust_remote_code=True)" in code
    told = json.loads(told)
    assert told["step"] == 3 and told["settings"]["first_step"] == 0
    assert told["measured"] == [{"kind": "eval", "step": 2, "perplexity": 2.5}]
    assert told["settings"]["task"] == "RTE" and "/" not in json.dumps(told)
    assert huggingface_hub.ModelCard(card).data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "fill-mask", "license": "unknown",
        "tags": ["bert", "product-key-memory"], "base_model": "google-bert/bert-base-uncased"}


@pytest.mark.parametrize("done", [False, True])
def test_the_card_of_a_best_epoch_quotes_that_epoch(tmp_path, done):
    model, _ = exported(tmp_path, "classifier")
    run = Run(tmp_path / "run")
    run.save_best(model_file(model, ("no", "maybe", "yes")))
    write_settings(run.folder, first_step=0, pooler_trained=False)
    (run.folder / "log.jsonl").write_text("".join(
        f'{{"kind": "dev", "step": {2 * epoch}, "f1": 0.{9 - epoch}, "epoch": {epoch}.0}}\n'
        for epoch in (1, 2)))
    results = {"metric": "f1", "eval_f1": 0.8, "eval_epoch": 1.0}
    if done:
        run.write_results(results)
    else:
        torch.save({"step": 3, "results": results}, run.newest_checkpoint() / "state.pt")
    export(run.folder / "best", tmp_path / "best")
    card = (tmp_path / "best/README.md").read_text()
    assert '"step": 2,\n "measured"' in card and '"f1": 0.8' in card and "0.7" not in card


@pytest.mark.parametrize("settings, words", [
    ({"causal": True}, "is a causal language model with memory"),
    ({"alpha": 0.5, "beta": 0.0}, "has alpha = 0.5 and no memory"),
    ({"init_std": 0.5}, "init_std = 0.5 would be lost")])
def test_what_cannot_be_exported_is_refused(tmp_path, monkeypatch, settings, words):
    monkeypatch.setattr("for_transformers.export.USED", USED - {"init_std"})  # as if it were new
    with pytest.raises(UserError, match=words):
        exported(tmp_path, memory_layers=(2,), **settings)
    (tmp_path / "exported").mkdir()
    with pytest.raises(UserError, match="exported exists already"):
        export(tmp_path / "run", tmp_path / "exported")
