"""
Write files that are whole or absent, read damaged ones, and lock folders.
"""
import errno
import json
import math
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from lib.files import (
    atomic,
    discard,
    load_file,
    lock,
    null_to_nan,
    read_json,
    to_json,
    tsv_text,
)
from lib.settings import UserError
from tests.on_ranks import start, wait_for


def test_atomic(tmp_path):
    """Write all or nothing, also after an error and after a kill. A folder is written once."""
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


def test_only_the_first_rank_writes(tmp_path, monkeypatch):
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    (tmp_path / "old").touch()
    with lock(tmp_path / "run", "trains there"), atomic(tmp_path / "file") as temporary:
        temporary.write_text("x")
    discard(tmp_path / "old")
    assert os.listdir(tmp_path) == ["old"]
    monkeypatch.setenv("RANK", "0")
    with lock(tmp_path / "run", "trains there"), atomic(tmp_path / "file") as temporary:
        temporary.write_text("x")
    assert set(os.listdir(tmp_path)) >= {"file", ".lock_run"}


def test_discard(tmp_path):
    """Remove a link by its name only."""
    for name in ("mine", "folder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "run").symlink_to("mine")
    for name in ("run", "folder", "nothing", "mine/file"):
        discard(tmp_path / name)
    assert os.listdir(tmp_path) == ["mine"] and not os.listdir(tmp_path / "mine")


def hold(folder):
    with lock(folder, "trains there"):
        folder.with_name("held").touch()
        time.sleep(60)


def test_one_process_at_a_time_works_in_a_folder(tmp_path):
    """Lock a folder, also by a link to it, until the process ends, even by a kill."""
    [holder] = start(0, hold, tmp_path / "run")
    wait_for((tmp_path / "held").exists, holder)
    (tmp_path / "link").symlink_to("run")
    for name in ("run", "link"):
        with pytest.raises(UserError, match="run: .* trains there"), \
                lock(tmp_path / name, "trains there"):
            pass
    with lock(tmp_path / "other", "trains there"):
        pass
    holder.kill()
    holder.join()
    for _ in range(2):  # an error gives the lock back, too
        with pytest.raises(KeyError), lock(tmp_path / "run", "trains there"):
            raise KeyError


def test_json_has_no_nan(tmp_path):
    """Write null for what is not finite, and read it as nan."""
    content = {"a": math.nan, "b": [1.5, math.inf, {"c": -math.inf}], "d": (True, "NaN", 3, None)}
    text = to_json(content)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None, "b": [1.5, None, {"c": None}], "d": [True, "NaN", 3, None]}
    numbers = {"a": 0.1, "b": 1e-300, "c": 1 / 3, "d": 2**70}
    assert to_json(numbers) == json.dumps(numbers)
    (tmp_path / "file").write_text('{"a": null, "b": {"c": null}, "d": 2}')
    found = read_json(tmp_path / "file", null_to_nan)
    assert math.isnan(found["a"]) and math.isnan(found["b"]["c"]) and found["d"] == 2
    assert read_json(tmp_path / "file")["a"] is None
    for damaged in ('{"a": ', r'["\ud800"]'):
        (tmp_path / "file").write_text(damaged)
        with pytest.raises(UserError, match="file: "):
            read_json(tmp_path / "file")


def test_a_lock_that_the_file_system_lacks_is_an_error(tmp_path, monkeypatch):
    """No marker takes its place, because a marker outlives its process."""
    fcntl = pytest.importorskip("fcntl")
    for number in (errno.ENOLCK, errno.ENOSYS):
        monkeypatch.setattr(fcntl, "flock", partial(refuse, number))
        with pytest.raises(OSError, match=".lock_run'"), lock(tmp_path / "run", "trains there"):
            pass


def refuse(number, *_):
    raise OSError(number, os.strerror(number))


class Payload:
    """Run code when it is unpickled, as a stranger's file may."""

    def __reduce__(self):
        return Path.touch, (Path("run_me"),)


def test_a_file_of_tensors_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(2)}, "good.bin")
    torch.save({"a": torch.ones(2)}, "old.bin", _use_new_zipfile_serialization=False)
    for name in ("good.bin", "old.bin"):
        assert torch.equal(load_file(Path(name))["a"], torch.ones(2))
    torch.save(Payload(), "code.bin")
    Path("half.bin").write_bytes(Path("good.bin").read_bytes()[:300])
    Path("half.safetensors").write_bytes(b"half")
    for name in ("code.bin", "half.bin", "half.safetensors"):
        if "safe" in name:
            pytest.importorskip("safetensors")
        with pytest.raises(UserError, match=f"{name}: "):
            load_file(Path(name))
    assert not Path("run_me").exists()


def test_a_cell_is_one_field_of_a_table():
    rows = [{"x": "a\tb", "y": "c\r\nd"}, {"x": 1, "y": 0.5}]
    assert tsv_text(rows) == "x\ty\na b\tc  d\n1\t0.5\n"
