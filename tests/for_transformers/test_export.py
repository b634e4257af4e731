"""
Exported folders: transformers and this project load them, and their card is of the checkpoint.
"""
import json
import resource
import subprocess
import sys

import pytest
import torch

from for_transformers.export import export, main, measured, their_settings, their_tokenizer
from lib.errors import UserError
from lib.run import Run
from lib.tokenizer import SPECIALS
from lib.weights import init_from, load_model, read_weights
from tests.helpers import ROOT, assert_same, log, save_model, tiny_bert, train
from tests.weights.test_huggingface import assert_same_logits, saved_run, tiny_head


@pytest.mark.parametrize("type_vocab", [2, 0])
@pytest.mark.parametrize("head, auto, labels", [
    (None, "MaskedLM", ()), ("classifier", "SequenceClassification", ("no", "maybe", "yes")),
    ("classifier", "SequenceClassification", ()), ("span", "QuestionAnswering", ())],
    ids=["MLM", "classes", "regression", "span"])
def test_export_loads_in_transformers(tmp_path, capsys, head, auto, labels, type_vocab):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    model = tiny_head(head, labels, type_vocab=type_vocab)
    main([str(saved_run(tmp_path, model, labels=labels)), str(tmp_path / "out")])
    theirs, loading = getattr(transformers, f"AutoModelFor{auto}").from_pretrained(
        tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    assert type(theirs).__name__ == f"BertFor{auto}"
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    assert_same_logits(model, theirs.eval())
    if head == "classifier":
        assert tuple(theirs.config.id2label.values()) == (labels or ("LABEL_0",))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    pair = tokenizer("W3 w5", "w7 [MASK]")
    assert pair["input_ids"] == [2, 8, 10, 3, 12, 4, 3]
    assert pair["token_type_ids"] == [0] * 4 + [1] * 3
    again = load_model(tmp_path / "out").eval()
    ids = torch.randint(40, (2, 9))
    assert type(again) is type(model)
    torch.testing.assert_close(again(ids), model(ids), rtol=1e-5, atol=1e-6)  # aligned otherwise
    with pytest.raises(UserError, match="exists"):
        export(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("alpha", [0.0, 1.0], ids=["PKM", "ResM"])
@pytest.mark.parametrize("head", [None, "classifier", "span"])
def test_export_of_a_memory_comes_back_bit_for_bit(tmp_path, capsys, head, alpha):
    """An untrained pooler is left out; a classifier that starts from the folder draws its own."""
    pytest.importorskip("safetensors")
    model = tiny_head(head, ("a", "b"), memory_layers=(1, 3), alpha=alpha).train()
    model(torch.randint(40, (4, 9)))  # the batch norm has statistics now
    run = saved_run(tmp_path, model, labels=("a", "b") if head == "classifier" else ())
    export(run, tmp_path / "out")
    saved, again = read_weights(run), read_weights(tmp_path / "out")
    assert_same({name: w for name, w in saved["weights"].items()
                 if head == "classifier" or "pooler" not in name}, again["weights"])
    init_from(tiny_head("classifier", memory_layers=(1, 3), alpha=alpha), tmp_path / "out")
    assert ("left random  pooler" in capsys.readouterr().out) == (head != "classifier")
    assert saved["config"] == again["config"] and saved.get("labels") == again.get("labels")
    ids = torch.randint(40, (2, 9))
    loaded = load_model(tmp_path / "out").eval()
    torch.testing.assert_close(loaded(ids), model.eval()(ids), rtol=1e-5,
                               atol=1e-6)  # another alignment, another rounding
    readme = (tmp_path / "out/README.md").read_text()
    assert "trust_remote_code" in readme and "(1, 3)" in readme and "4 x 4 slots" in readme
    fresh = tiny_head(None, memory_layers=(1, 3), alpha=alpha)
    init_from(fresh, tmp_path / "out")
    assert torch.equal(fresh.bert.layers[2].memory.values.weight,
                       model.bert.layers[2].memory.values.weight)


def test_a_fine_tuned_models_card_has_its_metrics(tmp_path):
    run = saved_run(tmp_path, tiny_head("classifier", ("a", "b")), labels=("a", "b"))
    (run / "step_000003").rename(run / "best")
    (run / "config.json").write_text(json.dumps(
        {"task": "RTE", "tokenizer_hash": "", "init_checkpoint": "", "first_step": 0}))
    (run / "eval_results.json").write_text(json.dumps({"eval_accuracy": 0.75, "last_accuracy": 1}))
    export(run / "best", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "| task " in card and "- accuracy 0.75," in card and "accuracy 1" not in card
    assert "AutoModelForSequenceClassification" in card


def test_a_causal_model_with_memory_is_not_exported(tmp_path):
    run = saved_run(tmp_path, tiny_head(None, causal=True, memory_layers=(2,)))
    with pytest.raises(UserError, match="is a causal language model with memory"):
        export(run, tmp_path / "out")


def test_the_card_has_the_evaluation_of_its_checkpoint(place):
    """Not a later one's: the run went on."""
    assert train("--max_steps=12", "--eval_interval=4", "--checkpoint_interval=4") == 0
    perplexity = {r["step"]: f"perplexity {r['perplexity']:.2f}"
                  for r in log() if "perplexity" in r}
    assert len({perplexity[step] for step in (8, 12)}) == 2
    for step, other in ((8, 12), (12, 8)):
        export(f"out/tiny/step_{step:06d}", f"exported_{step}")
        readme = (place / f"exported_{step}/README.md").read_text()
        assert perplexity[step] in readme and perplexity[other] not in readme


def test_dropout_and_case_are_the_models(tmp_path):
    transformers = pytest.importorskip("transformers")
    words = [*SPECIALS, "A", "the", "The", "##t"]
    run = saved_run(tmp_path, tiny_head(None, vocab_size=len(words), dropout=0.2), len(words))
    (run / "vocab.txt").write_text("\n".join(words) + "\n")
    export(run, tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.2
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("The the A") == ["The", "the", "A"]


@pytest.mark.parametrize("folder, accuracy", [("best", "0.75"), ("step_000003", "0.5")])
def test_a_fine_tuned_checkpoints_card_has_its_own_metrics(tmp_path, folder, accuracy):
    """Those of the best epoch, or of the last one, whose checkpoint stays."""
    run = saved_run(tmp_path, tiny_head("classifier", ("a", "b")), labels=("a", "b"))
    if folder == "best":
        (run / "step_000003").rename(run / "best")
    (run / "config.json").write_text(json.dumps({"task": "RTE"}))
    (run / "eval_results.json").write_text(json.dumps(
        {"eval_epoch": 1, "eval_accuracy": 0.75, "last_epoch": 3, "last_accuracy": 0.5}))
    assert measured(Run(run), run / folder, "classifier") == [
        f"accuracy {accuracy}, on the dev split"]


def test_exported_settings_are_the_models():
    """Whatever the order of the vocabulary and the names of the classes."""
    config = tiny_bert(init_std=0.3, max_len=16, dropout=0.2).bert.config
    vocab = ["[UNK]", "[MASK]", "[PAD]", "[CLS]", "[SEP]", "the"]
    found = their_settings(config, "classifier", ["no", "maybe", "yes"], vocab, False)
    expected = {"pad_token_id": 2, "initializer_range": 0.3, "max_position_embeddings": 16,
                "id2label": {0: "no", 1: "maybe", 2: "yes"},
                "label2id": {"no": 0, "maybe": 1, "yes": 2}, "hidden_dropout_prob": 0.2,
                "attention_probs_dropout_prob": 0.2, "layer_norm_eps": 1e-12, "is_decoder": False}
    assert expected.items() <= found.items()


def test_an_exported_tokenizer_knows_the_models_length(tmp_path):
    run = saved_run(tmp_path, tiny_head(None))
    config = load_model(run).bert.config
    vocab = (run / "vocab.txt").read_text().split()
    assert their_tokenizer(run / "vocab.txt", vocab, config)[1]["model_max_length"] == 24


def test_an_export_that_cannot_be_written_leaves_nothing(tmp_path):
    pytest.importorskip("safetensors.torch")
    save_model(tmp_path / "run", tiny_bert())
    (tmp_path / "run/vocab.txt").write_text("\n".join([*SPECIALS, *map(str, range(35))]))
    command = [sys.executable, "-m", "for_transformers.export", tmp_path / "run"]

    def small_files():  # as on a disk that is full: the weights do not fit
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    ended = subprocess.run([*command, tmp_path / "folder"], cwd=ROOT, preexec_fn=small_files,
                           capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "File too large" in ended.stderr
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
    subprocess.run([*command, tmp_path / "folder"], cwd=ROOT, check=True)
