"""
Call functions in other processes, alone or on several ranks.

The processes are forked from a server that has imported what they need: conftest.py starts it.
"""
import functools
import itertools
import multiprocessing
import os
import time

import torch
import torch.distributed as dist

from lib.ranks import run_ranks

SERVER = multiprocessing.get_context("forkserver")
NUMBERS = itertools.count()  # of groups of ranks, where torchrun counts restarts


@functools.cache
def store():
    """Start the store in which ranks meet, as torchrun does."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def start(world, function, *args, float64=False):
    """Start function(*args) on `world` ranks; with 0 in one process without torchrun.

    Everything is double if float64. Returns the processes.
    """
    group = {"CUDA_VISIBLE_DEVICES": "",  # ranks would need a card each
             "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": store().port,
             "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": next(NUMBERS)}
    ranks = [{**group, "RANK": rank, "LOCAL_RANK": rank} for rank in range(world)]
    processes = [SERVER.Process(target=call, args=(environment, float64, function, args))
                 for environment in ranks or [{}]]
    for process in processes:
        process.start()
    return processes


def call(environment, float64, function, args):
    for name, value in environment.items():
        os.environ[name] = str(value)
    if float64:  # losses too
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double
    run_ranks(functools.partial(function, *args))


def finish(*started):
    """Wait for processes, which must succeed."""
    processes = list(itertools.chain(*started))
    for process in processes:
        process.join()
    assert not any(process.exitcode for process in processes), processes


def wait_for(condition, process):
    """Poll until condition() is true, and return its value. The process must not end before."""
    while not (value := condition()):
        assert process.is_alive()
        time.sleep(0.001)
    return value
