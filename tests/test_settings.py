"""
Read settings from config files and the command line, and end a script.
"""
import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import finetune
import pretrain
from lib.settings import (
    Failure,
    UserError,
    from_zero,
    load_settings,
    run_main,
    run_script,
    share,
)
from tests.helpers import ROOT


@dataclasses.dataclass
class Settings:
    lr: float = 0.1  # the rate
    steps: int = 3
    name: str = "a"
    flag: bool = False
    layers: tuple = ()
    seed: int = from_zero(0)
    clip: float = share(0.5)


@pytest.mark.parametrize("args, expected", [
    ([], {}),
    (["--lr=1e-3"], {"lr": 1e-3}),
    (["--name=5"], {"name": "5"}),
    (["--name=a=b=c"], {"name": "a=b=c"}),
    (["--name="], {"name": ""}),
    (["--flag=True"], {"flag": True}),
    (["--layers=4,8"], {"layers": (4, 8)}),
    (["--layers="], {"layers": ()}),
    (["--seed=0", "--clip=0"], {"seed": 0, "clip": 0.0}),
    (["--lr", "1e-3", "--flag", "True", "--layers", "4,8", "--name", ""],
     {"lr": 1e-3, "flag": True, "layers": (4, 8), "name": ""}),
    (["--steps", "7", "c.py"], {"lr": 2.0, "layers": (1, 2), "steps": 7}),
    (["c.py"], {"lr": 2.0, "layers": (1, 2), "steps": 6}),
    (["--steps=7", "c.py", "--steps=8"], {"lr": 2.0, "layers": (1, 2), "steps": 8}),
])
def test_load(tmp_path, monkeypatch, capsys, args, expected):
    """Keep the type of a setting's default. The command line comes after the file."""
    monkeypatch.chdir(tmp_path)
    Path("c.py").write_text("import math\n_half = 3\nlr = 2\nlayers = [1, 2]\nsteps = 2 * _half\n")
    config = load_settings(Settings, args)
    assert config == Settings(**expected)
    for field in dataclasses.fields(Settings):
        assert type(getattr(config, field.name)) is type(field.default)
    changed = [f"{key}={value}" for key, value in dataclasses.asdict(config).items()
               if value != getattr(Settings, key)]
    assert capsys.readouterr().out == f"settings: {', '.join(changed) or 'the defaults'}\n"


