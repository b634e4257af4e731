"""
Add product-key memories to a model of transformers, an encoder or a decoder.

FFN(x) becomes alpha * FFN(x) + beta * memory(x) in the chosen layers.

>>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
>>> tables = add_memory(model, layers=(9, 18))      # random memories, to be trained
>>> sparse = LazyAdam(tables.values(), lr=1e-3)     # beside the optimizer of the rest
"""
import inspect
import threading
from functools import partial

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_mask

from pkm import PKM

# The parts of a layer: its attention; the modules of its FFN, whose first gets the FFN's input;
# and the module whose output joins the residual stream.
BERT = "attention", ("intermediate", "output.dense"), "output.dropout"
LLAMA = "self_attn", ("mlp",), "mlp"
MODELS = {  # by config.model_type
    "bert": BERT, "pkm-bert": BERT, "roberta": BERT, "xlm-roberta": BERT, "camembert": BERT,
    "electra": BERT, "deberta-v2": BERT, "mpnet": BERT,
    "distilbert": ("attention", ("ffn",), "ffn"),
    "modernbert": ("attn", ("mlp",), "mlp"),
    "gpt2": ("attn", ("mlp",), "mlp"),
    "gpt_neox": ("attention", ("mlp",), "post_mlp_dropout"),
    "opt": ("self_attn", ("fc1", "fc2"), "fc2"),
    "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "olmo": LLAMA,
    "smollm3": LLAMA, "cohere": LLAMA, "granite": LLAMA,
    "phi": ("self_attn", ("mlp",), "resid_dropout"),
    "phi3": ("self_attn", ("mlp",), "resid_mlp_dropout"),
    "stablelm": ("self_attn", ("mlp",), "dropout"),
    "olmo2": ("self_attn", ("mlp",), "post_feedforward_layernorm"),
    "gemma2": ("self_attn", ("mlp",), "post_feedforward_layernorm"),
    "gemma3_text": LLAMA,  # before the norm, as in memories that were saved
    "glm4": ("self_attn", ("mlp",), "post_mlp_layernorm"),
}


def add_memory(model, layers, alpha=1.0, beta=1.0, init_values="random", parts=None, **sizes):
    """Add a memory to `layers` of the model, counted from 1, in place.

    (alpha, beta) = (1, 1) is ResM. (0, 1) is PKM, which drops the FFN's weights. `sizes` are
    PKM's n_keys, heads, topk and key_dim. With init_values="zero" and (1, 1) the model's outputs
    stay as they are, bit for bit. All other weights keep their names, and layer 4's memory is
    <layers>.3.memory. In a half-precision model only the memory's query has half precision: in
    the values and sub-keys small updates would be lost. Call it before torch.compile, which
    would not see the memory. `parts` names the parts of layers that MODELS does not know.

    Returns {layer: ValueTable}, for LazyAdam.
    """
    if init_values not in ("random", "zero"):
        raise ValueError(f"init_values = {init_values!r}: expected 'random' or 'zero'")
    stack, known = find_layers(model, parts)
    if any(hasattr(layer, "memory") for layer in stack):
        raise ValueError("this model has memories: name all layers in one call")
    if len(set(layers) & set(range(1, len(stack) + 1))) < len(layers):
        raise ValueError(f"layers {layers}: expected different ones from 1 to {len(stack)}")
    factor = getattr(model.config, "residual_multiplier", 1)  # Granite's, of what joins its stream
    tables = {}
    for n in layers:
        layer = stack[n - 1]
        memory = PKM(model.config.hidden_size, **sizes)
        memory.to(next(layer.parameters()).device, torch.promote_types(model.dtype, torch.float32))
        memory.query.to(model.dtype)
        if init_values == "zero":
            nn.init.zeros_(memory.values.weight)
        add_hooks(layer, memory, known, alpha, beta / factor)
        layer.memory = memory.train(model.training)
        tables[n] = memory.values
    model.config.product_key_memory = {  # for save_memory
        "layers": list(layers), "alpha": alpha, "beta": beta, "parts": parts, **sizes}
    return tables


def find_layers(model, parts=None):
    """Find the model's layers, an nn.ModuleList. Returns it and the names of a layer's parts."""
    kind = model.config.model_type
    parts = parts or MODELS.get(kind)
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)
              and parts and any(hasattr(layer, parts[0]) for layer in module)]
    if len(stacks) != 1:
        raise ValueError(f"{kind}: add_memory does not know its layers. Name their parts as MODELS "
                         "in add_memory.py does, such as parts=('attn', ('mlp',), 'mlp')")
    return stacks[0], parts


def add_hooks(layer, memory, parts, alpha, beta):
    """Make the layer's FFN return alpha * FFN(x) + beta * memory(x). parts: see MODELS."""
    attention, ffn, last = parts
    attention = layer.get_submodule(attention)
    position = list(inspect.signature(attention.forward).parameters).index("attention_mask")
    attention.register_forward_pre_hook(partial(leave_mask, memory, position), with_kwargs=True)
    if alpha == 0:  # the FFN becomes 0 * x
        for name in ffn:
            layer.set_submodule(name, nn.Identity())
    layer.get_submodule(ffn[0]).register_forward_pre_hook(partial(read, memory))
    layer.get_submodule(last).register_forward_hook(partial(add_read, alpha, beta))


# A layer's modules pass on neither its mask nor what a memory read: three hooks leave both here.
# Attributes of the memory would be shared by all threads that use the model. Attributes of a
# tensor would get lost where PEFT adds to a module's output. Checkpointing runs all hooks again.
# They are functions bound by partial, because a deep copy of the model then copies what they hold.
HERE = threading.local()


def leave_mask(memory, position, attention, args, kwargs):
    mask = args[position] if len(args) > position else kwargs.get("attention_mask")
    # in evaluation padding changes no real token
    HERE.real = real_tokens(mask) if memory.training and mask is not None else None
    HERE.read = None


def read(memory, ffn, args):
    HERE.read = memory(args[0], HERE.real)


def add_read(alpha, beta, last, args, y):
    if HERE.read is not None:  # Phi's dropout has the attention's output first
        y = alpha * y + beta * HERE.read
        HERE.read = None
    return y


def real_tokens(mask):
    """Tell from an attention's mask which tokens are real: (batch, time) bool.

    mask: (batch, time) or (batch, heads, time or 1, time). It is bool, 0 and 1, a BlockMask, or
    added to the scores. A real token sees itself, and what is seen has the mask's largest value.
    """
    if isinstance(mask, BlockMask):
        mask = create_mask(mask.mask_mod, *mask.shape, device=mask.kv_num_blocks.device)
    if mask.dim() == 4:
        mask = mask[:, 0].expand(-1, mask.shape[3], -1).diagonal(dim1=1, dim2=2)
    return mask == mask.max()
