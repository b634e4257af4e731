"""
configs/: each file loads, and has the settings that the paper gives.
"""
import pytest

import finetune
import pretrain
from lib.common.settings import load_settings
from tests.helpers import ROOT

PRETRAINING = [path for path in sorted(ROOT.glob("configs/**/*.py"))
               if "finetune" not in path.stem and "causal" not in path.stem]


@pytest.mark.parametrize("path", PRETRAINING, ids=lambda path: path.stem)
def test_configs_are_the_papers_systems(path, capsys):
    """Each config is what its name says. A step has 1,024 sequences, or 2,048 for distil."""
    c, name = load_settings(pretrain.Config, [str(path)]), path.stem
    size = name.split("_")[0]
    small = {"demo": "demo", "study": "demo", "minilm": "distil", "pilot": "base"}
    assert c.model == small.get(size, size)
    layers = {"demo": (2, 3), "distil": (2, 4), "base": (4, 8), "large": (8, 16)}[c.model]
    memory = {"pkm": (0, 1), "resm": (1, 1)}.get((name.split("_") + [""])[1])
    assert c.memory_layers == (layers if memory else ())
    assert not memory or (c.alpha, c.beta) == memory
    initial = "_init" in name or "_more" in name
    # these continue from short sequences
    long = size == "study" and not name.endswith("_short") or name == "pilot"
    first = f"out/{name}_short" if long else {
        "minilm": "sentence-transformers/all-MiniLM-L6-v2"}.get(size, "")
    trained = {"distil": "distilbert-base-uncased"}.get(size, f"out/{size}")
    assert c.init_from == (trained if initial else first) and c.seed == int(initial)
    assert c.reinit_ffn == name.endswith("_ffn")
    assert path.with_name(f"{size}.py").is_file()
    if size not in small:
        assert c.batch_size * c.accumulation == (2048 if size == "distil" else 1024)
        assert (c.max_steps, c.warmup_steps, c.lr, c.value_lr) == (500_000, 10_000, 1e-4, 1e-3)
        assert (c.n_keys, c.memory_heads, c.topk, c.key_dim, c.seq_len) == (512, 4, 32, 256, 512)


def test_the_pilot_is_base_with_fewer_tokens(place, capsys):
    """The four configs keep the paper's sizes. A shrunken form of each takes two steps, from the
    weights of the one before."""
    base = load_settings(pretrain.Config, [str(ROOT / "configs/base_resm_init.py")])
    shrunken = [f"--{setting}" for setting in (
        "dataset=tiny", "n_layer=8", "n_head=2", "d_model=8", "d_ff=16", "seq_len=16",
        "batch_size=2", "accumulation=1", "max_steps=2", "warmup_steps=1", "n_keys=8", "topk=4",
        "key_dim=16", "eval_sequences=4", "device=cpu")]
    for name in ("pilot_short", "pilot", "pilot_more", "pilot_resm_init"):
        path = str(ROOT / f"configs/{name}.py")
        c = load_settings(pretrain.Config, [path])
        assert c.batch_size * c.accumulation * c.seq_len == 2**17 and c.dataset == base.dataset
        for key in ("model", "n_keys", "memory_heads", "topk", "key_dim", "value_lr", "dropout"):
            assert getattr(c, key) == getattr(base, key)
        assert (c.d_model, c.weight_decay) == (base.d_model, base.weight_decay)
        assert pretrain.main([path, *shrunken]) == 0
    assert "top-1 MU" in capsys.readouterr().out


def test_configs_of_fine_tuning(capsys):
    """The settings of Table 3."""
    configs = {path.stem: load_settings(finetune.Config, [str(path)])
               for path in sorted(ROOT.glob("configs/**/*finetune*.py"))}
    assert configs.keys() == {"demo_finetune", "finetune_glue", "finetune_squad",
                              "finetune_minilm_glue", "finetune_minilm_squad"}
    for name, values in {"finetune_squad": (5e-5, 3, 0.06, 0.01, 384),
                         "finetune_glue": (2e-5, 10, 0.06, 0.1, 128)}.items():
        c = configs[name]
        assert (c.lr, c.epochs, c.warmup, c.weight_decay, c.max_len) == values
        assert (c.batch_size, c.value_lr, c.dropout, c.update_memory) == (32, 1e-3, 0.1, True)
    assert configs["finetune_squad"].doc_stride == 128
    demo = configs["demo_finetune"]
    assert (demo.task, demo.init_from) == ("docs", "out/demo")
