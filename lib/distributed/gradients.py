"""
Add up gradients over the ranks.
"""
import torch
import torch.distributed as dist
from torch import nn

from lib.distributed import processes
from lib.distributed.processes import get_rank, get_world_size, is_distributed


def batch_norms(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]


def prepare_batch_norms(model):
    """Make the model's batch norms ready for sum_gradients. A running statistic is
    (1 - m) * running + m * new for each micro-batch in turn; here a rank sees every world()th."""
    for norm in batch_norms(model) if is_distributed() else ():
        norm.of_one, norm.momentum = norm.momentum, 1 - (1 - norm.momentum) ** get_world_size()


@torch.no_grad()
def sum_gradients(model, loss, count):
    """Once a step, after this rank's `count` micro-batches: add up over the ranks the dense
    gradients and the loss, which is returned, in one all-reduce. The running statistics of batch
    norms become what one process would have after the micro-batches of all ranks: a mean of those
    of the ranks, which saw every world()th, with more weight for the later ranks."""
    if not is_distributed():
        return loss
    norms, parameters = batch_norms(model), [p for p in model.parameters() if p.grad is not None]
    weights = [norm.of_one * (1 - norm.of_one) ** (get_world_size() - 1 - get_rank()) / norm.momentum
               for norm in norms]
    statistics = [weight * running for norm, weight in zip(norms, weights, strict=True)
                  for running in (norm.running_mean, norm.running_var)]
    parts = [*(p.grad for p in parameters), *statistics, loss]
    flat = torch.cat([part.flatten().to(parts[0].dtype) for part in parts])
    dist.all_reduce(flat, group=processes.GROUP)
    sizes = [part.numel() for part in parts]
    sums = [piece.view_as(part) for part, piece in zip(parts, flat.split(sizes), strict=True)]
    for parameter, grad in zip(parameters, sums, strict=False):
        parameter.grad = grad
    for norm in norms:
        norm.num_batches_tracked += (get_world_size() - 1) * count
    running = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
    for buffer, mean in zip(running, sums[len(parameters):], strict=False):
        buffer.copy_(mean)
    return sums[-1]
