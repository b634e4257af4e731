"""
Hugging Face's folders, read.
"""
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import measure
from for_transformers.export import export
from lib.corpus import Corpus, masked_heldout
from lib.errors import UserError
from lib.tokenizer import SPECIALS, load_tokenizer
from lib.training import to_device
from lib.weights import init_from, load_model, read_weights
from model import BertConfig, Classifier, LanguageModel, SpanReader, build_model
from tests.helpers import assert_one_line, log, save_model, train


def hugging_face(kind, **sizes):
    """Make a random transformers model whose weights all show in the logits."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "max_position_embeddings": 24, **sizes}
    if kind.startswith("Distil"):
        config = transformers.DistilBertConfig(dim=32, n_layers=3, n_heads=4, hidden_dim=64,
                                               **sizes)
    else:
        config = transformers.BertConfig(hidden_size=32, num_hidden_layers=3, intermediate_size=64,
                                         num_attention_heads=4, **sizes)
    model = getattr(transformers, kind)(config).eval()
    for name, p in model.named_parameters():
        nn.init.normal_(p, float("norm" in name.lower() and "weight" in name), 0.4)
    return model


def assert_same_logits(ours, theirs):
    ids, types = torch.randint(40, (3, 20)), torch.randint(2, (3, 20))
    mask = torch.arange(20) < torch.tensor([[20], [13], [5]])
    distil = type(theirs).__name__.startswith("Distil")
    with torch.no_grad():
        out = theirs(ids, attention_mask=mask.long(),
                     **({} if distil else {"token_type_ids": types}))
        logits = ours(ids, mask=mask, token_types=types)
        if isinstance(ours, SpanReader):
            out = [torch.stack([out.start_logits, out.end_logits], 2)]
        where = ... if isinstance(ours, Classifier) else mask
        assert out[0][where].std() > 0.3
        torch.testing.assert_close(logits[where], out[0][where], rtol=0, atol=1e-4)


LAYOUTS = ["safetensors", "bin", "old names", "no prefix"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [
    "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification", "regression",
    "BertForQuestionAnswering", "DistilBertForMaskedLM", "DistilBertForQuestionAnswering"])
def test_hugging_face_folders_give_the_same_logits(tmp_path, kind, layout):
    if kind == "regression":
        theirs = hugging_face("BertForSequenceClassification", num_labels=1)
    else:
        more = {"id2label": {n: f"class {n}" for n in range(3)}} if "Sequence" in kind else {}
        theirs = hugging_face(kind, **more)
    if layout == "safetensors":
        pytest.importorskip("safetensors")
        theirs.save_pretrained(tmp_path)
    else:
        theirs.config.architectures = [type(theirs).__name__]
        theirs.config.save_pretrained(tmp_path)
        weights = theirs.state_dict()
        if layout == "old names":
            weights = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"): w for n, w in weights.items()}
        if layout == "no prefix":
            weights = {n.removeprefix("bert.").removeprefix("distilbert."): w
                       for n, w in weights.items()}
        torch.save(weights, tmp_path / "pytorch_model.bin")
    ours = load_model(tmp_path).eval()
    assert type(ours) is {"S": Classifier, "r": Classifier, "Q": SpanReader}.get(
        kind.split("BertFor")[-1][0], LanguageModel)
    assert_same_logits(ours, theirs)
    saved = read_weights(tmp_path)
    assert saved.get("labels") == {"BertForSequenceClassification": [
        "class 0", "class 1", "class 2"], "regression": []}.get(kind)


def saved_run(tmp_path, model, vocab_size=40, labels=()):
    """Draw the model's weights; save it as a run's checkpoint, with a vocabulary of its size."""
    for name, p in model.named_parameters():
        nn.init.normal_(p, float("norm" in name and "weight" in name), 0.4)
    words = [*SPECIALS, *(f"w{n}" for n in range(vocab_size - 5))]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/vocab.txt").write_text("\n".join(words) + "\n")
    save_model(tmp_path / "run", model.eval(), labels)
    return tmp_path / "run"


def tiny_head(head, labels=(), **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_layer": 3, "n_head": 4, "d_model": 32, "d_ff": 64, "max_len": 24,
             "n_keys": 4, "memory_heads": 2, "topk": 3, "key_dim": 4}
    return build_model(BertConfig(**{**sizes, **settings}), head, labels)


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_an_encoder_without_a_head_is_a_start(tmp_path, capsys, prefix):
    theirs = hugging_face("BertModel")
    theirs.config.save_pretrained(tmp_path)
    torch.save({prefix + n: w for n, w in theirs.state_dict().items()},
               tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="an encoder without a masked-LM head"):
        load_model(tmp_path)
    for head in (None, "classifier"):
        model = tiny_head(head)
        init_from(model, tmp_path)
        ids = torch.randint(40, (2, 9))
        with torch.no_grad():
            pooled = model.bert.eval().pool(model.bert(ids))
            torch.testing.assert_close(pooled, theirs(ids)[1], rtol=0, atol=1e-5)
    output = capsys.readouterr().out
    assert "left random  MLM head" in output and "left random  task head" in output


def test_a_vocabulary_with_capitals_is_of_a_cased_bert(tmp_path):
    transformers = pytest.importorskip("transformers")
    vocab = [*SPECIALS, "A", "b", "##b", "The", "the", "É", "e", "##t", "##T", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab) + "\n")
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=False)
    text = "The the THE Ab É Ét é. [MASK] tT eT"
    assert load_tokenizer(tmp_path).encode(text).tokens == theirs.tokenize(text)


def demo_of_hugging_face(folder, vocab):
    """Save a random transformers model of the demo's shape by torch, with its vocabulary."""
    size = len(Path(vocab).read_text().splitlines())
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=size, hidden_size=64, num_hidden_layers=4, intermediate_size=128,
        num_attention_heads=4, max_position_embeddings=128))
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), Path(folder, "pytorch_model.bin"))
    shutil.copy(vocab, Path(folder, "vocab.txt"))
    return model


