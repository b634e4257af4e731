"""
Tell which of torchrun's processes this one is, and share work among them.

$ torchrun --standalone --nproc_per_node=4 pretrain.py configs/base_resm_init.py

NCCL connects CUDA cards, gloo CPUs. A process that torchrun did not start is the only rank. Every
rank has the whole model. The first rank prints and writes files.
"""
import itertools
import os
import sys
import time
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

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
        raise UserError(f"more ranks than cards: --nproc_per_node={cards}")
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
    barrier()  # a rank that ends early closes connections that another one still reads
    dist.destroy_process_group()
    return status


def data_parallel(net):
    """Wrap a network, under torchrun, so that gradients are summed over the ranks.

    The sum is not divided by their number: a rank's loss is its share of the step's mean.
    """
    if not under_torchrun():
        return net
    # pretraining uses no pooler, and where torch looks for such weights it never orders the
    # gradients anew: after a restart the sums are the same to the bit
    net = DistributedDataParallel(net, find_unused_parameters=True)
    net.register_comm_hook(None, sum_bucket)
    return net


def sum_bucket(_, bucket):
    """Sum a bucket of gradients over the ranks. Returns a future of the sums."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def all_reduce(tensor):
    """Sum a tensor over the ranks, in place. Returns it."""
    if get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_gather(tensor):
    """Gather the ranks' tensors, which have one shape: a list in the order of the ranks."""
    parts = [torch.empty_like(tensor) for _ in range(get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def sum_over_ranks(value):
    """Sum a number or a numpy array over the ranks. All ranks must give the same type."""
    total = all_reduce(torch.from_numpy(np.array(value)))
    return total.numpy() if isinstance(value, np.ndarray) else total.item()


def of_first_rank(value):
    """Return the first rank's value, which pickle must know, on every rank."""
    values = [value]
    if get_world_size() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def barrier():
    """Wait for the other ranks."""
    sum_over_ranks(0)


def any_signalled(signals):
    """Tell whether any rank has a signal in its list."""
    return sum_over_ranks(len(signals)) > 0


def check_accumulation(settings):
    """Raise UserError if the ranks cannot share a step's micro-batches evenly."""
    if settings.accumulation % get_world_size():
        raise UserError(f"accumulation = {settings.accumulation} is not a multiple of the "
                        f"{get_world_size()} ranks of torchrun: change it or --nproc_per_node")


def deal_batches(batches):
    """Return an iterator over this rank's batches: every world_size-th."""
    return itertools.islice(batches, get_rank(), None, get_world_size())
