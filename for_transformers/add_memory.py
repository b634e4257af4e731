"""
Add product-key memories to a model of transformers, an encoder or a decoder.

FFN(x) becomes alpha * FFN(x) + beta * memory(x) in the chosen layers.

>>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
>>> tables = add_memory(model, layers=(8, 16))      # random memories, to be trained
>>> values = LazyAdam(tables.values(), lr=1e-3)     # beside the optimizer of the rest

BERT and its relatives, DistilBERT, ModernBERT, GPT-2, GPT-NeoX, OPT, Llama, Mistral, Qwen, Gemma
and every class with their layers can take one. Needs torch only.
"""
import inspect
import math
import operator
import sys
import threading
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from for_transformers.folder import SIZES, check_marks, save_with_code
from pkm import PKM

# Holds a layer's mask and input for its memory, for each thread. A pass that fails may leave them,
# and the next pass replaces them. The hooks are on modules in the layer: checkpointing in
# transformers does not run the layer's own hooks a second time.
HERE = threading.local()


def add_memory(model, layers, alpha=1.0, beta=1.0, values="random", freeze=False, **sizes):
    """Add a memory to `layers` of the model, counted from 1, in place.

    (alpha, beta) = (1, 1) is ResM. (0, 1) is PKM, which drops the FFN's weights. sizes: PKM's
    n_keys, heads, topk, key_dim and query_norm. All other weights keep their names, and layer 4's
    memory is <layers>.3.memory. In a half-precision model only the memory's query has half
    precision: in the values and sub-keys small updates would be lost. No dropout of the layer
    applies to the memory, except in Phi, Phi3, Falcon, StableLm, Persimmon, Doge and
    GPT-NeoX-Japanese. The mask of the layer's attention tells which tokens are padding: they
    move no value and do not enter the batch norm's statistics. Pass the whole model:
    save_pretrained of the whole leaves out a memory that was added to a part.

    values="zero" makes the values 0. With (1, 1) the model's outputs then stay as they are, bit
    for bit. freeze=True lets the values alone require gradients. The memory has no batch norm
    then, whose statistics would move: see calibrate in rows.py.

    Returns {layer: ValueTable}, for LazyAdam.
    TypeError or ValueError for wrong arguments, and if the model cannot take a memory.
    """
    stack = find_layers(model)
    if freeze:
        sizes = {"query_norm": False, **sizes}
    layers = whole_numbers(layers)
    check_arguments(stack, layers, alpha, beta, values, freeze, sizes)
    for n in layers:
        check_layer(stack[n - 1], n)
    check_marks(model)
    width = model.config.get_text_config().hidden_size
    memories = {n: PKM(width, **sizes) for n in layers if beta}
    for n in layers:
        layer = stack[n - 1]
        if beta:
            like = [p for p in layer.parameters() if p.is_floating_point()][-1]
            dtype = torch.promote_types(like.dtype, torch.float32)
            layer.memory = memories[n].to(like.device, dtype).train(layer.training)
            layer.memory.query.to(like.dtype)
        add_hooks(layer, alpha, beta)
    if beta or alpha != 1:
        save_with_code(model, layers, alpha, beta, sizes)
    if values == "zero":
        for memory in memories.values():
            nn.init.zeros_(memory.values.weight)
    if "torch._dynamo" in sys.modules:  # what was compiled would go on without the memory
        torch.compiler.reset()
    tables = {n: memory.values for n, memory in memories.items()}
    if freeze:
        freeze_all_but(tables, model)
    return tables


def freeze_all_but(tables, model):
    """Let the values of these tables alone require gradients."""
    model.requires_grad_(False)
    for table in tables.values():
        table.requires_grad_(True)


def find_layers(model):
    """Find the model's list of layers, an nn.ModuleList. ValueError if it has none, or several."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name}: add_memory does not know encoder-decoder models")
    if hasattr(config, "num_hidden_groups"):  # ALBERT
        raise ValueError(f"{name}: its layers share their weights, and would share a memory")
    stacks = [module for module in model.modules()
              if isinstance(module, nn.ModuleList) and any(map(ffn_ends, module))]
    if len(stacks) != 1 or config is None:
        raise ValueError(f"{name}: expected a model of transformers with one list of layers "
                         f"with an attention and an FFN: found {len(stacks)} lists")
    return stacks[0]


def ffn_ends(layer):
    """Name the first and the last module of a layer's FFN, or return ()."""
    modules = dict(layer.named_modules())
    takes = {name: len(arguments_of(module)) for name, module in modules.items()}
    if not attention_of(layer):
        return ()
    if isinstance(modules.get("output.LayerNorm"), nn.LayerNorm) and takes["output"] == 2 and (
            {"intermediate", "output.dense"} <= modules.keys()):  # BERT
        return "intermediate", "output.dense"
    if type(layer).__name__ == "OPTDecoderLayer":
        return "fc1", "fc2"
    return next(((name, name) for name in ("mlp", "ffn") if takes.get(name) == 1
                 and not isinstance(modules[name], nn.ModuleList)), ())


