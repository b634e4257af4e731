"""
Run a script in the processes of torchrun (NCCL between CUDA cards, gloo between CPUs).

$ torchrun --standalone --nproc_per_node=4 pretrain.py configs/base_resm_init.py
$ torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=HOST pretrain.py CONFIG.py
$ torchrun --nnodes=2 --node_rank=1 --nproc_per_node=8 --master_addr=HOST pretrain.py CONFIG.py

The ranks share the micro-batches of a step. A micro-batch and its dropout are a function of (seed,
step, micro-batch). Any number of ranks therefore makes the same step, except for the order of sums.
Each rank has all dense weights, and adds up their gradients with the others (gradients.py). Each
has some columns of every value table (sharded_values.py). Files are the same as one process's.
"""
import contextlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from lib.common.errors import Failure, UserError, run_main
from lib.common.torchrun import under_torchrun

GROUP = None  # the process group of all collectives; None is torch's default
MISTAKE = 1000  # codes from here up report a user's mistake; lower ones are signals


def is_distributed():
    """Tell whether this process shares its work with others."""
    return dist.is_available() and dist.is_initialized()


def get_world_size():
    """Return the number of processes."""
    return dist.get_world_size() if is_distributed() else 1


def get_rank():
    """Return the number of this process; the first one, 0, prints and writes files."""
    return dist.get_rank() if is_distributed() else 0


def run_ranks(main):
    """Call main() as run_main does. Under torchrun, set up a process group first. Only the first
    rank prints. A user's mistake ends all ranks with status 2 and one line, even if only one rank
    met it."""
    run_main((lambda: _run_as_rank(main)) if under_torchrun() else main)


def _run_as_rank(main):
    local_rank = int(os.environ["LOCAL_RANK"])
    if cards := torch.cuda.device_count():  # if CUDA_VISIBLE_DEVICES is empty, ranks run on CPUs
        if local_rank > cards:
            sys.exit(2)  # the rank with number `cards` prints the error
        if local_rank == cards:
            raise UserError(f"more ranks than cards: --nproc_per_node={cards}, or "
                            "CUDA_VISIBLE_DEVICES= for ranks on CPUs")
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
        dist.destroy_process_group()
        return status
    except UserError as error:  # the lowest rank that met one prints it
        tell_torchrun(error)  # first: torchrun ends this rank as soon as another one has ended
        code = MISTAKE + world_size - rank
        with contextlib.suppress(RuntimeError):  # the others may be gone
            highest = _all_reduce_max(code, timedelta(seconds=30))
            dist.destroy_process_group()
            if highest > code:
                sys.exit(2)
        raise
    except RuntimeError as error:
        if local_rank and isinstance(error, Failure):
            sys.exit(1)
        failure = error
        if lost_rank(error):
            failure = Failure(f"rank {rank} lost another one, or waited longer than rank_timeout "
                              f"for it ({str(error).splitlines()[0]})")
        elif not isinstance(error, Failure):
            raise  # with its cause
        tell_torchrun(failure)
        raise failure from None


def tell_torchrun(error):
    """Leave an error's line for torchrun, whose report of twenty lines then ends with it."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        line = f"error: {error}"
        more = {"py_callstack": line, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": more}}))


def lost_rank(error):
    """Tell whether an error reports a rank that is gone, or too slow."""
    return is_distributed() and (isinstance(error, dist.DistError) or "gloo" in str(error))


def set_timeout(seconds):
    """Make a rank fail if it waits longer than `seconds` for another. Every rank must call it."""
    global GROUP
    if is_distributed():
        GROUP = dist.new_group(timeout=timedelta(seconds=seconds))


def max_over_ranks(value=0):
    """Return the maximum of an int over the ranks. All must call it, and wait for each other. Ends
    this rank with status 2 if another one met a user's mistake."""
    maximum = _all_reduce_max(value) if is_distributed() else value
    if maximum >= MISTAKE:
        dist.destroy_process_group()
        sys.exit(2)
    return maximum


def any_signalled(signals):
    """Tell whether any rank has a signal in its list; then every rank gets one."""
    stop, _ = stop_or_save(signals, False)
    return stop


def stop_or_save(signals, save):
    """Agree with the other ranks on what follows a step, in one exchange. Returns (any rank has a
    signal in its list, any rank wants to save). If one has a signal, every rank gets it."""
    signal, save = divmod(max_over_ranks(2 * max(signals, default=0) + save), 2)
    if signal and not signals:
        signals.append(signal)
    return bool(signal), bool(save)


def _all_reduce_max(value, timeout=None):
    maximum = torch.tensor(value)
    work = dist.all_reduce(maximum, dist.ReduceOp.MAX, group=GROUP, async_op=True)
    work.wait(timeout) if timeout else work.wait()
    return maximum.item()


@contextlib.contextmanager
def first_rank_first():
    """Let the other ranks enter the block after the first one has left it."""
    if get_rank():
        max_over_ranks()
    yield
    if not get_rank():
        max_over_ranks()


def sum_over_ranks(value):
    """Sum a number or a numpy array over the ranks. Returns the same type."""
    if not is_distributed():
        return value
    tensor = torch.from_numpy(np.array(value))
    dist.all_reduce(tensor, group=GROUP)
    return tensor.numpy() if isinstance(value, np.ndarray) else tensor.item()


def deal_batches(batches):
    """Yield this rank's batches: every world_size-th. They are arrays or dicts of arrays. Ranks
    with one batch fewer get an empty one at the end, because lookups are collective."""
    number = -1
    for number, batch in enumerate(batches):
        if number % get_world_size() == get_rank():
            yield batch
    if number % get_world_size() < get_rank() and number >= 0:
        yield batch[:0] if isinstance(batch, np.ndarray) else {k: v[:0] for k, v in batch.items()}


def my_micro_batches(accumulation, batch_size=0):
    """List this rank's micro-batches of a step; UserError if the ranks cannot share them evenly.
    With `batch_size`, the sequences of a micro-batch, the error names settings that work and keep
    the sequences of a step."""
    world_size = get_world_size()
    if accumulation % world_size:
        sequences = accumulation * batch_size
        more = range(accumulation - accumulation % world_size + world_size, sequences + 1)
        same = [n for n in more if n % world_size == 0 and sequences % n == 0]
        flags = f"--accumulation={more.start}"
        if same:
            flags = (f"--batch_size={sequences // same[0]} --accumulation={same[0]}, which keep "
                     f"{sequences} sequences a step")
        raise UserError(f"accumulation = {accumulation} is not a multiple of the {world_size} "
                        f"ranks that torchrun started: use {flags}")
    return range(get_rank(), accumulation, world_size)
