"""
Recipes: the paper's numbers, typed by hand, and what sets each system apart from its control.
"""
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from finetune import Settings as Tuning
from lib.settings import load_settings
from model import SIZES
from pretrain import Settings as Pretraining
from pretrain import bert_config, check_fit
from tests.helpers import ROOT

ALONE = ["base", "causal_12", "demo", "demo_finetune", "finetune_glue", "finetune_squad",
         "own_bert_resm"]

# A recipe that is not alone: its control, and every setting in which they differ.
# Without alpha = 0 a memory stands beside the FFN.
MORE = {"init_from": "out/base", "seed": 1}
AT_4_8 = {"memory_layers": (4, 8)}
LARGE = {"model": "large", "batch_size": 16, "accumulation": 64}
AT_8_16 = {"memory_layers": (8, 16)}
DEMO_MORE = {"init_from": "out/demo", "seed": 1, "max_steps": 1200, "lr": 3e-3,
             "eval_interval": 240, "usage_interval": 240, "checkpoint_interval": 240}
AT_2_3 = {"memory_layers": (2, 3)}
DEMO_CAUSAL = {"objective": "causal", "max_steps": 800, "eval_interval": 200}
SYSTEMS = {
    "base_500k_more": ("base", MORE),
    "base_pkm": ("base", {**AT_4_8, "alpha": 0}),
    "base_resm": ("base", AT_4_8),
    "base_pkm_init": ("base_500k_more", {**AT_4_8, "alpha": 0}),
    "base_resm_init": ("base_500k_more", AT_4_8),
    "base_resm_init_ffn": ("base_resm_init", {"reinit_ffn": True}),
    "distil": ("base", {"model": "distil", "batch_size": 64}),
    "distil_resm_init": ("distil", {"memory_layers": (2, 4), "seed": 1,
                                    "init_from": "distilbert-base-uncased"}),
    "large": ("base", LARGE),
    "large_pkm": ("large", {**AT_8_16, "alpha": 0}),
    "large_resm": ("large", AT_8_16),
    "large_resm_init": ("large_resm", {"init_from": "out/large", "seed": 1}),
    "causal_24": ("causal_12", {"n_layer": 24}),
    "causal_12_pkm": ("causal_12", {"memory_layers": (6,), "alpha": 0}),
    "causal_12_memory": ("causal_12", {"memory_layers": (6,)}),
    "demo_more": ("demo", DEMO_MORE),
    "demo_pkm": ("demo", {**AT_2_3, "alpha": 0}),
    "demo_resm": ("demo", AT_2_3),
    "demo_pkm_init": ("demo_more", {**AT_2_3, "alpha": 0}),
    "demo_resm_init": ("demo_more", AT_2_3),
    "demo_resm_init_ffn": ("demo_resm_init", {"reinit_ffn": True}),
    "demo_large": ("demo", {"n_layer": 8, "max_steps": 1000}),
    "demo_distil": ("demo", {"n_layer": 2}),
    "demo_distil_resm_init": ("demo_more", {"init_from": "out/demo_distil", "n_layer": 2,
                                            "memory_layers": (1,)}),
    "demo_causal": ("demo", DEMO_CAUSAL),
    "demo_causal_8": ("demo_causal", {"n_layer": 8}),
    "demo_causal_pkm": ("demo_causal", {"memory_layers": (3,), "alpha": 0}),
    "demo_causal_memory": ("demo_causal", {"memory_layers": (3,)}),
}

# Sections 5.1 and 5.2; Devlin et al. (2018) or our reading where they say nothing
PRETRAINING = {
    "dataset": "wikibooks", "objective": "masked", "seed": 0, "init_from": "",
    "sequences": 1024, "seq_len": 512, "max_steps": 500_000, "warmup_steps": 10_000,
    "lr": 1e-4, "value_lr": 1e-3, "keys_lr": 1, "weight_decay": 0.01, "grad_clip": 1,
    "dropout": 0.1, "n_layer": 12, "d_model": 768, "n_head": 12, "d_ff": 3072,
    "memory_layers": (), "alpha": 1, "beta": 1, "n_keys": 512, "memory_heads": 4, "topk": 32,
    "key_dim": 256, "reinit_ffn": False, "usage_interval": 100_000, "eval_sequences": 1024}

# Table 3, and section 5.3
GLUE = {
    "lr": 2e-5, "examples": 32, "epochs": 10, "max_steps": 0, "warmup": 0.06, "weight_decay": 0.1,
    "max_len": 128, "doc_stride": 128, "value_lr": 1e-3, "keys_lr": 1, "grad_clip": 1,
    "dropout": 0.1, "seed": 0, "seeds": 1, "update_memory": True, "train_examples": 0}
SQUAD = {**GLUE, "task": "squad", "lr": 5e-5, "epochs": 3, "weight_decay": 0.01, "max_len": 384}


def load(name):
    """Load the settings of a recipe, or the defaults of a script."""
    script = Tuning if "finetune" in name else Pretraining
    argv = [] if "defaults" in name else [f"configs/{name}.py"]
    return asdict(load_settings(script, argv))


@pytest.mark.parametrize("name, expected", [
    ("pretrain's defaults", PRETRAINING),
    ("base", PRETRAINING),
    ("large", {**PRETRAINING, "n_layer": 24, "d_model": 1024, "n_head": 16, "d_ff": 4096}),
    ("distil", {**PRETRAINING, "n_layer": 6, "sequences": 2048}),
    ("causal_12", {**PRETRAINING, "objective": "causal", "d_model": 1024, "n_head": 16,
                   "d_ff": 4096}),
    ("finetune's defaults", GLUE),
    ("finetune_glue", GLUE),
    ("finetune_squad", SQUAD)])
def test_the_papers_numbers(monkeypatch, name, expected):
    monkeypatch.chdir(ROOT)
    settings = load(name)
    for key, size in SIZES[settings.get("model") or "base"].items():
        settings[key] = settings.get(key) or size  # 0: the model's
    batch = settings["batch_size"] * settings["accumulation"]
    settings |= {"sequences": batch, "examples": batch}
    assert {key: settings[key] for key in expected} == expected


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_differs_from_its_control_in_what_it_is_about(monkeypatch, name):
    monkeypatch.chdir(ROOT)
    control, expected = SYSTEMS[name]
    settings, others = load(name), load(control)
    assert {key: settings[key] for key in expected} == expected
    assert {key for key in settings if settings[key] != others[key]} == expected.keys()


def test_every_recipe_is_held(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = [path.stem for path in Path("configs").glob("*.py")]
    assert all(map(load, names)) and {*names} == {*ALONE, *SYSTEMS}


@pytest.mark.parametrize("command", [
    line.split()[3:] for path in sorted((ROOT / "configs").glob("*.py"))
    for line in path.read_text().splitlines() if line.startswith("$ python pretrain.py")])
def test_the_commands_that_recipes_name(monkeypatch, command):
    monkeypatch.chdir(ROOT)
    settings = load_settings(Pretraining, command)
    check_fit(settings, bert_config(settings))


@pytest.mark.parametrize("script", ["prepare_data", "pretrain", "finetune", "measure", "bench"])
def test_a_script_runs(monkeypatch, script):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
