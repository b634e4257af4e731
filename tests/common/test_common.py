"""
Settings, recipes, and files that are whole or absent.
"""
import dataclasses
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tqdm

import pretrain
from lib.common.errors import UserError
from lib.common.files import atomic, lock
from lib.common.progress import Progress, markdown
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


def test_progress_on_a_pipe_is_a_line_now_and_then(capsys, monkeypatch):
    """And on a terminal a bar that is drawn again and again."""
    clock = itertools.count(step=4)
    monkeypatch.setattr(tqdm.std, "time", lambda: float(next(clock)))
    monkeypatch.setattr(Progress, "monitor_interval", 0)
    assert list(Progress(range(10), "reading")) == list(range(10))
    lines = capsys.readouterr().err.strip("\r").splitlines()
    assert 2 <= len(lines) <= 5 and all(line.startswith("reading: ") for line in lines)
    assert "/10 [" in lines[0]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    list(Progress(range(10), "reading"))
    assert capsys.readouterr().err.count("\rreading: ") > 3


def test_a_table_in_markdown():
    assert markdown(["name", "x|y"], [["a", 1.234], ["long one", None]]) == (
        "| name     | x\\|y |\n| -------- | ---- |\n| a        | 1.23 |\n| long one |      |\n")


def test_atomic(tmp_path):
    file, folder = tmp_path / "new" / "file", tmp_path / "folder"
    for content in ("one", "two"):
        with atomic(file) as temporary:
            temporary.write_text(content)
            assert not file.exists() or file.read_text() == "one"
    with pytest.raises(OSError), atomic(file) as temporary:
        temporary.write_text("half")
        raise OSError
    assert file.read_text() == "two" and os.listdir(file.parent) == ["file"]
    with pytest.raises(KeyboardInterrupt), atomic(folder) as temporary:
        temporary.mkdir()
        (temporary / "a").write_text("half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["new"]
    (tmp_path / ".tmp_folder").mkdir()  # as a killed process leaves it
    (tmp_path / ".tmp_folder" / "stale").touch()
    with atomic(folder) as temporary:
        temporary.mkdir()
        (temporary / "a").write_text("whole")
    assert os.listdir(folder) == ["a"] and sorted(os.listdir(tmp_path)) == ["folder", "new"]


def test_a_lock_names_its_process_and_leaves_nothing(tmp_path):
    folder = tmp_path / "out" / "run"
    with lock(folder, "trains there"):
        assert (folder.parent / ".lock_run").read_text().strip() == str(os.getpid())
        line = f"{folder}: process {os.getpid()} trains there"
        with (pytest.raises(UserError, match=line),
              lock(folder.parent / "." / "run", "trains there")):
            pass
        with lock(folder.parent / "other", "trains there"):
            pass
    with pytest.raises(KeyError), lock(folder, "trains there"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_lock_ends_with_its_process(tmp_path):
    code = ("import sys, time, lib.common.files\n"
            "with lib.common.files.lock(sys.argv[1], 'x'):\n print('has it', flush=True); time.sleep(60)")
    held = subprocess.Popen([sys.executable, "-c", code, tmp_path / "run"], cwd=ROOT,
                            stdout=subprocess.PIPE)
    held.stdout.readline()
    with (pytest.raises(UserError, match=f"process {held.pid} x"),
          lock(tmp_path / "run", "x")):
        pass
    held.kill()
    held.wait()
    held.stdout.close()
    with lock(tmp_path / "run", "x"):
        assert (tmp_path / ".lock_run").read_text().strip() == str(os.getpid())


def test_of_those_that_wait_for_a_lock_one_at_a_time_has_it(tmp_path, monkeypatch):
    inside, most, times = [], [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: times(1e-3))

    def work():
        for _ in range(15):
            with lock(tmp_path / "new" / "run", "x", wait=True):
                inside.append(1)
                times(1e-4)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 60
    assert list(tmp_path.rglob(".lock_*")) == []


@pytest.mark.parametrize("code, status", [
    ("print(1)", 141), ("sys.exit(0)", 0), ("(print(1), sys.exit(0))", 141)])
def test_a_closed_pipe_is_no_error(code, status):
    """As in `python measure.py ... | head`, also where all output is written at the end."""
    reading, writing = os.pipe()
    os.close(reading)
    script = f"import sys, lib.common.errors; lib.common.errors.run_main(lambda: {code})"
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=plain, stdout=writing,
                          stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_under_the_output_is_one_line():
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", "import lib.common.errors as e; e.run_main(lambda: print(1))"],
                              cwd=ROOT, env=plain, stdout=full, stderr=subprocess.PIPE, text=True,
                              check=False)
    assert done.returncode == 1 and done.stderr.startswith("error: [Errno 28]")
    assert done.stderr.count("\n") == 1
