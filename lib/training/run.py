"""
Old names of lib/weights/run.py.
"""
from lib.weights.run import Run

NO_EFFECT = {"out", "log_interval", "checkpoint_interval", "device", "compile", "tensorboard",
             "rank_timeout"}


def read_settings(run, needed=()):
    return Run(run).settings(needed)


def write_usage(run, step, counts):
    Run(run).write_usage(step, counts)


def read_usage(run):
    return Run(run).usage_snapshots()


def read_evaluations(run):
    return Run(run).evaluations()