def attention_of(layer):
    return next((m for m in layer.children() if "attention_mask" in arguments_of(m)), None)


def arguments_of(module):
    return list(inspect.signature(module.forward).parameters)


def whole_numbers(layers):
    """Return a list of the layers' numbers. TypeError if they are no whole numbers."""
    try:
        numbers = list(layers)
        if any(isinstance(n, bool) for n in numbers):
            raise TypeError
        return [operator.index(n) for n in numbers]
    except TypeError:
        raise TypeError(f"layers = {layers!r}: expected numbers in a list, as in layers=(4, 8)"
                        ) from None


def check_arguments(stack, layers, alpha, beta, values, freeze, sizes):
    """Raise a TypeError or a ValueError for what no model takes."""
    for name, size in sizes.items():
        if name not in SIZES:
            raise TypeError(f"{name} is no size of a memory: {', '.join(SIZES)}")
        if not isinstance(size, int) or (size < 1 and name != "query_norm"):
            raise ValueError(f"{name} = {size!r}: expected a whole number from 1")
    if values not in ("random", "zero"):
        raise ValueError(f"values = {values!r}: expected 'random' or 'zero'")
    if freeze and (sizes["query_norm"] or not beta):
        raise ValueError("freeze=True trains the values alone: beta = 0 has none, and the "
                         "statistics of query_norm=True would move")
    for n in layers:
        if n not in range(1, len(stack) + 1):
            raise ValueError(f"layers = {layers}: no layer {n!r}: from 1 to {len(stack)}")
    if len(set(layers)) < len(layers) or not layers:
        raise ValueError(f"layers = {layers}: expected at least one, and each only once")
    for name, factor in (("alpha", alpha), ("beta", beta)):
        if not isinstance(factor, int | float) or not math.isfinite(factor):
            raise TypeError(f"{name} = {factor!r}: expected a number")
    if alpha == beta == 0:
        raise ValueError("alpha = beta = 0: layers would have neither FFN nor memory")
    if any(hasattr(layer, "memory") for layer in stack):
        raise ValueError("there is a memory already")


def check_layer(layer, n):
    """Raise a ValueError if the layer, number n, cannot take a memory."""
    modules = dict(layer.named_modules())
    if any(name.endswith(("experts", "router")) for name in modules):
        raise ValueError(f"layer {n}: its FFN is a mixture of experts, or has a router, which "
                         "add_memory does not know")
    if any(getattr(module, "chunk_size_feed_forward", 0) for module in modules.values()):
        raise ValueError(f"layer {n}: a memory needs all tokens at once: set "
                         "config.chunk_size_feed_forward = 0")
    if not ffn_ends(layer):
        raise ValueError(f"layer {n}: add_memory knows no such layer: {type(layer).__name__}")
    if any(hasattr(module, "_hf_hook") for module in modules.values()) and any(
            p.is_meta for p in layer.parameters()):
        raise ValueError(f"layer {n}: its weights are offloaded: load the model without offloading")
    if any(hasattr(modules.get(name), "base_layer") for name in ("fc1", "fc2")):  # OPT
        raise ValueError(f"layer {n}: its FFN has an adapter, which would take the memory along "
                         "when it is merged: add the memory before the adapter")


