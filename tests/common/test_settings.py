"""
Settings and recipes.
"""
import dataclasses
from pathlib import Path

import pytest

import finetune
import pretrain
from lib.common.errors import UserError
from lib.common.settings import load_settings
from tests.helpers import ROOT, Settings


@pytest.mark.parametrize("args, expected", [
    ([], {}), (["--lr=1"], {"lr": 1.0}), (["--lr=1e-3"], {"lr": 1e-3}),
    (["--name=5"], {"name": "5"}), (["--name=a=b=c"], {"name": "a=b=c"}),
    (["--name="], {"name": ""}), (["--flag=True"], {"flag": True}),
    (["--layers=4"], {"layers": (4,)}),
    (["--layers=4,8"], {"layers": (4, 8)}), (["--layers=(4,8)"], {"layers": (4, 8)}),
    (["--lr", "1e-3", "--name", "b"], {"lr": 1e-3, "name": "b"}),
    (["--layers="], {"layers": ()}), (["c.py"], {"lr": 2.0, "layers": (1, 2), "steps": 6}),
    (["c.py", "--steps=7", "--steps=8"], {"lr": 2.0, "layers": (1, 2), "steps": 8})])
def test_load(tmp_path, monkeypatch, capsys, args, expected):
    monkeypatch.chdir(tmp_path)
    Path("c.py").write_text("import math\n_half = 3\nlr = 2\nlayers = [1, 2]\nsteps = 2 * _half\n")
    config = load_settings(Settings, args)
    assert config == Settings(**expected)
    assert all(type(value) is type(getattr(Settings, name))
               for name, value in dataclasses.asdict(config).items())
    assert f"lr={config.lr}" in capsys.readouterr().out


def test_help_shows_every_setting_with_its_comment(capsys):
    with pytest.raises(SystemExit) as end:
        load_settings(pretrain.Config, ["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and "$ python pretrain.py configs/demo.py" in said
    assert "--value_lr VALUE (0.001) of the value tables, constant (our reading)" in said
    assert all(f"--{field.name} VALUE" in said for field in dataclasses.fields(pretrain.Config))


def test_sizes_are_settings(capsys):
    """Over those of the named model; what does not fit together is one line."""
    config = load_settings(pretrain.Config, ["--model=demo", "--n_layer=3", "--d_model=96",
                                           "--d_ff=384", "--seq_len=64"])
    sizes = pretrain.validate(config)
    assert [sizes[name] for name in ("n_layer", "n_head", "d_model", "d_ff")] == [3, 4, 96, 384]
    config.n_head = 5
    with pytest.raises(UserError, match="no multiple of n_head"):
        pretrain.validate(config)


RECIPES = [p for p in sorted(ROOT.glob("configs/[!_]*.py"))
           if "finetune" not in p.stem and "causal" not in p.stem]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_are_the_papers_systems(path, capsys):
    """Each recipe loads; its name says what it is; 1,024 sequences a step (2,048 for distil)."""
    c, name = load_settings(pretrain.Config, [str(path)]), path.stem
    size = name.split("_")[0]
    small = {"demo": "demo", "study": "demo", "minilm": "distil"}
    assert c.model == small.get(size, size)
    layers = {"demo": (2, 3), "distil": (2, 4), "base": (4, 8), "large": (8, 16)}[c.model]
    memory = {"pkm": (0, 1), "resm": (1, 1)}.get((name.split("_") + [""])[1])
    assert c.memory_layers == (layers if memory else ())
    assert not memory or (c.alpha, c.beta) == memory
    initial = "_init" in name or "_more" in name
    long = size == "study" and not name.endswith("_short")  # it goes on from short sequences
    first = f"out/{name}_short" if long else {
        "minilm": "sentence-transformers/all-MiniLM-L6-v2"}.get(size, "")
    trained = {"distil": "distilbert-base-uncased"}.get(size, f"out/{size}")
    assert c.init_from == (trained if initial else first) and c.seed == int(initial)
    assert c.reinit_ffn == name.endswith("_ffn")
    assert (ROOT / "configs" / f"{size}.py").is_file()
    if size not in small:
        assert c.batch_size * c.accumulation == (2048 if size == "distil" else 1024)
        assert (c.max_steps, c.warmup_steps, c.lr, c.value_lr) == (500_000, 10_000, 1e-4, 1e-3)
        assert (c.n_keys, c.memory_heads, c.topk, c.key_dim, c.seq_len) == (512, 4, 32, 256, 512)


def test_recipes_of_fine_tuning(capsys):
    """Table 3."""
    recipes = {p.stem: load_settings(finetune.Config, [str(p)])
               for p in sorted(ROOT.glob("configs/*finetune*.py"))}
    assert recipes.keys() == {"demo_finetune", "finetune_glue", "finetune_squad",
                              "finetune_minilm_glue", "finetune_minilm_squad"}
    for name, values in {"finetune_squad": (5e-5, 3, 0.06, 0.01, 384),
                         "finetune_glue": (2e-5, 10, 0.06, 0.1, 128)}.items():
        c = recipes[name]
        assert (c.lr, c.epochs, c.warmup, c.weight_decay, c.max_len) == values
        assert (c.batch_size, c.value_lr, c.dropout, c.update_memory) == (32, 1e-3, 0.1, True)
    assert recipes["finetune_squad"].doc_stride == 128
    demo = recipes["demo_finetune"]
    assert (demo.task, demo.init_from) == ("docs", "out/demo")
