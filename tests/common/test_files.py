"""
Files that are whole or absent, and locks.
"""
import errno
import fcntl
import json
import math
import os
import subprocess
import sys
import threading
import time

import pytest

from lib.errors import UserError
from lib.files import atomic, discard, lock, null_to_nan, read_json, to_json
from tests.helpers import ROOT


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
    (tmp_path / ".tmp_folder").mkdir()  # left by a killed process
    (tmp_path / ".tmp_folder" / "stale").touch()
    with atomic(folder) as temporary:
        temporary.mkdir()
        (temporary / "a").write_text("whole")
    assert os.listdir(folder) == ["a"] and sorted(os.listdir(tmp_path)) == ["folder", "new"]


def test_links_are_not_followed(tmp_path):
    """A link loses its name only, and a lock does not write through one."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("precious")
    (tmp_path / "run").symlink_to("mine")
    (tmp_path / ".lock_other").symlink_to("mine/file")
    discard(tmp_path / "run")
    with pytest.raises(UserError, match=".lock_other: a link in place of a lock file: remove it"), \
            lock(tmp_path / "other", "trains there"):
        pass
    assert not (tmp_path / "run").is_symlink()
    assert (tmp_path / "mine" / "file").read_text() == "precious"


def test_a_folder_may_be_a_link_to_another(tmp_path):
    """Both names share one lock. A link to nothing, to itself, or to a file is refused."""
    (tmp_path / "big/run").mkdir(parents=True)
    (tmp_path / "run").symlink_to("big/run")
    with lock(tmp_path / "run", "trains there"):
        assert (tmp_path / "big/.lock_run").exists()
        with pytest.raises(UserError, match="one process"), lock(tmp_path / "big/run", "x"):
            pass
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "file").touch()
    (tmp_path / "to_file").symlink_to("file")
    for name, words in {"gone": "gone: a link to nowhere, which is not there",
                        "round": "round: a link to round, which is not there",
                        "file": "expected the path of a folder",
                        "to_file": "expected the path of a folder"}.items():
        with pytest.raises(UserError, match=words), lock(tmp_path / name, "x"):
            pass
    with pytest.raises(UserError, match="^/: expected the path of a folder"), lock("/", "x"):
        pass
    assert not list(tmp_path.rglob(".lock_*"))


def test_json_has_no_nan(tmp_path):
    """What is not finite is null in the file, and nan again for who reads it."""
    content = {"a": math.nan, "b": [1.5, math.inf, {"c": -math.inf}], "d": (True, "NaN", 3, None)}
    text = to_json(content)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None, "b": [1.5, None, {"c": None}], "d": [True, "NaN", 3, None]}
    assert to_json({"a": 0.1}) == json.dumps({"a": 0.1})
    (tmp_path / "file").write_text('{"a": null, "b": {"c": null}, "d": 2}')
    found = read_json(tmp_path / "file", null_to_nan)
    assert math.isnan(found["a"]) and math.isnan(found["b"]["c"]) and found["d"] == 2
    assert read_json(tmp_path / "file")["a"] is None
    (tmp_path / "file").write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(UserError, match="file: not readable"):
        read_json(tmp_path / "file")


def test_a_lock_names_its_process_and_leaves_nothing(tmp_path):
    folder = tmp_path / "out" / "run"
    with lock(folder, "trains there"):
        assert (folder.parent / ".lock_run").read_text().strip() == str(os.getpid())
        line = f"{folder}: process {os.getpid()} trains there"
        with pytest.raises(UserError, match=line), lock(tmp_path / "out/./run", "trains there"):
            pass
        with lock(folder.parent / "other", "trains there"):
            pass
    with pytest.raises(KeyError), lock(folder, "trains there"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_lock_ends_with_its_process(tmp_path):
    code = ("import sys, time, lib.files\nwith lib.files.lock(sys.argv[1], 'x'):\n"
            "    print('has it', flush=True)\n    time.sleep(60)")
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path / "run"], cwd=ROOT,
                              stdout=subprocess.PIPE)
    holder.stdout.readline()
    with pytest.raises(UserError, match=f"process {holder.pid} x"), lock(tmp_path / "run", "x"):
        pass
    holder.kill()
    holder.communicate()
    with lock(tmp_path / "run", "x"):
        assert (tmp_path / ".lock_run").read_text().strip() == str(os.getpid())


def test_processes_that_wait_have_the_lock_one_at_a_time(tmp_path):
    inside, most = [], []

    def work():
        for _ in range(15):
            with lock(tmp_path / "new" / "run", "x", wait=True):
                inside.append(1)
                time.sleep(1e-4)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 60
    assert list(tmp_path.rglob(".lock_*")) == []


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def flock(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock(tmp_path / "run", "trains there"):
        pass
    assert "No locks available): start no second process for run\n" in capsys.readouterr().out


def test_a_file_in_place_of_the_parent_folder_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError), lock(tmp_path / "file" / "run", "trains there"):
        pass
