"""
Train one model on several ranks: prepare it once, then add up gradients in every step.
"""
import torch
import torch.distributed as dist
from torch import nn

from lib.distributed import processes
from lib.distributed.processes import get_rank, get_world_size, is_distributed
from lib.distributed.sharded_values import shard_values


def distribute(model):
    """Prepare a model, which has its weights already, for training on several ranks.

    Each value table keeps only this rank's columns. Batch norms get another momentum: one process
    computes (1 - m) * running + m * new for each micro-batch; a rank sees every world_size-th one.
    """
    if is_distributed():
        shard_values(model)
        for norm in batch_norms(model):
            norm.one_process_momentum = norm.momentum
            norm.momentum = 1 - (1 - norm.momentum) ** get_world_size()


def batch_norms(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]


@torch.no_grad()
def sum_gradients(model, loss, count):
    """Add up the dense gradients and the loss over the ranks. Returns the sum of the losses.

    Every rank calls it once a step, after its `count` micro-batches. The running statistics of
    batch norms become those of one process: a mean over the ranks, in which later micro-batches
    weigh more. All this is one all-reduce.
    """
    if not is_distributed():
        return loss
    world_size, norms = get_world_size(), batch_norms(model)
    statistics = []
    for norm in norms:
        momentum, later_ranks = norm.one_process_momentum, world_size - 1 - get_rank()
        weight = momentum * (1 - momentum) ** later_ranks / norm.momentum
        statistics += [weight * norm.running_mean, weight * norm.running_var]
    parameters = [p for p in model.parameters() if p.grad is not None]
    tensors = [*(p.grad for p in parameters), *statistics, loss]
    flat = torch.cat([tensor.flatten().to(tensors[0].dtype) for tensor in tensors])
    dist.all_reduce(flat, group=processes.GROUP)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    sums = iter([piece.view_as(tensor) for tensor, piece in zip(tensors, pieces, strict=True)])
    for parameter in parameters:
        parameter.grad = next(sums)
    for norm in norms:
        norm.running_mean.copy_(next(sums))
        norm.running_var.copy_(next(sums))
        norm.num_batches_tracked += (world_size - 1) * count
    return next(sums)
