"""
Whether torchrun started this process.
"""
import os


def under_torchrun():
    """Whether this is one of the processes of torchrun, see ranks.py."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def first_rank():
    """Whether this process is the first of torchrun's, which prints and writes, or alone."""
    return not under_torchrun() or os.environ["RANK"] == "0"
