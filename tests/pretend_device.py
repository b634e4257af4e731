"""
Pretend that a CPU has a second device, to find code that mixes devices or waits for one.

>>> register()                                  # once, in a process of its own
>>> x = torch.ones(3, device="pretend")
>>> x + torch.ones(3)                           # RuntimeError
>>> with count_waits() as waits:
...     x.sum().item()
>>> waits                                       # {("item", "file.py function"): 1}

A tensor of the device is an ordinary torch.Tensor. Its storage says that it is on pretend:0, and
lies in the memory of a CPU storage, its twin. PyTorch splits composite operations, and calls `run`
for each of the others as it calls CUDA's kernels. `run` computes them on the CPU, in the same
memory.

As in CUDA, a tensor without dimensions may stay on the CPU, and so may the index of a tensor, which
counts as a copy to the device.
"""
import collections
import contextlib
import sys
from functools import cache, partial
from pathlib import Path

import torch
from torch.utils import backend_registration

ROOT = Path(__file__).parent.parent
SETUP = "_setup_privateuseone_for_python_backend"  # private to torch, and missing in older versions
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
AUTOCAST_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
SET = torch.ops.aten.set_.source_Storage_storage_offset

# In these the host waits for CUDA: it needs a value, or the size of the result.
WAITS = {"_local_scalar_dense": "item", "nonzero": "nonzero", "masked_select": "masked_select",
         "equal": "equal", "isin": "isin", "bincount": "bincount", "_unique2": "unique",
         "unique_dim": "unique", "unique_consecutive": "unique_consecutive"}
# What autocast computes in its dtype, which stands for None, and in float32.
AUTOCAST = {**dict.fromkeys(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm")),
            "layer_norm": torch.float32}
INDEXED = "index", "_index_put_impl_"  # their second argument has the indices
LIBRARIES = []  # they take their kernels back when they go
COUNTERS = []  # of the count_waits blocks that we are in
ANSWERS = {"is_available": True, "is_initialized": True, "_is_in_bad_fork": False,
           "device_count": 1, "current_device": 0, "manual_seed_all": None, "synchronize": None,
           "get_amp_supported_dtype": [torch.bfloat16, torch.float16]}


class Backend:
    """Answers what PyTorch asks torch.pretend."""

    def __getattr__(self, name):
        if name not in ANSWERS:
            raise AttributeError(f"torch.pretend has no {name}")
        return lambda *args: ANSWERS[name]


def register():
    """Add the device to this process, for good."""
    getattr(backend_registration, SETUP)("pretend", backend_module=Backend())
    torch.__future__.set_swap_module_params_on_conversion(True)  # Module.to keeps its Parameters
    LIBRARIES[:] = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    LIBRARIES[0].fallback(run, "PrivateUse1")
    LIBRARIES[0].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name, dtype in AUTOCAST.items():
        kernel = partial(autocast, getattr(torch.ops.aten, name).default, dtype)
        LIBRARIES[1].impl(name, kernel, "AutocastPrivateUse1")
    LIBRARIES[1].impl("copy_", copy, "PrivateUse1")
    for name in ("source_Storage", "source_Storage_storage_offset"):
        kernel = getattr(torch.ops.aten.set_, name)
        LIBRARIES[1].impl(f"set_.{name}", partial(kernel.redispatch, CPU), "PrivateUse1")


@contextlib.contextmanager
def count_waits():
    """Count in the block what waits for the device, and copies to it: {(what, where): number}."""
    COUNTERS.append(collections.Counter())
    try:
        yield COUNTERS[-1]
    finally:
        COUNTERS.pop()


def run(op, *args, **kwargs):
    """Compute an operation with the twins of its tensors. Returns tensors of the device."""
    arguments = [*args, *kwargs.values()]
    tensors = [y for x in arguments for y in (x if isinstance(x, list) else [x])
               if torch.is_tensor(y)]
    check_devices(op, args, tensors)
    count_wait(op, args, kwargs)
    args = [torch.tensor(x) if isinstance(x, int) and n in takes_tensors(op) else x
            for n, x in enumerate(args)]  # dispatch makes a number of such a tensor
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    twins = {id(x): twin(x) for x in tensors if on_device(x)}
    same = {id(twins[id(x)]): x for x in tensors if on_device(x)}

    def to_twin(x):
        return [to_twin(y) for y in x] if isinstance(x, list) else twins.get(id(x), x)

    result = op(*map(to_twin, args), **{name: to_twin(x) for name, x in kwargs.items()})
    storages = {}
    for x in same.values():
        y = twins[id(x)]
        if x.shape != y.shape:  # it was empty, and got the result
            point(x, y, new_storage(y))
        storages[y.untyped_storage()._cdata] = x.untyped_storage()

    def to_device(y):
        if isinstance(y, list | tuple):
            return type(y)(map(to_device, y))
        if not torch.is_tensor(y) or id(y) in same:
            return same.get(id(y), y)
        storage = storages.get(y.untyped_storage()._cdata)  # y is a view
        empty = torch._C._acc.create_empty_tensor((0,), y.dtype)
        return point(empty, y, storage or new_storage(y))

    return to_device(result)


@cache
def takes_tensors(op):
    """Return which of an operation's arguments are tensors."""
    return {n for n, a in enumerate(op._schema.arguments) if str(a.type) == "Tensor"}


@cache
def name_of(op):
    return op._schema.name.removeprefix("aten::")


def copy(target, source, non_blocking=False):
    """Copy from one tensor to another, where one is on the device, or both."""
    if not on_device(target):
        count("copy to the CPU")
    elif not on_device(source):
        count("copy to the device")
    pair = [twin(x) if on_device(x) else x for x in (target, source)]
    pair[0].copy_(pair[1])
    return target


def autocast(op, dtype, *args, **kwargs):
    """Compute an operation in `dtype`, or in autocast's."""
    dtype = dtype or torch.get_autocast_dtype("pretend")
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEY):
        return op(*(x.to(dtype) if torch.is_tensor(x) and x.dtype != torch.double else x
                    for x in args), **kwargs)


