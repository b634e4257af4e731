"""
Settings from config files and the command line.
"""
import dataclasses
from pathlib import Path

import pytest

import pretrain
from lib.common.errors import UserError
from lib.common.settings import load_settings
from tests.helpers import Settings


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
    sizes = pretrain.model_sizes(config)
    assert [sizes[name] for name in ("n_layer", "n_head", "d_model", "d_ff")] == [3, 4, 96, 384]
    with pytest.raises(UserError, match="no multiple of n_head"):
        pretrain.check_config(dataclasses.replace(config, n_head=5))
