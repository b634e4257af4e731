"""
Read Hugging Face's folders, side by side with transformers.
"""
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import finetune
import measure
from lib.corpus import Corpus, masked_heldout
from lib.device import to_device
from lib.huggingface import SETTINGS, from_huggingface, read_config, to_huggingface
from lib.settings import UserError
from lib.tokenizer import SPECIALS, load_tokenizer
from lib.weights import init_from, load_model, load_weights, read_weights
from model import Classifier, LanguageModel, SpanReader
from tests.helpers import assert_same, log, prepare, tiny_bert, train, write_tasks


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


def save(model, folder, **changes):
    """Save it as torch does, with changes in its config.json."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    settings = json.loads(Path(folder, "config.json").read_text()) | changes
    Path(folder, "config.json").write_text(json.dumps(settings))
    torch.save(model.state_dict(), Path(folder, "pytorch_model.bin"))


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


@pytest.mark.parametrize("layout", [
    "safetensors", "shards", "bin", "bin shards", "half", "old names", "no prefix"])
@pytest.mark.parametrize("kind", [
    "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification", "regression",
    "BertForQuestionAnswering", "DistilBertForMaskedLM", "DistilBertForQuestionAnswering"])
def test_hugging_face_folders_give_the_same_logits(tmp_path, kind, layout):
    if kind == "regression":
        theirs = hugging_face("BertForSequenceClassification", num_labels=1)
    else:  # names of classes are in the order of their numbers, not of the alphabet
        more = {"id2label": {0: "no", 1: "maybe", 2: "also"}} if "Sequence" in kind else {}
        theirs = hugging_face(kind, **more)
    if layout in ("safetensors", "shards"):
        pytest.importorskip("safetensors")
        theirs.save_pretrained(tmp_path, max_shard_size="20KB" if layout == "shards" else "1GB")
    else:
        save(theirs, tmp_path)
        weights = theirs.state_dict()
        if layout == "old names":
            weights = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"): w for n, w in weights.items()}
        if layout == "no prefix":
            weights = {n.removeprefix("bert.").removeprefix("distilbert."): w
                       for n, w in weights.items()}
        if layout == "half":
            weights = {n: w.half() if w.is_floating_point() else w for n, w in weights.items()}
            theirs = theirs.half().float()
        torch.save(weights, tmp_path / "pytorch_model.bin")
        if layout == "bin shards":
            (tmp_path / "pytorch_model.bin").rename(tmp_path / "1.bin")
            torch.save({"last": weights.pop(next(iter(weights)))}, tmp_path / "2.bin")
            index = {"weight_map": {name: "1.bin" for name in weights} | {"last": "2.bin"}}
            (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    ours = load_model(tmp_path).eval()
    assert type(ours) is {"S": Classifier, "r": Classifier, "Q": SpanReader}.get(
        kind.split("BertFor")[-1][0], LanguageModel)
    assert_same_logits(ours, theirs)
    labels = {"BertForSequenceClassification": ["no", "maybe", "also"], "regression": []}
    assert read_weights(tmp_path).get("labels") == labels.get(kind)


@pytest.mark.parametrize("head", [None, "classifier", "span"])
def test_our_names_become_theirs_and_come_back(head):
    config = tiny_bert(memory_layers=(2,)).bert.config
    models = {None: LanguageModel, "classifier": lambda c: Classifier(c, 3), "span": SpanReader}
    weights = models[head](config).state_dict()
    theirs = to_huggingface(weights, head)
    assert "bert.encoder.layer.0.attention.self.query.weight" in theirs
    assert_same(from_huggingface(theirs, config, head), (dict(weights), set()))


def test_a_causal_model_has_hugging_faces_logits():
    """Compare with a decoder, whose weights have the names of BertForMaskedLM's."""
    theirs = hugging_face("BertLMHeadModel", is_decoder=True)
    ours = tiny_bert(causal=True, n_head=4, d_model=32, d_ff=64, max_len=24).eval()
    weights, _ = from_huggingface(theirs.state_dict(), ours.bert.config)
    load_weights(ours, weights, "", strict=False)
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_an_encoder_without_a_head_is_a_start(tmp_path, capsys, prefix):
    theirs = hugging_face("BertModel")
    save(theirs, tmp_path)
    torch.save({prefix + n: w for n, w in theirs.state_dict().items()},
               tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=str(tmp_path)):
        load_model(tmp_path)
    with pytest.raises(UserError, match=f"no masked-LM head: .* --init_from={tmp_path}"):
        measure.main(["fill", str(tmp_path), "the [MASK]"])
    sizes = {"n_head": 4, "d_model": 32, "d_ff": 64, "max_len": 24}
    for model in (tiny_bert(**sizes), Classifier(tiny_bert(**sizes).bert.config, 2)):
        init_from(model, tmp_path)
        ids = torch.randint(40, (2, 9))
        with torch.no_grad():
            pooled = model.bert.eval().pool(model.bert(ids))
            torch.testing.assert_close(pooled, theirs(ids)[1], rtol=0, atol=1e-5)
    output = " ".join(capsys.readouterr().out.split())
    assert "new LM head" in output
    assert "new head" in output