def add_hooks(layer, alpha, beta):
    """Make the layer's FFN return alpha * FFN(x) + beta * memory(x)."""
    first, last = ffn_ends(layer)
    if alpha == 0:  # the FFN becomes 0 * x
        for name in (first, last):
            layer.set_submodule(name, nn.Identity())
    ffn = layer.get_submodule(last)
    if alpha != 1:  # in BERT after the dropout: a hook on a Linear would leave out its adapter
        scaled = getattr(layer.output, "dropout", ffn) if first == "intermediate" else ffn
        scaled.register_forward_hook(partial(scale, alpha))
    if not beta:
        return
    attention = attention_of(layer)
    position = arguments_of(attention).index("attention_mask")
    attention.register_forward_pre_hook(partial(leave_mask, position), with_kwargs=True)
    if first == "intermediate":  # BERT's dropout comes next, so the read joins the residual
        layer.output.register_forward_pre_hook(partial(add_read_to_residual, layer, beta))
        return
    if hasattr(layer, "post_mlp_dropout"):  # GPT-NeoX: its dropout moves to before the read
        ffn.register_forward_hook(partial(drop, layer.post_mlp_dropout.p))
        layer.post_mlp_dropout.p = 0.0
    if first == "fc1":  # OPT: so do both of its dropouts
        for module in (layer.self_attn.out_proj, ffn):
            module.register_forward_hook(partial(drop, layer.dropout))
        layer.dropout = 0.0
        layer.fc1.register_forward_pre_hook(leave_input)
    ffn.register_forward_hook(partial(add_read, layer, beta, first != last))


# Hooks are functions bound by functools.partial: a deep copy of the model copies what they hold.
def scale(alpha, ffn, args, y):
    return alpha * y


def drop(p, module, args, y):
    return F.dropout(y, p, module.training)


def leave_mask(position, attention, args, kwargs):
    """Leave for the memory which tokens are real, before the layer's attention."""
    if getattr(attention, "_is_replica", False):
        raise RuntimeError("a memory does not work in DataParallel: use one process for each "
                           "device (torchrun), or one device (CUDA_VISIBLE_DEVICES=0)")
    mask = args[position] if len(args) > position else kwargs.get("attention_mask")
    x = args[0] if args else kwargs["hidden_states"]
    leave("real", real_tokens(mask, attention, x.shape[:-1]))


def leave_input(fc1, args):
    leave("x", args[0])


def add_read(layer, beta, is_left, ffn, args, y):
    """Add the read to FFN(x). is_left: leave_input left x. Otherwise x is args[0]."""
    return y + beta * read(layer, take("x") if is_left else args[0])


def add_read_to_residual(layer, beta, output, args):
    """Add the read to the residual x of a BERT layer's last module, output(inside, x)."""
    inside, x = args
    return inside, x + beta * read(layer, x)


def read(layer, x):
    if not layer.memory.query.weight.is_floating_point():
        raise TypeError("the memory's query is quantized, and would read other rows: load with "
                        "BitsAndBytesConfig(llm_int8_skip_modules=['lm_head', 'memory.query'])")
    real = take("real")
    return layer.memory(x, None if real is None else real.reshape(x.shape[:-1]))


def real_tokens(mask, attention, shape):
    """Tell from an attention's mask which tokens are real. A real token sees itself.

    mask: None, (batch, keys) of 0 and 1, or (batch, heads, queries or 1, keys), bool or added to
    the scores. The tokens are the last keys, after those of a cache. shape: (batch, tokens).
    Returns a bool tensor of that shape, or None without a mask. In evaluation, where padding
    changes no real token, it is also None if the mask does not tell; in training a ValueError.
    """
    if mask is None:
        return None
    known = torch.is_tensor(mask) and mask.dim() in (2, 4)
    if not attention.training and not (known and mask.shape[-1] == shape[1]):
        return None  # a cache's keys may end with empty places
    if not known:
        kind = list(mask.shape) if torch.is_tensor(mask) else type(mask).__name__
        raise ValueError(f"attention_mask: {kind}: expected (batch, time) or (batch, heads, time, "
                         "time), to know the padding: train with another attn_implementation")
    if type(attention).__name__.startswith("Longformer"):
        return mask >= 0  # padding gets a negative number, global attention a positive one
    if mask.dim() == 4:
        mask = mask[:, 0]  # (batch, queries or 1, keys)
        more = mask.shape[2] - mask.shape[1]
        mask = mask[:, 0] if mask.shape[1] == 1 else mask.diagonal(more, 1, 2)
        # The scores of padding get a large negative number. DeBERTa's masks are 0 and 1.
        if mask.is_floating_point() and not type(attention).__name__.startswith("Deberta"):
            mask = mask > -1000
    return mask[:, -shape[1]:].bool().expand(shape)


def leave(name, value):
    """Leave a value for this thread's next take() of that name."""
    if torch.compiler.is_compiling():
        # torch.compile refuses side effects in a checkpointed function. This one ends inside it.
        torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(
            setattr, HERE, name, value)
    else:
        setattr(HERE, name, value)


def take(name):
    value = getattr(HERE, name, None)
    leave(name, None)
    return value
