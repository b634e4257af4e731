"""
The commit of the code: of its own checkout, whatever is around it, and never a failure.
"""
import shutil
import subprocess

import pytest
import torch

from lib import run as provenance
from lib.run import git_commit, process_facts


@pytest.fixture
def checkout(tmp_path):
    """A checkout with one commit. Returns (its folder, git(*arguments))."""
    if not shutil.which("git"):
        pytest.skip("no git on this machine")

    def git(*args):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True,
                              text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "first")
    git("tag", "-a", "v1", "-m", "a tag is no commit")
    return tmp_path, git


def test_the_commit_is_the_checkouts(checkout, monkeypatch):
    folder, git = checkout
    commit = git("rev-parse", "HEAD")
    monkeypatch.chdir("/")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a hook of another repository
    assert git_commit(folder) == commit
    (folder / "new").touch()  # an untracked file, such as a run
    assert git_commit(folder) == commit
    (folder / "file").write_text("two")
    assert git_commit(folder) == f"{commit}-dirty"
    monkeypatch.delenv("GIT_DIR")
    git("worktree", "add", "-q", "other")  # where .git is a file
    assert git_commit(folder / "other") == commit


def test_without_a_checkout_it_is_unknown(checkout, monkeypatch):
    folder, _ = checkout
    (folder / "inner").mkdir()
    assert git_commit(folder / "inner") == "unknown"  # not that of the folder around it
    (folder / "inner/.git").touch()
    assert git_commit(folder / "inner") == "unknown"
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_commit(folder) == "unknown"


def test_git_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()

    def hang(*args, timeout, **settings):
        raise subprocess.TimeoutExpired(args, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert git_commit(tmp_path) == "unknown"


def test_facts(monkeypatch):
    monkeypatch.setattr(provenance, "git_commit", lambda: "c")
    assert process_facts() == {"threads": torch.get_num_threads(), "torch": torch.__version__,
                               "commit": "c"}
