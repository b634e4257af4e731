"""
Run commands in several processes, which are forked from one to save imports.

$ python -m tests.on_ranks 2 float64 pretrain.py tiny.py , 4 float32 values bfloat16

A comma separates commands. A command begins with its number of processes, which get torchrun's
environment (0: one process without it), and with its dtype, float32 or float64. A line shows the
exit status of each process. The exit status is 0 if all succeeded.
"""
import functools
import itertools
import os
import shutil
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import finetune
import measure
import pretrain
from lib.distributed import (
    ShardedValueTable,
    any_signalled,
    columns,
    cut_moments,
    get_rank,
    get_world_size,
    run_ranks,
)
from values import LazyAdam, ValueTable


def values(args):
    """Compare a lookup and an update with a whole table's, and count the bytes sent.

    args: 'even' gives each rank 3 tokens, otherwise they have 5, 0, 7 and 5. 'bfloat16' is the
    dtype that travels. 'frozen' freezes the table.
    """
    world, rank, reads, dim = get_world_size(), get_rank(), 6, 16
    tokens = [3] * world if "even" in args else [5, 0, 7, 5][:world]
    dtype = torch.bfloat16 if "bfloat16" in args else torch.float32
    torch.manual_seed(0)
    whole = ValueTable(100, dim)
    whole.learns = "frozen" not in args
    before, state = whole.weight.clone(), torch.get_rng_state()
    ours = ShardedValueTable(whole)
    assert torch.equal(ours.weight, columns(before)) and torch.equal(state, torch.get_rng_state())
    first, last = sum(tokens[:rank]), sum(tokens[:rank + 1])
    slots = torch.randint(100, (sum(tokens), 2, 3), dtype=torch.int32)
    weights = torch.rand(sum(tokens), 2, 3).requires_grad_()
    grad = torch.randn(sum(tokens), dim).to(dtype)
    expected = whole(slots, weights.to(dtype).float(), dtype)  # as they travel
    expected.backward(grad)

    sent, send = [], dist.all_to_all_single

    def counted(out, x, received=None, sizes=None, **more):
        if sizes:
            others = len(x) - sizes[rank]
            sent.append(others * x[0].nbytes if len(x) else 0)
        return send(out, x, received, sizes, **more)

    dist.all_to_all_single = counted
    own = weights.detach()[first:last].requires_grad_()
    sums = ours(slots[first:last], own, dtype)
    forward = sum(sent)
    sums.backward(grad[first:last])
    backward, size = sum(sent) - forward, torch.empty(0, dtype=dtype).element_size()
    dist.all_to_all_single = send
    if "even" in args:  # the formula of ShardedValueTable's docstring
        assert forward == (world - 1) * 3 * ((4 + size) * reads + size * dim // world)
        assert backward == (world - 1) * 3 * (size * reads + size * dim // world)
    assert sums.dtype == dtype and torch.equal(sums, expected[first:last])
    near = 1e-5 if dtype == torch.float32 else 2**-6  # each rank's part was rounded
    torch.testing.assert_close(own.grad, weights.grad[first:last], rtol=near, atol=near)
    whole.replicated = False  # every rank has all reads of the whole table already
    adams = [LazyAdam([table], lr=0.1) for table in (ours, whole)]
    for adam in adams:
        adam.step(grad_scale=2.0**16)
    torch.testing.assert_close(ours.weight, columns(whole.weight), rtol=1e-6, atol=1e-6)
    assert ("frozen" in args) == torch.equal(whole.weight, before)
    cut = cut_moments(adams[1].state_dict())["state"]
    for state, expected in zip(adams[0].state.values(), cut.values(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):  # a rank has 1 / world of the moments
            assert state[key].shape == (100, dim // world)
            torch.testing.assert_close(state[key], expected[key], rtol=1e-5, atol=0)


def one_signalled(args):
    """Send a signal to the rank args[0] alone."""
    signals = [15] if get_rank() == int(args[0]) else []
    assert any_signalled(signals) and signals == [15] and not any_signalled([])


def rewind(args):
    """Remove the checkpoints of the run args[0] that are newer than the step args[1]."""
    for folder in Path(args[0]).glob("step_*"):
        if int(folder.name[5:]) > int(args[1]):
            shutil.rmtree(folder)


MAINS = {"pretrain.py": pretrain.main, "finetune.py": finetune.main, "measure.py": measure.main,
         "values": values, "one_signalled": one_signalled, "rewind": rewind}


def call(dtype, script, args):
    if dtype == "float64":  # for everything, losses too
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double
    return MAINS[script](args)


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return str(listener.getsockname()[1])


def fork(world, function):
    """Call a function on each rank. Returns their exit statuses."""
    port, children = free_port(), []
    for rank in range(world or 1):
        if child := os.fork():
            children.append(child)
            continue
        if world:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                              MASTER_ADDR="localhost", MASTER_PORT=port)
        try:
            run_ranks(function)
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code or 0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main():
    torch.set_num_threads(1)
    commands = [list(group) for comma, group in itertools.groupby(sys.argv[1:], ",".__eq__)
                if not comma]
    failed = False
    for world, dtype, script, *args in commands:
        statuses = fork(int(world), functools.partial(call, dtype, script, args))
        print(f"ended {statuses}: {script}", flush=True)
        failed |= any(statuses)
    sys.exit(failed)


if __name__ == "__main__":
    main()
