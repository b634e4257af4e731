"""
Add product-key memories to a model of transformers, an encoder or a decoder.

FFN(x) becomes alpha * FFN(x) + beta * memory(x) in the chosen layers.

>>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
>>> tables = add_memory(model, layers=(9, 18))      # random memories, to be trained
>>> values = LazyAdam(tables.values(), lr=1e-3)     # beside the optimizer of the rest
"""
import inspect
import threading
from functools import partial

import torch
from torch import nn

from pkm import PKM

# A layer's attention; the modules of its FFN, whose first sees the FFN's input; and the module
# whose output joins the residual stream.
BERT = "attention", ("intermediate", "output.dense"), "output.dropout"
LLAMA = "self_attn", ("mlp",), "mlp"
MODELS = {  # by config.model_type
    "bert": BERT, "pkm-bert": BERT, "roberta": BERT, "xlm-roberta": BERT, "camembert": BERT,
    "electra": BERT, "deberta-v2": BERT, "mpnet": BERT,
    "distilbert": ("attention", ("ffn",), "ffn"), "modernbert": ("attn", ("mlp",), "mlp"),
    "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "gemma3_text": LLAMA,
    "gpt2": ("attn", ("mlp",), "mlp"), "gpt_neox": ("attention", ("mlp",), "post_mlp_dropout"),
    "opt": ("self_attn", ("fc1", "fc2"), "fc2"),
}
# A layer's attention leaves its mask here for the memory. The memory leaves its output for the end
# of the FFN. Each thread has its own, and checkpointing runs all three hooks again.
HERE = threading.local()


def add_memory(model, layers, alpha=1.0, beta=1.0, values="random", **sizes):
    """Add a memory to `layers` of the model, counted from 1, in place.

    (alpha, beta) = (1, 1) is ResM. (0, 1) is PKM, which drops the FFN's weights. `sizes` are
    PKM's n_keys, heads, topk and key_dim. With values="zero" and (1, 1) the model's outputs stay
    as they are, bit for bit. All other weights keep their names, and layer 4's memory is
    <layers>.3.memory. In a half-precision model only the memory's query has half precision: in
    the values and sub-keys small updates would be lost. Call it before torch.compile, which
    would not see the memory.

    Returns {layer: ValueTable}, for LazyAdam.
    """
    if values not in ("random", "zero"):
        raise ValueError(f"values = {values!r}: expected 'random' or 'zero'")
    stack = find_layers(model)
    if any(hasattr(layer, "memory") for layer in stack):
        raise ValueError("this model has memories: name all layers in one call")
    if len(set(layers) & set(range(1, len(stack) + 1))) < len(layers):
        raise ValueError(f"layers {layers}: expected different ones from 1 to {len(stack)}")
    tables = {}
    for n in layers:
        memory = PKM(model.config.hidden_size, **sizes)
        device = next(stack[n - 1].parameters()).device
        memory.to(device, torch.promote_types(model.dtype, torch.float32))
        memory.query.to(model.dtype)
        if values == "zero":
            nn.init.zeros_(memory.values.weight)
        stack[n - 1].memory = memory.train(model.training)
        add_hooks(stack[n - 1], MODELS[model.config.model_type], alpha, beta)
        tables[n] = memory.values
    settings = {"layers": list(layers), "alpha": alpha, "beta": beta, **sizes}
    model.config.product_key_memory = settings  # for save_memory
    return tables


def find_layers(model):
    """Find the model's list of layers, an nn.ModuleList. ValueError if it has no known ones."""
    kind = model.config.model_type
    if kind not in MODELS:
        raise ValueError(f"{kind}: add_memory knows {', '.join(MODELS)}")
    attention = MODELS[kind][0]
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return next(layers for layers in lists if hasattr(layers[0], attention))


def add_hooks(layer, parts, alpha, beta):
    """Make the layer's FFN return alpha * FFN(x) + beta * memory(x). parts: see MODELS."""
    attention, ffn, last = parts
    attention = layer.get_submodule(attention)
    position = list(inspect.signature(attention.forward).parameters).index("attention_mask")
    attention.register_forward_pre_hook(partial(leave_mask, layer.memory, position),
                                        with_kwargs=True)
    if alpha == 0:  # the FFN becomes 0 * x
        for name in ffn:
            layer.set_submodule(name, nn.Identity())
    layer.get_submodule(ffn[0]).register_forward_pre_hook(partial(read, layer.memory))
    layer.get_submodule(last).register_forward_hook(partial(add_read, alpha, beta))


# Hooks are functions bound by functools.partial: a deep copy of the model copies what they hold.
def leave_mask(memory, position, attention, args, kwargs):
    mask = args[position] if len(args) > position else kwargs.get("attention_mask")
    # in evaluation padding changes no real token
    HERE.real = real_tokens(mask) if memory.training and mask is not None else None


def read(memory, ffn, args):
    HERE.read = memory(args[0], HERE.real)


def add_read(alpha, beta, last, args, y):
    y = alpha * y + beta * HERE.read
    HERE.read = None
    return y


def real_tokens(mask):
    """Tell from an attention's mask which tokens are real: (batch, time) bool.

    mask: (batch, time) or (batch, heads, time or 1, time). It is bool, 0 and 1, or added to the
    scores. A real token sees itself, and what is seen has the mask's largest value.
    """
    if mask.dim() == 4:
        mask = mask[:, 0]
        mask = mask[:, 0] if mask.shape[1] == 1 else mask.diagonal(dim1=1, dim2=2)
    return mask == mask.max()