def test_a_vocabulary_with_capitals_is_of_a_cased_bert(tmp_path):
    transformers = pytest.importorskip("transformers")
    vocab = [*SPECIALS, "A", "b", "##b", "The", "the", "É", "e", "##t", "##T", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab) + "\n")
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=False)
    text = "The the THE Ab É Ét é. [MASK] tT eT"
    assert load_tokenizer(tmp_path).encode(text).tokens == theirs.tokenize(text)


@pytest.mark.parametrize("key, value, words", [
    ("hidden_act", "relu", "hidden_act = 'relu'"),
    ("position_embedding_type", "relative_key", "'relative_key'"),
    ("model_type", "roberta", "model_type = 'roberta'"),
    ("problem_type", "multi_label_classification", "multi_label_classification"),
    ("layer_norm_eps", 1e-5, "layer_norm_eps = 1e-05"),
    ("tie_word_embeddings", False, "tie_word_embeddings = False"),
    ("num_hidden_layers", 4, r"has no encoder\.layer\.3"),
    ("num_attention_heads", 5, "config.json: n_head = 5: .* the width 32"),
    ("hidden_size", "32", "config.json: "), ("num_hidden_layers", None, "config.json: "),
    ("quantization_config", {}, "quantization_config"), ("pruned_heads", {"0": [1]}, "pruned")])
def test_a_folder_of_another_model_is_refused(tmp_path, key, value, words):
    theirs = hugging_face("BertForMaskedLM")
    save(theirs, tmp_path)
    read_weights(tmp_path)
    save(theirs, tmp_path, **{key: value})
    with pytest.raises(UserError, match=words):
        read_weights(tmp_path)


def test_a_run_starts_from_hugging_faces_weights(place, capsys):
    """Find them by name in data/weights. The first evaluation is their loss, without padding."""
    theirs = hugging_face("BertForMaskedLM", vocab_size=32, max_position_embeddings=128)
    save(theirs, "data/weights/bert-base-uncased")
    vocab = Path(shutil.copy("tiny.txt", "data/weights/bert-base-uncased/vocab.txt"))
    args = ["--init_from=bert-base-uncased", "--model=", "--memory_layers="]
    assert train(*args, "--max_steps=2", "--out=out/init") == 0
    first = log("out/init")[0]
    output = capsys.readouterr().out
    assert "init_from data/weights/bert-base-uncased:" in output and "7 rows" in output
    total = 0.0
    with torch.no_grad():
        for batch in masked_heldout(Corpus("tiny"), "val", 16, 2, 8):
            ids, positions, labels = to_device(batch, torch.device("cpu")).values()
            logits = theirs(ids).logits.gather(1, positions[..., None].expand(-1, -1, 32))[..., :25]
            total += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert first["loss"] == pytest.approx(float(total) / first["predicted_tokens"], rel=1e-5)
    settings = json.loads(Path("out/init/config.json").read_text())
    assert settings["init_checkpoint"] == "data/weights/bert-base-uncased"
    assert settings["pooler_trained"] is False
    assert train(*args, "--max_steps=3", "--out=out/init") == 0  # goes on
    assert train(*args, "--max_steps=1", "--init_from=out/init", "--out=out/more") == 0
    assert measure.how_trained(Path("out/more/step_000001"))["steps"] == "? + 3 + 1"
    measure.main(["fill", "bert-base-uncased", "the [MASK] cat"])
    assert "[MASK] at token 2:" in capsys.readouterr().out
    vocab.write_text(vocab.read_text() + "\n".join(map(str, range(8))))
    with pytest.raises(UserError, match="32 rows .* 33 tokens"):
        load_model("bert-base-uncased")


