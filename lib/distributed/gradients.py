"""
Train one model on several ranks: prepare it once, then add up gradients in every step.
"""
import torch
import torch.distributed as dist
from torch import nn

from lib.distributed.processes import get_rank, get_world_size, is_distributed
from lib.distributed.sharded_values import ShardedValueTable
from pkm import PKM


def distribute(model):
    """Prepare a model, which has its weights already, for training on several ranks.

    Each value table keeps only this rank's columns. Batch norms get another momentum: one process
    computes (1 - m) * running + m * new for each micro-batch; a rank sees every world_size-th one.
    """
    if not is_distributed():
        return
    for module in model.modules():
        if isinstance(module, PKM):
            module.values = ShardedValueTable(module.values)
        if isinstance(module, nn.BatchNorm1d):
            module.one_process_momentum = module.momentum
            module.momentum = 1 - (1 - module.momentum) ** get_world_size()


@torch.no_grad()
def sum_gradients(model, loss, count):
    """Add up the dense gradients and the loss over the ranks. Returns the sum of the losses.

    Every rank calls it once a step, after its `count` micro-batches. The running statistics of
    batch norms become those of one process: a mean over the ranks, in which later micro-batches
    weigh more. All this is one all-reduce.
    """
    if not is_distributed():
        return loss
    world_size = get_world_size()
    tensors = [p.grad for p in model.parameters() if p.grad is not None]
    for norm in [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]:
        momentum, later_ranks = norm.one_process_momentum, world_size - 1 - get_rank()
        weight = momentum * (1 - momentum) ** later_ranks / norm.momentum
        tensors += [norm.running_mean.mul_(weight), norm.running_var.mul_(weight)]
        norm.num_batches_tracked += (world_size - 1) * count
    tensors.append(loss)
    flat = torch.cat([tensor.flatten().to(tensors[0].dtype) for tensor in tensors])
    dist.all_reduce(flat)
    sums = flat.split([tensor.numel() for tensor in tensors])
    for tensor, total in zip(tensors, sums, strict=True):
        tensor.copy_(total.view_as(tensor))
    return loss
