"""
Tell what a run's numbers depend on besides its settings and data.
"""
import os
import subprocess

import torch

from lib.common.errors import ROOT


def process_facts():
    """Return the number of threads, torch's version and the git commit of this code."""
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, "commit": git_commit()}


def git_commit(root=ROOT):
    """Return the commit of a checkout. It ends in "-dirty" if tracked files differ from it. Without
    git, or outside a checkout, return "unknown"."""
    # with --git-dir git looks for no other checkout around this folder
    command = ["git", f"--git-dir={root / '.git'}", f"--work-tree={root}", "describe", "--always",
               "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True,
                              env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"})
    except (OSError, ValueError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