def test_weights_of_another_vocabulary_or_with_nan_are_refused(tmp_path):
    """At most 127 rows may be padding."""
    theirs = hugging_face("BertForMaskedLM", vocab_size=200)
    save(theirs, tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, *map(str, range(67))]))
    with pytest.raises(UserError, match="200 rows .* 72 tokens"):
        read_weights(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    read_weights(tmp_path)
    for number in (torch.nan, torch.inf):
        theirs.bert.embeddings.position_embeddings.weight.data[0, 0] = number
        save(theirs, tmp_path)
        with pytest.raises(UserError, match="position_embeddings.* NaN or infinity"):
            read_weights(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="config.json: "):
        read_weights(tmp_path)


def test_files_without_weights_are_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="has no checkpoint"):
        read_weights(tmp_path)
    save(hugging_face("BertForMaskedLM"), tmp_path)
    torch.save({"epoch": 3}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match="epoch is no tensor"):
        read_weights(tmp_path)


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_a_missing_setting_is_the_models_own_default(tmp_path, kind):
    theirs = pytest.importorskip("transformers").AutoConfig.for_model(kind)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    _, config = read_config(tmp_path / "config.json")
    for ours, name in SETTINGS[kind].items():
        assert getattr(config, ours) == getattr(theirs, name), name
    assert config.type_vocab == getattr(theirs, "type_vocab_size", 0)


@pytest.mark.parametrize("kind, copy, name", [
    ("BertForMaskedLM", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("BertForMaskedLM", "cls.predictions.decoder.bias", "cls.predictions.bias"),
    ("BertForMaskedLM", "bert.embeddings.position_ids", ""),
    ("DistilBertForMaskedLM", "vocab_projector.weight",
     "distilbert.embeddings.word_embeddings.weight")])
def test_a_stored_copy_is_one_or_the_only_one(tmp_path, kind, copy, name):
    theirs = hugging_face(kind)
    weights = theirs.state_dict() | {"bert.embeddings.position_ids": torch.arange(24)[None]}
    for stored in (weights, {other: w for other, w in weights.items() if other != name}):
        save(theirs, tmp_path)
        torch.save(stored, tmp_path / "pytorch_model.bin")
        assert_same_logits(load_model(tmp_path).eval(), theirs)
    torch.save(weights | {copy: weights[copy] + 1}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=f"{copy.split('.')[-1]} is not .*: of another model"):
        read_weights(tmp_path)


def test_classes_without_names(tmp_path):
    save(hugging_face("BertForSequenceClassification", num_labels=2), tmp_path, id2label=None)
    assert read_weights(tmp_path)["labels"] == ["LABEL_0", "LABEL_1"]


def test_a_tokenizer_goes_with_its_weights(place):
    """It comes into a corpus, a run and a fine-tuned run; another corpus is refused."""
    save(hugging_face("BertForMaskedLM", vocab_size=25, max_position_embeddings=128), "theirs")
    shutil.copy("tiny.txt", "theirs/vocab.txt")
    Path("theirs/tokenizer_config.json").write_text('{"strip_accents": false}')
    prepare("text", "new", "text.txt", "--vocab", "theirs")
    args = ["--init_from=theirs", "--memory_layers=", "--n_layer=3", "--n_head=4", "--d_model=32",
            "--d_ff=64", "--max_steps=1"]
    with pytest.raises(UserError, match="vocabulary"):
        train(*args)
    assert train(*args, "--dataset=new") == 0
    write_tasks(20)
    finetune.main(["--task=own", "--init_from=out/tiny", "--max_steps=1", "--out=out/own",
                   "--max_len=32", "--device=cpu"])
    for folder in ("theirs", "data/new", "out/tiny", "out/own/seed0"):
        assert load_tokenizer(folder).encode("cat cát CAT").tokens == ["cat", "[UNK]", "cat"]


def test_a_folder_brings_its_sizes_and_a_trained_pooler(place, capsys):
    """Name what has no place here, and all sizes that differ. Google's pooler is trained."""
    theirs = hugging_face("BertForPreTraining", vocab_size=25, max_position_embeddings=99)
    save(theirs, "google")
    shutil.copy("tiny.txt", "google/vocab.txt")
    args = ["--init_from", "google", "--memory_layers=2", "--max_steps=1"]
    with pytest.raises(UserError, match="google has n_layer = 3, not 4; d_model = 32, not 64; d_ff"
                                        " = 64, not 128; max_len = 99, not 128: .*--model="):
        train(*args)
    assert train("--model=", *args) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "new memory" in output
    assert "dropped cls.seq_relationship" in output
    assert train("--model=", *args[:-1], "--max_steps=2") == 0  # goes on, with its own sizes
    tuned = Classifier(load_model("out/tiny").bert.config, 2)
    assert (tuned.bert.config.n_layer, tuned.bert.config.max_len) == (3, 99)
    assert init_from(tuned, "out/tiny")["pooler_trained"]
    assert torch.equal(tuned.bert.pooler.weight, theirs.bert.pooler.dense.weight)
