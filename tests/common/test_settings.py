"""
Settings from config files and the command line.
"""
import argparse
import dataclasses
from pathlib import Path

import pytest

import finetune
import pretrain
from lib.errors import UserError
from lib.settings import load_settings, whole_number
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


def test_the_lowest_value_is_a_value_and_what_is_below_is_not():
    assert load_settings(Settings, ["--lr=0"]).lr == 0
    with pytest.raises(UserError, match="lr = -0.1: expected at least 0"):
        load_settings(Settings, ["--lr=-0.1"])
    assert (whole_number("1"), whole_number("3", least=3)) == (1, 3)
    for text, least in (("0", 1), ("2", 3), ("1.5", 1), ("-1", 1), ("", 1)):
        with pytest.raises(argparse.ArgumentTypeError, match=f"at least {least}"):
            whole_number(text, least)


@pytest.mark.parametrize("script", [pretrain, finetune])
def test_help_shows_every_setting_in_its_group(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as end:
        load_settings(script.Config, ["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and f"$ python {script.__name__}.py configs/demo" in said
    types = {int: "INT", float: "FLOAT", str: "TEXT", tuple: "INT,INT", bool: "True|False"}
    for field in dataclasses.fields(script.Config):
        about = field.metadata
        value = "|".join(about["choices"] or [types[type(field.default)]])
        start = f"{about['group']}: " if about["group"] else ""
        assert f"{start}--{field.name} {value} {about['comment']}" in said
    assert "--value_lr FLOAT of the value tables, constant (our reading) (default: 0.001)" in said
    groups = [field.metadata["group"] for field in dataclasses.fields(script.Config)]
    assert groups[0] == "run" and "machine" in groups


@pytest.mark.parametrize("args, hint", [
    (["--learning_rate=1"], "unknown key 'learning_rate' (did you mean lr?)"),
    (["--n_heads=4"], "unknown key 'n_heads' (did you mean n_head?)"),
    (["--colour=4"], "unknown key 'colour' (--help lists the keys)"),
    (["configs/demo_resm_int.py"], "did you mean configs/demo_resm_init.py?"),
    (["study_smort.py"], "did you mean configs/study/study_short.py?"),
    (["xyz.py"], "xyz.py: no such config file"),
    (["--lr=1" + "0" * 400], "command line: lr: the number is too large"),
    (["--topk=1" + "0" * 30], "command line: topk: the number is too large")])
def test_a_mistake_gets_a_hint(args, hint, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError) as error:
        load_settings(pretrain.Config, args)
    assert str(error.value).endswith(hint) or str(error.value).endswith(f"({hint})")


def test_sizes_are_settings(capsys):
    """Over those of the named model; what does not fit together is one line."""
    config = load_settings(pretrain.Config, ["--model=demo", "--n_layer=3", "--d_model=96",
                                           "--d_ff=384", "--seq_len=64"])
    sizes = pretrain.model_sizes(config)
    assert [sizes[name] for name in ("n_layer", "n_head", "d_model", "d_ff")] == [3, 4, 96, 384]
    with pytest.raises(UserError, match="n_head = 5: expected a divisor of the width 96"):
        pretrain.check_config(dataclasses.replace(config, n_head=5))
