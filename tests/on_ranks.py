"""
Runs of the scripts as torchrun starts them, but forked from one process, which saves imports:

$ python -m tests.on_ranks 2 float64 pretrain.py tiny.py --out=out/two [, finetune.py ...]

The first word is the number of ranks, or 0 for a process alone; the second one float64 or float32.
The commands, with commas between them, run one after the other; the exit status is the highest one.
"""
import functools
import itertools
import os
import socket
import sys
import traceback

import torch

import common
import finetune
import measure
import pretrain
import ranks

MAINS = {"pretrain.py": pretrain.main, "finetune.py": finetune.main, "measure.py": measure.main}


def build_double(build, *args):
    built = build(*args)
    (built[0] if isinstance(built, tuple) else built).double()
    return built


def in_float64():
    """Everything that computes, the losses too."""
    for script, name in ((pretrain, "start_model"), (finetune, "build_model")):
        setattr(script, name, functools.partial(build_double, getattr(script, name)))
    torch.Tensor.float = torch.Tensor.double


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return str(listener.getsockname()[1])


def fork(world, function):
    """The exit status of each rank that calls the function."""
    port, children = free_port(), []
    for rank in range(world or 1):
        if child := os.fork():
            children.append(child)
            continue
        if world:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                              MASTER_ADDR="localhost", MASTER_PORT=port)
        try:
            ranks.run(function)
        except SystemExit as end:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code or 0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main():
    world, dtype, *words = sys.argv[1:]
    torch.set_num_threads(1)
    if dtype == "float64":
        in_float64()
    commands = [list(group) for comma, group in itertools.groupby(words, ",".__eq__) if not comma]
    statuses = set()
    for script, *args in commands:
        statuses |= set(fork(int(world), lambda script=script, args=args: MAINS[script](args)))
        if statuses != {0}:
            break
    return max(statuses, key=abs)


if __name__ == "__main__":
    common.run(main)
