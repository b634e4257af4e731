"""
Models with memory in transformers: exported models, and its own encoders with an added memory.
"""
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from for_transformers.add_memory import add_memory
from for_transformers.export import main
from for_transformers.folder import CODE
from lib.files import load_file
from lib.huggingface import their_names
from lib.run import save_files
from lib.training import Trainer
from lib.weights import find_weights, load_model, load_run, model_file
from model import value_tables
from tests.helpers import assert_near, assert_same
from tests.weights.test_huggingface import saved_run, tiny_head
from values import LazyAdam

transformers = pytest.importorskip("transformers")


def batch(size=40):
    """Draw three padded sentences: ids, a mask of 0 and 1, and token types."""
    mask = torch.arange(20) < torch.tensor([[20], [13], [5]])
    return torch.randint(size, (3, 20)), mask.long(), torch.randint(2, (3, 20))


def spread(model):
    """Draw all weights large enough that each shows in the output."""
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        nn.init.normal_(p, float("norm" in name.lower() and "weight" in name), 0.4)
    return model


# exported models

HEADS = {None: "MaskedLM", "classifier": "SequenceClassification", "span": "QuestionAnswering"}


def exported(tmp_path, head, **settings):
    """Make a model of ours whose batch norm has statistics, and export it to a folder."""
    pytest.importorskip("safetensors")
    labels = ("a", "b", "c") if head == "classifier" else ()
    model = tiny_head(head, labels, **{"memory_layers": (1, 3), "dropout": 0.0, **settings})
    run = saved_run(tmp_path, model, labels=labels)
    with torch.no_grad():
        model.train()(*batch())
    save_files(tmp_path / "trained", {"model": model_file(model, labels)})
    (tmp_path / "vocab.txt").write_text((run / "vocab.txt").read_text())
    main([str(tmp_path / "trained"), str(tmp_path / "out")])
    return model.eval(), tmp_path / "out"


def load(folder, head, missing=()):
    auto = getattr(transformers, f"AutoModelFor{HEADS[head]}")
    model, loading = auto.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert set(loading["missing_keys"]) == set(missing) and not loading["mismatched_keys"]
    return model


def logits(model, ids, mask, types):
    out = model(ids, attention_mask=mask, token_type_ids=types)
    return torch.stack([out.start_logits, out.end_logits], 2) if "start_logits" in out else out[0]


@pytest.mark.parametrize("alpha, beta", [(0.0, 0.7), (0.6, 1.5)], ids=["PKM", "ResM"])
@pytest.mark.parametrize("head", HEADS)
def test_an_exported_memory_gives_the_same_logits_in_transformers(tmp_path, head, alpha, beta):
    model, folder = exported(tmp_path, head, alpha=alpha, beta=beta)
    theirs, (ids, mask, types) = load(folder, head), batch()
    where = ... if head == "classifier" else mask.bool()
    with torch.no_grad():
        ours, exact = model.double()(ids, mask, types), logits(theirs.double(), ids, mask, types)
        assert_near(exact[where], ours[where], 1e-12)
        model.float()
        first = logits(theirs.float(), ids, mask, types)
        theirs.save_pretrained(tmp_path / "again")
        again = load(tmp_path / "again", head)
        assert torch.equal(logits(again, ids, mask, types), first)
    transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True).save_pretrained(
        tmp_path / "again")
    back = load_model(tmp_path / "again").state_dict()  # and this project reads it
    names = [n for n in back if head == "classifier" or not n.startswith("bert.pooler.")]
    saved = model.state_dict()
    assert_same({n: saved[n] for n in names}, {n: back[n] for n in names})
    assert find_weights(tmp_path / "again")
    words = load_run(tmp_path / "again")[1].encode("w3 w5").tokens
    assert words == ["[CLS]", "w3", "w5", "[SEP]"]


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForTokenClassification"])
def test_an_exported_memory_gives_the_same_hidden_states(tmp_path, auto):
    model, folder = exported(tmp_path, None, alpha=0.6, beta=1.5)
    theirs = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
    ids, mask, types = batch()
    with torch.no_grad():
        ours = model.double().bert(ids, mask, types)
        states = theirs.double()(ids, attention_mask=mask, token_type_ids=types,
                                 output_hidden_states=True).hidden_states
    assert_near(states[-1][mask.bool()], ours[mask.bool()], 1e-12)


def test_an_exported_memory_without_query_norm_gets_none(tmp_path):
    model, folder = exported(tmp_path, None, query_norm=False)
    theirs, (ids, mask, types) = load(folder, None), batch()
    assert not [name for name in theirs.state_dict() if "query_norm" in name]
    with torch.no_grad():
        assert_near(logits(theirs, ids, mask, types)[mask.bool()],
                    model(ids, mask, types)[mask.bool()], 1e-5)
    again = load_model(folder)
    assert not again.bert.config.query_norm
    assert_near(again.bert.layers[2].memory.keys, model.bert.layers[2].memory.keys, 0)


def test_an_exported_memory_trains_in_transformers(tmp_path):
    model, folder = exported(tmp_path, "classifier", alpha=0.5)
    theirs, (ids, mask, types) = load(folder, "classifier"), batch()
    labels = torch.tensor([0, 2, 1])
    rest = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, theirs)]
    values = [LazyAdam(value_tables(model).values(), lr=0.1), theirs.value_optimizer(lr=0.1)]
    for _ in range(3):
        model.train()(ids, mask, types, labels).backward()
        theirs.train()(ids, mask, types, labels=labels).loss.backward()
        for optimizer in (*rest, *values):
            optimizer.step()
            optimizer.zero_grad()
    table = theirs.bert.encoder.layer[2].memory.values.weight
    assert_near(table, model.bert.layers[2].memory.values.weight, 1e-5)
    with torch.no_grad():
        assert_near(logits(theirs.eval(), ids, mask, types), model.eval()(ids, mask, types), 1e-4)


