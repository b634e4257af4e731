"""
results/step_on_paper.py counts what a memory's training step really runs, here at a small size.
"""
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from model import BertConfig
from pkm import PKM, LazyAdam
from results.step_on_paper import stages

NO_KERNEL = "view", "empty", "promote_types", "profiler"  # and views of other names


class Ops(TorchDispatchMode):
    """Count the ops that run a kernel, and the bytes of their inputs and outputs."""

    ops = bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        name = op._schema.name.removeprefix("aten::")
        if not (op.is_view or any(word in name for word in NO_KERNEL)):
            written = [arg for arg, about in zip(args, op._schema.arguments, strict=False)
                       if about.is_write and name != "index_copy_"]  # which does not read the table
            used = result if name.startswith("new_") else (args, kwargs, result)
            read = {id(leaf): leaf for leaf in tree_leaves(used)}.values()
            self.ops += 1
            self.bytes += sum(leaf.nbytes for leaf in [*read, *tree_leaves(written)]
                              if torch.is_tensor(leaf))
        return result


@pytest.fixture(scope="module")
def counted():
    """The stages of a small memory, and what its second step ran: {part: Ops}, operations."""
    torch.manual_seed(0)
    c = BertConfig(d_model=64, n_head=1, n_keys=8, memory_heads=2, topk=4, key_dim=32)
    memory = PKM(c.d_model, c.n_keys, c.memory_heads, c.topk, c.key_dim)
    optimizer = LazyAdam([memory.values])
    for _ in range(2):  # the first step makes the moments
        memory.zero_grad()
        parts = {name: Ops() for name in ("forward", "backward", "update")}
        x = torch.randn(2048, c.d_model, requires_grad=True)
        grad = torch.randn(2048, c.d_model)
        with FlopCounterMode(display=False) as operations:
            with parts["forward"], torch.autocast("cpu", torch.bfloat16):
                y = torch.add(x, memory(x))  # as in model.Layer
            with parts["backward"]:
                y.backward(grad)
        with parts["update"]:
            optimizer.step()
        optimizer.zero_grad()
    return stages(c, len(x)), parts, operations.get_total_flops()


@pytest.mark.parametrize("part", ["forward", "backward", "update"])
def test_ops_and_bytes_are_those_of_a_step(counted, part):
    formulas = [stage for stage in counted[0] if stage.part == part]
    ops = sum(stage.ops for stage in formulas)
    assert ops == pytest.approx(counted[1][part].ops, abs=2)  # releases of torch may differ
    assert sum(stage.once for stage in formulas) == pytest.approx(counted[1][part].bytes, rel=0.02)


def test_operations_are_those_of_a_step(counted):
    assert sum(stage.half + stage.full for stage in counted[0]) == counted[2]