def test_classes_have_the_names_of_their_numbers(tmp_path):
    """Not in the order of the alphabet."""
    names = {0: "no", 1: "maybe", 2: "also"}
    theirs = hugging_face("BertForSequenceClassification", id2label=names)
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    assert read_weights(tmp_path)["labels"] == ["no", "maybe", "also"]


@pytest.mark.parametrize("key, value", [
    ("hidden_act", "relu"), ("layer_norm_eps", 1e-5), ("position_embedding_type", "relative_key"),
    ("tie_word_embeddings", False)])
def test_a_folder_of_another_kind_of_bert_is_refused(tmp_path, key, value):
    theirs = hugging_face("BertForMaskedLM")
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    read_weights(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {key: value}))
    with pytest.raises(UserError, match=f"{key} = {value!r}"):
        read_weights(tmp_path)


@pytest.mark.parametrize("kind, settings, word", [
    ("BertForMultipleChoice", {}, "BertForMultipleChoice"),
    ("BertForTokenClassification", {}, "BertForTokenClassification"),
    ("BertForSequenceClassification", {"problem_type": "multi_label_classification"}, "3 outputs"),
    ("BertForSequenceClassification", {"problem_type": "regression"}, "3 outputs")])
def test_another_kind_of_classifier_is_refused(tmp_path, kind, settings, word):
    """All have a tensor classifier.weight."""
    theirs = hugging_face(kind, num_labels=3, architectures=[kind], **settings)
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=word):
        read_weights(tmp_path)


def test_a_regression_of_one_number_is_read(tmp_path):
    theirs = hugging_face("BertForSequenceClassification", num_labels=1, problem_type="regression",
                          architectures=["BertForSequenceClassification"])
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    assert read_weights(tmp_path)["labels"] == []


def test_a_run_starts_from_hugging_faces_weights(place, capsys):
    """It finds them by name in data/weights, and its first evaluation is their loss."""
    theirs = demo_of_hugging_face("data/weights/bert-base-uncased", "tiny.txt")
    args = ["--init_from=bert-base-uncased", "--memory_layers="]
    assert train(*args, "--max_steps=2", "--out=out/init") == 0
    first = log("out/init")[0]
    output = capsys.readouterr().out
    assert "init_from data/weights/bert-base-uncased:" in output
    assert "loaded       MLM head" in output
    batches = masked_heldout(Corpus("tiny"), "val", 16, 2, 8)
    total = 0.0
    with torch.no_grad():
        for batch in batches:
            ids, positions, labels = to_device(batch, torch.device("cpu")).values()
            logits = theirs.eval()(ids).logits.gather(1, positions[..., None].expand(-1, -1, 25))
            total += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert first["loss"] == pytest.approx(float(total) / first["masked_tokens"], rel=1e-5)
    tuned = Classifier(load_model("out/init").bert.config, 2)
    init_from(tuned, "out/init")  # Google's pooler is trained, and goes with the run
    assert "left random  pooler" in capsys.readouterr().out  # but a masked LM's folder has none
    weights = torch.load("data/weights/bert-base-uncased/pytorch_model.bin")
    pooler = {"bert.pooler.dense.weight": torch.randn(64, 64),
              "bert.pooler.dense.bias": torch.randn(64)}
    torch.save(weights | pooler, "data/weights/bert-base-uncased/pytorch_model.bin")
    assert train(*args, "--max_steps=1", "--out=out/google") == 0
    init_from(tuned, "out/google")
    assert torch.equal(tuned.bert.pooler.weight, pooler["bert.pooler.dense.weight"])
    settings = json.loads(Path("out/init/config.json").read_text())
    assert settings["init_checkpoint"] == "data/weights/bert-base-uncased"
    assert settings["first_step"] == 0
    assert train(*args, "--max_steps=3", "--out=out/init") == 0  # goes on
    measure.main(["fill", "bert-base-uncased", "the [MASK] cat"])
    assert "[MASK] at token 2:" in capsys.readouterr().out
    assert_one_line(capsys, "tiny.py", "--init_from=bert-base-uncased", "--dataset=other",
                    words=["bert-base-uncased", "vocabulary", "--vocab data/weights"])
    assert_one_line(capsys, "tiny.py", "--init_from=roberta-base", words=["RoBERTa's weights"])
    shutil.copy("other.txt", "data/weights/bert-base-uncased/vocab.txt")
    assert_one_line(capsys, "tiny.py", "--init_from=bert-base-uncased", "--dataset=other",
                    words=["26 tokens do not fit weights for 25"])


@pytest.mark.parametrize("lie, name", [({"num_hidden_layers": 1}, "encoder.layer.1"),
                                       ({"model_type": "bert"}, "encoder.layer.1.memory")])
def test_a_tensor_that_config_json_does_not_describe_is_refused(tmp_path, lie, name):
    """A layer or a memory would be left out without a word."""
    pytest.importorskip("safetensors")
    model = tiny_head(None, memory_layers=(2,), n_layer=2)
    export(saved_run(tmp_path, model), tmp_path / "hf")
    file = tmp_path / "hf/config.json"
    settings = {**json.loads(file.read_text()), "hidden_act": "gelu"}
    file.write_text(json.dumps({**settings, "memory_layers": [1], **lie}))
    with pytest.raises(UserError, match=f"model.safetensors: {name}.* is no part of the model"):
        load_model(tmp_path / "hf")