def test_an_exported_model_cannot_lose_its_memory(tmp_path):
    """transformers' own classes refuse the folder and name the cure. Its code is ruff-clean."""
    model, folder = exported(tmp_path, None, type_vocab=0)
    for name in ("BertForMaskedLM", "BertModel", "BertForSequenceClassification"):
        with pytest.raises(KeyError, match="trust_remote_code=True"):
            getattr(transformers, name).from_pretrained(folder)
    pytest.importorskip("ruff")
    subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", folder], check=True)
    pipeline = transformers.pipeline("fill-mask", str(folder), trust_remote_code=True)
    ids = torch.tensor([[2, 8, 4, 12, 3]])
    with torch.no_grad():
        best = model(ids)[0, 2].softmax(0).max()
    assert pipeline("w3 [MASK] w7")[0]["score"] == pytest.approx(best.item(), rel=1e-5)
    other = load(folder, "classifier", [f"{part}.{name}" for part in (
        "bert.pooler.dense", "classifier") for name in ("weight", "bias")])  # random ones
    assert_near(other.bert.encoder.layer[0].memory.keys, model.bert.layers[0].memory.keys, 0)


ELSEWHERE = """
import sys, torch, transformers
model = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.randint(40, (2, 9))
values = model.value_optimizer(lr=0.1)
before = model.tables[1].weight.clone()
model(ids, labels=ids).loss.backward()
values.step()
print(int((model.tables[1].weight != before).any(1).sum()), "rows moved")
"""


def test_an_exported_memory_needs_no_file_of_this_repository(tmp_path):
    """It loads and trains in a process that has only the folder; its imports are relative."""
    _, folder = exported(tmp_path, None)
    code = {file.stem: file.read_text() for file in folder.glob("*.py")}
    assert code.keys() == {Path(name).stem for name in CODE}
    for text in code.values():
        modules = re.findall(r"(?m)^(?:from|import) ([\w.]+)", text)
        packages = {module.split(".")[0] for module in modules} - {""}
        assert packages <= sys.stdlib_module_names | {"torch", "transformers"}
    ended = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, folder], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[0]) > 0


# memories in transformers' models

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64,
         "num_attention_heads": 4, "max_position_embeddings": 24}
MEMORY = {"n_keys": 4, "heads": 2, "topk": 3, "key_dim": 4}

class Batches:
    """The same batches for our Trainer and, by theirs(), for transformers'."""
    unit, size, accumulation = "tokens", 60, 1

    def __init__(self):
        rng = np.random.default_rng(0)
        mask = np.arange(20) < np.array([[20], [13], [5]])
        self.all = []
        for _ in range(20):
            chosen = mask & (rng.random((3, 20)) < 0.3)
            labels = np.where(chosen, rng.integers(40, size=(3, 20)), -100)
            ids = rng.integers(1, 40, size=(3, 20))  # transformers does not train the vector of 0
            self.all.append({"ids": ids, "mask": mask, "labels": labels})

    def get(self, step, micro):
        return self.all[step]

    def loss_weight(self, step, micro):
        return 1.0

    def theirs(self):
        for arrays in self.all:
            ids, mask, labels = map(torch.from_numpy, arrays.values())
            yield {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_trainer_does_the_steps_of_our_loop(tmp_path, monkeypatch, alpha):
    pytest.importorskip("accelerate")
    from for_transformers.trainer import StepValues

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # in our loss
    batches, memory = Batches(), {"alpha": alpha, "beta": 1.5}
    model, folder = exported(tmp_path, None, **memory)
    config = SimpleNamespace(seed=0, lr=3e-3, warmup_steps=0, max_steps=20, keys_lr=1.0,
                             value_lr=1e-2, weight_decay=0.1, grad_clip=1.0, compile="off")
    ours = Trainer(config, model.double().train(), batches, torch.device("cpu"),
                   torch.float32)
    for step in range(20):
        ours.step(step)

    sizes = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).double()
    tables = add_memory(theirs, (1, 3), **memory, **MEMORY)
    weights = load_file(folder / "model.safetensors")
    assert not [name for name in theirs.load_state_dict(weights, strict=False).missing_keys
                if "decoder" not in name]
    step_values = StepValues(LazyAdam(tables.values(), lr=config.value_lr))
    arguments = transformers.TrainingArguments(
        str(tmp_path / "trainer"), max_steps=20, learning_rate=config.lr, adam_epsilon=1e-6,
        weight_decay=config.weight_decay, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True)

    class InOrder(transformers.Trainer):
        def get_train_dataloader(self):
            return list(batches.theirs())

        def get_decay_parameter_names(self, model):  # no decay on a memory, as in adamw()
            names = super().get_decay_parameter_names(model)
            return [name for name in names if ".memory." not in name]

    InOrder(theirs, arguments, callbacks=[step_values]).train()
    trained = theirs.state_dict()
    for name, w in model.state_dict().items():
        if w.is_floating_point() and "pooler" not in name:
            prefix = "bert." if name.startswith("bert.") else ""
            parts = [trained[prefix + n] for n in their_names(name)]
            assert_near(torch.cat(parts) if len(parts) > 1 else parts[0], w, 1e-10)
    for number, values in value_tables(model).items():
        assert not torch.equal(values.weight, weights[
            f"bert.encoder.layer.{number - 1}.memory.values.weight"].double())
