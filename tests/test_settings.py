"""
Settings from config files and the command line.
"""
import dataclasses
from pathlib import Path

import pytest

import finetune
import pretrain
from lib.errors import UserError
from lib.settings import load_settings
from tests.helpers import ROOT, Settings


@pytest.mark.parametrize("args, expected", [
    ([], {}),
    (["--lr=1"], {"lr": 1.0}),
    (["--lr=1e-3"], {"lr": 1e-3}),
    (["--name=5"], {"name": "5"}),
    (["--name=a=b=c"], {"name": "a=b=c"}),
    (["--name="], {"name": ""}),
    (["--flag=True"], {"flag": True}),
    (["--layers=4"], {"layers": (4,)}),
    (["--layers=4,8"], {"layers": (4, 8)}),
    (["--layers="], {"layers": ()}),
    (["c.py"], {"lr": 2.0, "layers": (1, 2), "steps": 6}),
    (["--steps=7", "c.py", "--steps=8"], {"lr": 2.0, "layers": (1, 2), "steps": 8}),
])
def test_load(tmp_path, monkeypatch, capsys, args, expected):
    """A setting keeps the type of its default. The command line comes after the file."""
    monkeypatch.chdir(tmp_path)
    Path("c.py").write_text("import math\n_half = 3\nlr = 2\nlayers = [1, 2]\nsteps = 2 * _half\n")
    config = load_settings(Settings, args)
    assert config == Settings(**expected)
    for field in dataclasses.fields(Settings):
        assert type(getattr(config, field.name)) is type(field.default)
    assert f"lr={config.lr}" in capsys.readouterr().out


@pytest.mark.parametrize("args, words", [
    (["--step=4"], r"unknown key 'step' \(did you mean steps\?\)"),
    (["--colour=4"], r"unknown key 'colour' \(--help lists the keys\)"),
    (["c.py"], r"c\.py: unknown key 'stepz' \(did you mean steps\?\)"),
    (["--steps=2.5"], r"steps = '2\.5': expected int"),
    (["--lr=high"], "lr = 'high': expected float"),
    (["--flag=yes"], "flag = 'yes': expected bool"),
    (["--flag"], "flag = '': expected bool"),
    (["--steps=True"], "steps = 'True': expected int"),
    (["--layers=4.5"], r"layers = '4\.5': expected tuple"),
])
def test_a_mistake_is_named(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    Path("c.py").write_text("stepz = 2\n")
    with pytest.raises(UserError, match=words):
        load_settings(Settings, args)


def test_a_config_that_is_not_there(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, hint in (("none.py", ""),
                       ("configs/base_rsm.py", r" \(did you mean configs/base_resm\.py\?\)")):
        with pytest.raises(UserError, match=f"^{name}: no such config file{hint}$"):
            load_settings(Settings, [name])


@pytest.mark.parametrize("script", [pretrain, finetune])
def test_help_shows_every_setting_with_its_comment(script, capsys):
    with pytest.raises(SystemExit) as end:
        load_settings(script.Config, ["--help"])
    assert not end.value.code
    said = capsys.readouterr().out
    assert f"$ python {script.__name__}.py configs/demo" in said
    lines = said.splitlines()
    for field in dataclasses.fields(script.Config):
        [line] = [line for line in lines if line.startswith(f"    {field.name}: ")]
        assert "  # " in line


def test_every_config_loads(monkeypatch):
    monkeypatch.chdir(ROOT)
    for path in sorted(Path("configs").glob("*.py")):
        script = finetune if "finetune" in path.name else pretrain
        load_settings(script.Config, [str(path)])
