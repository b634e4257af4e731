"""
Tell which of torchrun's processes this one is, and share work among them.

$ torchrun --standalone --nproc_per_node=4 pretrain.py configs/base_resm_init.py

NCCL connects CUDA cards, gloo CPUs. A process that torchrun did not start is the only rank. The
first rank prints and writes files. lib/sharding.py cuts a model over the ranks.
"""
import contextlib
import os
import sys
import time
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from lib.settings import UserError, run_main


def under_torchrun():
    """Tell whether this is one of torchrun's processes."""
    return "LOCAL_RANK" in os.environ and "RANK" in os.environ


def get_rank():
    """Return the number of this process, from 0."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


def get_world_size():
    """Return the number of processes."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1


def first_rank():
    """Tell whether this process prints and writes files."""
    return get_rank() == 0


def run_ranks(main):
    """Call main() as run_main does; under torchrun in a process group, where rank 0 prints."""
    run_main(partial(run_as_rank, main) if under_torchrun() else main)


def run_as_rank(main):
    """Join the process group of torchrun and call main(). Returns its status."""
    local_rank = int(os.environ["LOCAL_RANK"])
    cards = torch.cuda.device_count()  # if CUDA_VISIBLE_DEVICES is empty, ranks run on CPUs
    if cards and local_rank >= cards:
        raise UserError(f"more ranks than cards: --nproc_per_node={cards}, or "
                        "CUDA_VISIBLE_DEVICES= for ranks on CPUs")
    if cards:
        torch.cuda.set_device(local_rank)
    store, rank, world_size = next(dist.rendezvous("env://"))
    # torchrun keeps the store after a restart, with the addresses of dead processes
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    # without a name, ranks with cards would have NCCL alone: no group for tensors on the CPU
    backend = "cpu:gloo,cuda:nccl" if cards else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - to the end
    try:
        status = main()
    except UserError:
        if rank:
            time.sleep(10)  # rank 0 prints the line, and torchrun ends this rank
        raise
    dist.destroy_process_group()
    return status


def sum_over_ranks(value):
    """Sum a number or a numpy array over the ranks. Returns the same type."""
    if get_world_size() == 1:
        return value
    tensor = torch.from_numpy(np.array(value))
    dist.all_reduce(tensor)
    return tensor.numpy() if isinstance(value, np.ndarray) else tensor.item()


def barrier():
    """Wait for the other ranks."""
    sum_over_ranks(0)


@contextlib.contextmanager
def first_rank_first():
    """Let the other ranks enter the block after the first one has left it."""
    if not first_rank():
        barrier()
    yield
    if first_rank():
        barrier()


def any_signalled(signals):
    """Tell whether any rank has a signal in its list."""
    return sum_over_ranks(len(signals)) > 0


def check_accumulation(config):
    """Raise UserError if the ranks cannot share a step's micro-batches evenly."""
    if config.accumulation % get_world_size():
        raise UserError(f"accumulation = {config.accumulation} is not a multiple of the "
                        f"{get_world_size()} ranks of torchrun: change it or --nproc_per_node")


def my_micro_batches(accumulation):
    """List this rank's micro-batches of a step."""
    return range(get_rank(), accumulation, get_world_size())


def deal_batches(batches):
    """Yield this rank's batches: every world_size-th. They are arrays or dicts of arrays."""
    rank, world_size, number = get_rank(), get_world_size(), -1
    for number, batch in enumerate(batches):
        if number % world_size == rank:
            yield batch
    if 0 <= number and number % world_size < rank:  # an empty one: lookups are collective
        yield batch[:0] if isinstance(batch, np.ndarray) else {k: v[:0] for k, v in batch.items()}


class Progress(tqdm):
    """Show a bar on the first rank. Away from a terminal it is drawn every 10 seconds."""

    def __init__(self, *args, **settings):
        pause = 0.1 if sys.stderr.isatty() else 10
        super().__init__(*args, mininterval=pause, delay=pause, disable=not first_rank(),
                         **settings)
