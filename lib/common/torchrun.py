"""
Tell whether torchrun started this process.
"""
import os


def under_torchrun():
    """Tell whether this is one of torchrun's processes (see lib/distributed/processes.py)."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def first_rank():
    """Tell whether this process prints and writes files: it is torchrun's first, or alone."""
    return not under_torchrun() or os.environ["RANK"] == "0"
