"""
More than one process: what a script shares with the others that torchrun started, through
torch.distributed (NCCL between CUDA cards, gloo between CPUs). A script alone uses none of it.

$ torchrun --standalone --nproc_per_node=4 pretrain.py configs/base_resm_init.py
$ torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=HOST pretrain.py CONFIG.py
$ torchrun --nnodes=2 --node_rank=1 --nproc_per_node=8 --master_addr=HOST pretrain.py CONFIG.py

The micro-batches of a step are dealt out; what is in one, its dropout too, is a function of (seed,
step, micro-batch), so any number of ranks makes the same step, but for the order of sums. The dense
weights are on every rank, their gradients are added up once a step. A value table is cut by columns
(ShardedValueTable). Files are those of one process. Only the scripts and what they share need this
file: pkm.py stays free of it.
"""
import contextlib
import os
import sys
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from lib.common.errors import Failure, UserError, run_main
from lib.common.torchrun import under_torchrun

GROUP = None  # of processes; None is torch's default
MISTAKE = 1000  # above all signals


def is_distributed():
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_initialized()


def get_world_size():
    """How many processes there are."""
    return dist.get_world_size() if is_distributed() else 1


def get_rank():
    """The number of this process; the first, 0, prints and writes."""
    return dist.get_rank() if is_distributed() else 0


def run_ranks(main):
    """common.run(main). Under torchrun in a process group: the first rank prints, and a mistake
    that one rank or all of them meet ends all with status 2, after one line."""
    run_main((lambda: _run_as_rank(main)) if under_torchrun() else main)


def _run_as_rank(main):
    on_this_node = int(os.environ["LOCAL_RANK"])
    if cards := torch.cuda.device_count():  # CUDA_VISIBLE_DEVICES= : ranks on CPUs
        if on_this_node > cards:
            sys.exit(2)  # one says it
        if on_this_node == cards:
            raise UserError(f"more ranks than cards: --nproc_per_node={cards}, or "
                                   "CUDA_VISIBLE_DEVICES= for ranks on CPUs")
        torch.cuda.set_device(on_this_node)
    store, number, size = next(dist.rendezvous("env://"))
    # torchrun keeps the store after a restart, with the addresses of the dead
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(store=store, rank=number, world_size=size)
    if get_rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - to the end
    try:
        status = main()
        dist.destroy_process_group()
        return status
    except UserError:  # to be said by the first one of those that met it
        own = MISTAKE + get_world_size() - get_rank()
        with contextlib.suppress(RuntimeError):  # the others may be gone
            if _all_reduce_max(own, timedelta(seconds=30)) > own:
                sys.exit(2)
        raise
    except RuntimeError as error:
        if on_this_node and isinstance(error, Failure):
            sys.exit(1)
        if not lost_rank(error):
            raise
        raise Failure(f"rank {get_rank()} lost another one, or waited longer than rank_timeout "
                             f"for it ({str(error).splitlines()[0]})") from None


def lost_rank(error):
    """Whether an error says that another rank is gone, or was waited for too long."""
    return is_distributed() and (isinstance(error, dist.DistError) or "gloo" in str(error))


def set_timeout(seconds):
    """From now on a rank that waits longer than this for another one fails; all ranks call it."""
    global GROUP
    if is_distributed():
        GROUP = dist.new_group(timeout=timedelta(seconds=seconds))


def max_over_ranks(number=0):
    """The highest number that a rank calls this with; all ranks do, and wait for each other. Ends
    a rank with status 2 where another one met a user's mistake."""
    result = _all_reduce_max(number) if is_distributed() else number
    if result >= MISTAKE:
        sys.exit(2)
    return result


def any_signalled(signals):
    """Whether a signal has come to any rank; then one is in the list of each."""
    if (number := max_over_ranks(max(signals, default=0))) and not signals:
        signals.append(number)
    return bool(number)


def _all_reduce_max(number, timeout=None):
    code = torch.tensor(number)
    work = dist.all_reduce(code, dist.ReduceOp.MAX, group=GROUP, async_op=True)
    work.wait(timeout) if timeout else work.wait()
    return code.item()


@contextlib.contextmanager
def first_rank_first():
    """The other ranks come to the block once the first one is through."""
    if get_rank():
        max_over_ranks()
    yield
    if not get_rank():
        max_over_ranks()


def sum_over_ranks(value):
    """The sum over the ranks of a number or a numpy array, as such."""
    if not is_distributed():
        return value
    tensor = torch.from_numpy(np.array(value))
    dist.all_reduce(tensor, group=GROUP)
    return tensor.numpy() if isinstance(value, np.ndarray) else tensor.item()


def deal_batches(batches):
    """This rank's part of the batches, arrays or dicts of arrays: one of world(). All ranks must
    look up as often, so those with one batch less get an empty one in the end."""
    number = -1
    for number, batch in enumerate(batches):
        if number % get_world_size() == get_rank():
            yield batch
    if number % get_world_size() < get_rank() and number >= 0:
        yield batch[:0] if isinstance(batch, np.ndarray) else {k: v[:0] for k, v in batch.items()}


def my_micro_batches(accumulation):
    """Those of a step that this rank works on. UserError where they cannot be dealt out evenly."""
    if over := accumulation % get_world_size():
        least = accumulation - over
        nearest = f"{least} or {least + get_world_size()}" if least else get_world_size()
        raise UserError(f"accumulation = {accumulation}: no multiple of the {get_world_size()} ranks "
                               f"that torchrun started: --accumulation={nearest} is")
    return range(get_rank(), accumulation, get_world_size())
