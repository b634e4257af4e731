"""
Save a transformers model's memory alone, and add it to the same model again.

>>> tables = add_memory(model, layers=(4, 8))   # and train it
>>> save_memory(model, "my_memory")             # writes my_memory/memory.safetensors
>>> tables = load_memory(model, "my_memory")    # `model` is new, from the same weights
"""
import json
import re
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from for_transformers.add_memory import add_memory
from lib.files import atomic
from lib.settings import UserError

NAME = "memory.safetensors"


def save_memory(model, folder):
    """Write the model's memory to `folder`. No other weights are saved."""
    memories = find_memories(model)
    if not memories:
        raise UserError(f"{type(model).__name__} has no memory to save: see add_memory")
    settings = {"memory": model.config.product_key_memory, "base": base_of(model)}
    with atomic(Path(folder, NAME)) as temporary:
        save_file(memories.state_dict(), temporary, {"settings": json.dumps(settings)})


def load_memory(model, folder):
    """Add the memory that save_memory wrote to `folder`. Returns its tables as add_memory does."""
    settings, tensors = read_memory(folder)
    if settings["base"] != base_of(model):
        raise UserError(f"{folder} has the memory of {settings['base']}, not of {base_of(model)}")
    tables = add_memory(model, **settings["memory"])
    find_memories(model).load_state_dict(tensors)
    return tables


def read_memory(folder):
    """Read what save_memory wrote: its settings, and a state dict of find_memories."""
    file = Path(folder, NAME)
    with safe_open(file, "pt") as saved:
        settings = json.loads(saved.metadata()["settings"])
    return settings, load_file(file)


def find_memories(model):
    """Find the model's memories: {"layer, counted from 1": PKM}, an nn.ModuleDict."""
    memories = nn.ModuleDict()
    for name, module in model.named_modules():
        layer = re.search(r"\.(\d+)\.memory$", name)
        if layer:
            memories[str(int(layer[1]) + 1)] = module
    for name in memories.state_dict():
        if "base_layer" in name or "original_module" in name:
            raise UserError(f"PEFT changes {name} of the memories: give its config "
                            'exclude_modules=["memory.query"] and no modules_to_save of a memory')
    return memories


def base_of(model):
    """Describe what a memory must find in a model."""
    names = "model_type", "hidden_size", "num_hidden_layers"
    return {name: getattr(model.config, name) for name in names}


def train_memory(model):
    """Let the memory's queries and sub-keys learn in a model that PEFT or you froze.

    The values need no such call: the LazyAdam of their tables updates them in any case.
    """
    for name, p in find_memories(model).named_parameters():
        p.requires_grad_("values" not in name)