def on_device(x):
    return torch.is_tensor(x) and x.device.type == "pretend"


def twin(x):
    """Make a CPU tensor in the memory of a tensor of the device."""
    storage = x.untyped_storage()
    memory = storage.twin if storage.nbytes() else torch.UntypedStorage(0)
    return torch.empty(0, dtype=x.dtype).set_(memory, x.storage_offset(), x.size(), x.stride())


def point(x, like, storage):
    """Let x, a tensor of the device, be what `like` is of its twin's memory."""
    return SET.redispatch(CPU, x, storage, like.storage_offset(), like.size(), like.stride())


def new_storage(y):
    """Make a storage of the device in the memory of a CPU tensor."""
    memory = y.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), torch.device("pretend", 0), memory.nbytes())
    storage.twin = memory  # lives as long as the storage
    return storage


def check_devices(op, args, tensors):
    """Raise a RuntimeError if a tensor with dimensions, or one in a list, is on the CPU."""
    may = {id(x) for x in args if torch.is_tensor(x) and not x.dim()}
    if name_of(op) in INDEXED and on_device(args[0]):
        may |= set(map(id, args[1]))
    if any(x.is_cpu and id(x) not in may for x in tensors) and any(map(on_device, tensors)):
        found = [(str(x.device), *x.shape) for x in tensors]
        raise RuntimeError(f"{op}: tensors of two devices: {found}")


def count_wait(op, args, kwargs):
    name = name_of(op)
    if name in WAITS:
        count(WAITS[name])
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        count("repeat_interleave")
    if name == "_index_put_impl_":  # `index` asks for nonzero and copies itself
        for index in [x for x in args[1] if x is not None]:
            if index.dtype == torch.bool and args[2].dim():  # a number needs no nonzero
                count("nonzero")
            if index.is_cpu:
                count("copy to the device")


def count(what):
    for counter in COUNTERS:
        counter[what, place()] += 1


def place():
    """Name the project's innermost function that runs, and its file."""
    frame = sys._getframe()
    while frame:
        file = Path(frame.f_code.co_filename)
        if ROOT in file.parents and file != Path(__file__):
            function = frame.f_code.co_qualname.split(".<locals>")[0]
            return f"{file.relative_to(ROOT)} {function}"
        frame = frame.f_back
    return "outside the project"