@pytest.mark.parametrize("args, words", [
    (["--step=4"], "'step'.* steps"),
    (["--colour=4"], "'colour'.*--help"),
    (["c.py"], "c.py.* 'stepz'.* steps"),
    (["--steps=2.5"], "steps = '2.5'.* int"),
    (["--lr=high"], "lr = 'high'.* float"),
    (["--flag=yes"], "flag = 'yes'.* bool"),
    (["--flag"], "--flag has no value"), (["--flag", "c.py"], "flag = 'c.py'.* bool"),
    (["--steps=True"], "steps = 'True'.* int"),
    (["--layers=4.5"], "layers = '4.5'.* whole"), (["--layers=4.5,"], "layers = '4.5,'.* whole"),
    ([f"--lr=1{400 * '0'}"], "lr = '10"),
    (["--name=a\0"], "NUL"), (["--name=\udcff"], "UTF-8"),
    (["--layers=4,-8"], "layers = -8"), (["--steps=0"], "steps = 0"), (["--lr=0"], "lr = 0.0"),
    (["--lr=-1e-3"], "lr = -0.001"), (["--lr=1e999"], "lr = inf"), (["--seed=-1"], "seed = -1"),
    (["--clip=1.5"], "clip = 1.5"), (["c.json"], "c.json"), (["none.py"], "none.py"),
])
def test_a_mistake_is_named(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    Path("c.py").write_text("stepz = 2\n")
    with pytest.raises(UserError, match=words):
        load_settings(Settings, args)


@pytest.mark.parametrize("text, words", [
    ("lr = 1\nlr = = 2", "c.py, line 2.*, column 6"), ("lr = 1\n\nlr = a", "c.py:3: NameError"),
    ("lr = 1 / 0", "c.py:1: ZeroDivisionError"), ("from math import a", "c.py:1: ImportError"),
    ("raise SystemExit", "c.py:1: SystemExit"), ("lr = 10**400", "c.py: lr = 10"),
    ("name = '\\0'", "NUL")])
def test_a_config_that_fails_is_named(tmp_path, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    Path("c.py").write_text(text)
    with pytest.raises(UserError, match=words):
        load_settings(Settings, ["c.py"])


@pytest.mark.parametrize("script", [pretrain, finetune])
def test_help_shows_every_setting_with_its_comment(script, capsys):
    with pytest.raises(SystemExit) as end:
        load_settings(script.Settings, ["--help"])
    assert not end.value.code
    said = capsys.readouterr().out
    assert f"$ python {script.__name__}.py configs/demo" in said
    lines = said.splitlines()
    for field in dataclasses.fields(script.Settings):
        [line] = [line for line in lines if line.startswith(f"    {field.name}: ")]
        assert "  # " in line


def fail(error):
    raise error


def fail_later(error, cause):
    try:
        raise cause
    finally:
        raise error


def end(capsys, main):
    """Run main() as a script does. Returns (exit status, stderr)."""
    with pytest.raises(SystemExit) as ended:
        run_main(main)
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize("error, status, words", [
    (UserError("x"), 2, "error: x\n"), (Failure("x"), 1, "error: x\n"),
    (OSError(28, "No space left on device"), 1, "No space left"), (UserError("a\nb"), 2, "a b\n"),
    (PermissionError(13, "Permission denied", "out/x"), 1, "Permission denied: 'out/x'"),
    (KeyboardInterrupt(), 130, "interrupted\n"), (MemoryError(), 1, "smaller batch_size"),
    (MemoryError("Unable to allocate 1 TiB for an array"), 1, "smaller batch_size"),
    (RuntimeError("Storage size calculation overflowed with sizes=[9]"), 1, "smaller batch_size"),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors"), 1, "smaller batch_size"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1, "smaller batch")])
def test_an_error_is_one_line_and_a_status(capsys, error, status, words):
    code, said = end(capsys, partial(fail, error))
    assert code == status and said.count("\n") == 1 and words in said


def test_an_error_over_that_of_the_system_does_not_hide_it(capsys):
    error = OSError(122, "Disk quota exceeded", "out/x")
    code, said = end(capsys, partial(fail_later, RuntimeError("unexpected pos"), error))
    assert (code, said) == (1, "error: [Errno 122] Disk quota exceeded: 'out/x'\n")


@pytest.mark.parametrize("code, arguments, status, out, error", [
    ("print('a')", [], 141, None, b""),
    ("print('\xe9')", [], 0, b"\\xe9\n", b""),
    ("print('a')", [b"\xff"], 2, b"", b"error: '\\udcff': expected UTF-8 text without NUL\n")])
def test_a_script_and_the_world_around_it(code, arguments, status, out, error):
    """End quietly if nobody reads, print to any terminal, and take arguments that are UTF-8."""
    code = f"from lib.settings import run_main\nrun_main(lambda: {code})"
    script = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT,
                              env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if out is None:
        script.stdout.close()
        script.stdout = None
    assert script.communicate() == (out, error) and script.returncode == status


@pytest.mark.parametrize("error", [
    RuntimeError("x"), OSError("x"), ValueError("x"), ModuleNotFoundError("No module named 'x'")])
def test_an_error_that_nobody_expected_keeps_its_traceback(error):
    with pytest.raises(type(error)) as raised:
        run_main(partial(fail, error))
    assert raised.value is error


def test_the_status_is_mains(capsys):
    for status in (None, 0, 143):
        assert end(capsys, lambda returned=status: returned) == (status, "")


def test_a_script_that_fails_fails_its_caller(tmp_path, capsys):
    script = tmp_path / "no.py"
    script.write_text("raise SystemExit(2)")
    code, said = end(capsys, lambda: run_script(script))
    assert code == 1 and "no.py" in said
