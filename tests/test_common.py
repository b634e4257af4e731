"""
Settings, recipes, and files that are whole or absent.
"""
import dataclasses
import os
from pathlib import Path

import pytest

import configs
import finetune
import pretrain
from tests.helpers import ROOT, Settings


@pytest.mark.parametrize("args, expected", [
    ([], {}), (["--lr=1"], {"lr": 1.0}), (["--lr=1e-3"], {"lr": 1e-3}),
    (["--name=5"], {"name": "5"}), (["--name=a=b=c"], {"name": "a=b=c"}),
    (["--name="], {"name": ""}), (["--flag=True"], {"flag": True}),
    (["--layers=4"], {"layers": (4,)}),
    (["--layers=4,8"], {"layers": (4, 8)}), (["--layers=(4,8)"], {"layers": (4, 8)}),
    (["--layers="], {"layers": ()}), (["c.py"], {"lr": 2.0, "layers": (1, 2), "steps": 6}),
    (["c.py", "--steps=7", "--steps=8"], {"lr": 2.0, "layers": (1, 2), "steps": 8})])
def test_load(tmp_path, monkeypatch, capsys, args, expected):
    monkeypatch.chdir(tmp_path)
    Path("c.py").write_text("import math\n_half = 3\nlr = 2\nlayers = [1, 2]\nsteps = 2 * _half\n")
    config = configs.load(Settings, args)
    assert config == Settings(**expected)
    assert all(type(value) is type(getattr(Settings, name))
               for name, value in dataclasses.asdict(config).items())
    assert f"lr={config.lr}" in capsys.readouterr().out


RECIPES = [p for p in sorted(ROOT.glob("configs/[!_]*.py")) if "finetune" not in p.stem]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_are_the_papers_systems(path, capsys):
    """Each recipe loads; its name says what it is; 1,024 sequences a step (2,048 for distil)."""
    c, name = configs.load(pretrain.Config, [str(path)]), path.stem
    size = name.split("_")[0]
    assert c.model == size
    layers = {"base": (4, 8), "large": (8, 16), "distil": (2, 4), "demo": (2, 3)}[size]
    memory = {"pkm": (0, 1), "resm": (1, 1)}.get((name.split("_") + [""])[1])
    assert c.memory_layers == (layers if memory else ())
    assert not memory or (c.alpha, c.beta) == memory
    initial = "_init" in name or "_more" in name
    initial_model = "distilbert-base-uncased" if size == "distil" else f"out/{size}"
    assert c.init_from == (initial_model if initial else "") and c.seed == int(initial)
    assert c.reinit_ffn == name.endswith("_ffn")
    assert (ROOT / "configs" / f"{size}.py").is_file()
    if size != "demo":
        assert c.batch_size * c.accumulation == (2048 if size == "distil" else 1024)
        assert (c.max_steps, c.warmup_steps, c.lr, c.value_lr) == (500_000, 10_000, 1e-4, 1e-3)
        assert (c.n_keys, c.memory_heads, c.topk, c.key_dim, c.seq_len) == (512, 4, 32, 256, 512)


def test_recipes_of_fine_tuning(capsys):
    """Table 3."""
    recipes = {p.stem: configs.load(finetune.Config, [str(p)])
               for p in sorted(ROOT.glob("configs/*finetune*.py"))}
    assert recipes.keys() == {"demo_finetune", "finetune_glue", "finetune_squad"}
    for name, values in {"finetune_squad": (5e-5, 3, 0.06, 0.01, 384),
                         "finetune_glue": (2e-5, 10, 0.06, 0.1, 128)}.items():
        c = recipes[name]
        assert (c.lr, c.epochs, c.warmup, c.weight_decay, c.max_len) == values
        assert (c.batch_size, c.value_lr, c.dropout, c.update_memory) == (32, 1e-3, 0.1, True)
    assert recipes["finetune_squad"].doc_stride == 128
    demo = recipes["demo_finetune"]
    assert (demo.task, demo.init_from) == ("docs", "out/demo")


def test_atomic(tmp_path):
    file, folder = tmp_path / "new" / "file", tmp_path / "folder"
    for content in ("one", "two"):
        with configs.atomic(file) as temporary:
            temporary.write_text(content)
            assert not file.exists() or file.read_text() == "one"
    with pytest.raises(OSError), configs.atomic(file) as temporary:
        temporary.write_text("half")
        raise OSError
    assert file.read_text() == "two" and os.listdir(file.parent) == ["file"]
    with pytest.raises(KeyboardInterrupt), configs.atomic(folder) as temporary:
        temporary.mkdir()
        (temporary / "a").write_text("half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["new"]
    (tmp_path / ".tmp_folder").mkdir()  # as a killed process leaves it
    (tmp_path / ".tmp_folder" / "stale").touch()
    with configs.atomic(folder) as temporary:
        temporary.mkdir()
        (temporary / "a").write_text("whole")
    assert os.listdir(folder) == ["a"] and sorted(os.listdir(tmp_path)) == ["folder", "new"]
