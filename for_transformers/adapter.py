"""
Save a transformers model's memory alone, and add it to the same model again.

>>> tables = add_memory(model, layers=(4, 8))   # and train it
>>> save_memory(model, "my_memory")             # memory.safetensors, memory.json
>>> tables = load_memory(model, "my_memory")    # `model` is new, from the same weights

Memories that were taught one beside the other (see teach.py) have the same queries and sub-keys,
and values in different rows. They can be in a model together, and each can be taken out again.
"""
import json
import re
import warnings
from functools import partial
from pathlib import Path

import torch

from for_transformers.add_memory import add_memory
from for_transformers.folder import save_pretrained
from lib.errors import UserError, need
from lib.files import atomic, discard, load_file, read_json
from pkm import PKM

# a PKM's tensors
NAMES = re.compile(r"keys|values\.weight|slot_rows|query\.(weight|bias)|query_norm\.\w+")
# What the config of a memory's model must say. The whole config is not compared: transformers adds
# and renames settings from version to version.
BASE = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads")


def save_memory(model, folder):
    """Write the model's memory to `folder`: memory.safetensors and memory.json.

    The files are whole or absent, and replace those of an earlier save. Tensors keep their dtype.
    Value rows that are 0 are not written.
    Warns if other weights are in training: they are not saved. PEFT's are no reason to warn,
    because its save_pretrained writes them, to the same folder if you like. UserError if there is
    no memory.
    """
    to_file = need("safetensors.torch", "save_memory").save_file
    memories, folder = find_memories(model), Path(folder)
    if not memories:
        raise UserError(f"{type(model).__name__} has no memory to save: see add_memory")
    if any(memory.slot_rows is not None for memory in memories.values()):
        raise UserError("a pruned memory cannot be saved alone: use save_pretrained")
    if any(w.is_meta for memory in memories.values() for w in memory.state_dict().values()):
        raise UserError("the memory is offloaded: use save_pretrained, or load the model without "
                        "offloading")
    others = [name for name, p in model.named_parameters()
              if p.requires_grad and ".memory." not in name]
    if others and not hasattr(model, "peft_config"):
        warnings.warn(f"{folder} gets the memory alone, but {len(others)} other weights require "
                      f"gradients ({others[0]}, ...): if they were trained, use save_pretrained")
    tensors = {f"{n}.{name}": w for n, memory in memories.items()
               for name, w in without_zeros(memory.state_dict()).items()}
    settings = {"memory": model.config.product_key_memory, "base": base_of(model.config),
                "base_name": model.config.name_or_path, "embeddings": sample_of(model)}
    # Both are written before an earlier save is touched, and never lie beside another save's.
    with atomic(folder / "memory.json") as text, atomic(folder / "memory.safetensors") as binary:
        text.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        to_file(tensors, binary)
        discard(folder / "memory.json")


def load_memory(model, folder):
    """Add the memory that save_memory wrote to `folder`. Returns its tables as add_memory does.

    Tensors keep the dtype that they were saved in, except the query's, which has the model's. A
    model that has a memory takes the rows of another one, if queries and sub-keys are the same and
    the rows are free. A memory without values is replaced. UserError if the rows are not free, if
    the memory is another kind of model's, or if a file is missing or damaged. The model stays
    unchanged then. Warns if the word embeddings are others.
    """
    memory, tensors = read_memory(model, folder)
    if memories := find_memories(model):
        if memory == model.config.product_key_memory and not any(
                m.values.weight.any() for m in memories.values()):
            for n, empty in memories.items():
                empty.load_state_dict(tensors[n])
        else:
            add_rows(model, memory, tensors, folder)
        return {n: m.values for n, m in memories.items()}
    tables = add_memory(model, **memory)
    for n, added in find_memories(model).items():
        device, dtype = added.query.weight.device, added.query.weight.dtype
        added.load_state_dict(tensors[n], assign=True)
        added.to(device).query.to(dtype)
    return tables


def add_rows(model, memory, tensors, folder):
    """Add the value rows of a folder to the model's. UserError if its own lie in the same rows."""
    pairs = values_of_both(model, memory, tensors, folder)
    if both := sum(int((here.any(1) & saved.any(1)).sum()) for here, saved in pairs):
        raise UserError(f"{folder}: {both} of its value rows are in use in this model: unload what "
                        "has them, or teach it again beside the other memory (--beside)")
    for here, saved in pairs:
        here.add_(saved)


def unload_memory(model, folder):
    """Take out the value rows that load_memory added from `folder`.

    Without any rows the model computes what it did without memory, bit for bit (if alpha is 1).
    UserError if the model does not have these rows, or if they were trained since.
    """
    if not find_memories(model):
        raise UserError(f"{type(model).__name__} has no memory: nothing of {folder} was loaded")
    pairs = values_of_both(model, *read_memory(model, folder), folder)
    for here, saved in pairs:
        rows = saved.any(1)
        if not torch.equal(here[rows], saved[rows]):
            raise UserError(f"{folder}: the model does not have its value rows: they were not "
                            "loaded, or were trained since")
    for here, saved in pairs:
        here[saved.any(1)] = 0


def values_of_both(model, memory, tensors, folder):
    """Pair each table of the model with the folder's: [(its values, those in the folder)].
    memory, tensors: see read_memory. UserError if queries or sub-keys differ."""
    states = {n: memory.state_dict() for n, memory in find_memories(model).items()}
    same = memory == model.config.product_key_memory and states.keys() == tensors.keys() and all(
        torch.equal(w, tensors[n][name].to(w)) for n, state in states.items()
        for name, w in state.items() if name != "values.weight")
    if not same:
        raise UserError(f"{folder} has a memory with other layers, sizes, queries or sub-keys than "
                        "this model's: only memories that were taught one beside the other "
                        "(--beside) can be in a model together")
    name = "values.weight"
    return [(state[name], tensors[n][name].to(state[name])) for n, state in states.items()]


