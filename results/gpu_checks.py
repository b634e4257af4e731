"""
Check a memory on a card or between cards. The other tests run on the CPU.

$ python results/gpu_checks.py brute_force     # test_pkm.py, its tensors on the device
$ torchrun --standalone --nproc_per_node=2 results/gpu_checks.py replicated
"""
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))
from lib.common.device import choose_device
from lib.common.errors import run_main
from pkm import PKM, LazyAdam


def brute_force():
    """Run test_pkm.py with its tensors on the device. Returns the exit status."""
    device, _, line = choose_device()
    print(line)
    torch.set_default_device(device)
    return pytest.main(["-q", "-p", "no:cacheprovider", "test_pkm.py"])


def replicated():
    """Train a memory in several ranks: the whole table and a part of the batch in each.
    Ends with an error unless its weights become those of one process."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    alone = train(device, lambda memory: memory, slice(None))
    dist.init_process_group(device_id=device if device.type == "cuda" else None)
    ours = train(device, DistributedDataParallel, slice(rank, None, ranks))
    for parameter, expected in zip(ours, alone, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-12)
    print(f"equal weights on rank {rank} of {ranks}, {dist.get_backend_config()}")
    dist.destroy_process_group()


def train(device, wrap, part):
    """Make 5 steps with a part of each batch. wrap: what makes a model of the memory. Without
    query_norm, whose statistics are of each rank's own tokens. Returns the parameters."""
    torch.manual_seed(0)
    memory = PKM(64, n_keys=32, query_norm=False).to(device, torch.float64)
    model, values = wrap(memory), LazyAdam([memory.values], lr=0.01)
    dense = torch.optim.SGD(memory.parameters(), lr=0.1)
    for x in torch.randn(5, 64, 64, dtype=torch.float64).to(device):
        model(x[part]).square().mean().backward()
        for optimizer in (dense, values):
            optimizer.step()
            optimizer.zero_grad()
    return list(memory.parameters())


if __name__ == "__main__":
    run_main({"brute_force": brute_force, "replicated": replicated}[sys.argv[1]])