def find_memories(model):
    """Find the model's memories: {layer, counted from 1: PKM}. UserError if PEFT wraps a part."""
    memories = {}
    for name, module in model.named_modules():
        path = name.split(".")
        if path[-1] == "memory" and hasattr(module, "values"):
            wrapped = [tensor for tensor in module.state_dict() if not NAMES.fullmatch(tensor)]
            if wrapped:
                raise UserError(f"{name} has a tensor {wrapped[0]}: PEFT and quantization must "
                                'leave the memory as it is. Give PEFT exclude_modules='
                                '["memory.query"], and nothing of the memory in modules_to_save')
            memories[int(path[-2]) + 1] = module
    return memories


def read_memory(model, folder):
    """Read what save_memory wrote: add_memory's arguments, and {layer: state dict}.
    UserError if it does not fit the model, or if a file is missing or damaged."""
    folder = Path(folder)
    if not (folder / "memory.json").is_file():
        raise UserError(f"{folder} has no memory.json: expected a folder of save_memory")
    settings = read_json(folder / "memory.json")
    try:
        memory, saved = settings["memory"], settings["base"]
        sizes = {name: size for name, size in memory.items()
                 if name not in ("layers", "alpha", "beta")}
        with torch.device("meta"):  # only shapes are needed
            expected = {f"{n}.{name}": list(w.shape) for n in memory["layers"]
                        for name, w in PKM(saved["hidden_size"], **sizes).state_dict().items()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / 'memory.json'}: damaged ({error!r})") from None
    base = base_of(model.config)
    if differ := [f"{name} is {saved.get(name)}, here {base[name]}" for name in BASE
                  if saved.get(name) != base[name]]:
        raise UserError(f"{folder} has the memory of another model ({settings.get('base_name')}): "
                        + ", ".join(differ))
    before, here = (torch.tensor(x or []) for x in (settings.get("embeddings"), sample_of(model)))
    if before.shape == here.shape and (before - here).norm() > 0.1 * before.norm():
        warnings.warn(f"{folder} has the memory of {settings.get('base_name')}, whose word "
                      "embeddings are others than this model's")
    file = folder / "memory.safetensors"
    tensors = with_zeros(load_file(file, hint="save the memory again"), expected, file)
    found = {name: list(w.shape) for name, w in tensors.items()}
    for name in {**expected, **found}:
        if found.get(name) != expected.get(name):
            raise UserError(f"{file}: {name}: found {found.get(name, 'none')}, expected "
                            f"{expected.get(name, 'none')}")
    return memory, {n: {name.partition(".")[2]: w for name, w in tensors.items()
                        if name.startswith(f"{n}.")} for n in memory["layers"]}


def without_zeros(state):
    """Leave out the rows of a memory's values that are 0. values.rows tells which remain."""
    values = state["values.weight"]
    rows = values.any(1).nonzero().flatten()
    if len(rows) < len(values):
        state |= {"values.weight": values[rows], "values.rows": rows}
    return state


def with_zeros(tensors, shapes, file):
    """Put back the rows that without_zeros left out. shapes: {name: shape of the whole}.
    UserError if the rows are not in the table or not in order, or are not as many as the values."""
    for name in [name for name in tensors if name.endswith(".values.rows")]:
        rows, name = tensors.pop(name), name.replace("rows", "weight")
        values, shape = tensors.get(name), shapes.get(name, [0, 0])
        fits = (values is not None and rows.dtype == torch.long and rows.dim() == 1
                and list(values.shape) == [len(rows), shape[1]]
                and all([(rows >= 0).all(), (rows < shape[0]).all(), (rows.diff() > 0).all()]))
        if not fits:
            raise UserError(f"{file}: {name}: its rows are damaged: save the memory again")
        tensors[name] = values.new_zeros(shape).index_copy_(0, rows, values)
    return tensors


def base_of(config):
    """Return the settings of BASE in a config: {name: value or None}."""
    config = config.get_text_config()
    return {name: getattr(config, name, None) for name in BASE}


def sample_of(model):
    """Return 32 numbers of the word embeddings, by which models differ: a list, or None."""
    weight = model.get_input_embeddings().weight
    rows = torch.arange(8, device=weight.device) * (len(weight) // 8)
    return None if weight.is_meta else weight.detach()[rows, :4].flatten().tolist()


def train_memory(model):
    """Let the memory train in a model whose weights PEFT or you froze. Call it after PEFT.

    A PEFT model's save_pretrained then saves the memory beside the adapter."""
    for memory in find_memories(model).values():
        memory.requires_grad_(True)
    save_with_adapter(model)


def save_with_adapter(model):
    """Let the save_pretrained of a PEFT model save its memory too. Others stay as they are."""
    if hasattr(model, "peft_config"):
        model.save_pretrained = partial(save_beside_adapter, model)


def save_beside_adapter(model, save_directory, *args, **kwargs):
    """Save a PEFT model's adapter and memory. Takes the arguments of its own save_pretrained."""
    if not getattr(model, "peft_config", None):  # the adapter was deleted
        return save_pretrained(model, save_directory, *args, **kwargs)
    type(model).save_pretrained(model, save_directory, *args, **kwargs)
    if kwargs.get("is_main_process", True):
        save_memory(model, save_directory)
