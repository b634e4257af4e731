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
from types import SimpleNamespace

import torch
from torch import nn

from pkm import PKM

# A layer's attention; the modules of its FFN, whose first sees the FFN's input; and the module
# whose output joins the residual stream. A fourth part, if any, multiplies it on the way.
BERT = "attention", ("intermediate", "output.dense"), "output.dropout"
MODELS = {  # by config.model_type; for others see like_llama
    "bert": BERT, "pkm-bert": BERT, "roberta": BERT, "xlm-roberta": BERT, "camembert": BERT,
    "electra": BERT, "deberta-v2": BERT, "mpnet": BERT,
    "distilbert": ("attention", ("ffn",), "ffn"), "modernbert": ("attn", ("mlp",), "mlp"),
    "gpt2": ("attn", ("mlp",), "mlp"), "gpt_neox": ("attention", ("mlp",), "post_mlp_dropout"),
    "opt": ("self_attn", ("fc1", "fc2"), "fc2"),
    "gemma3_text": ("self_attn", ("mlp",), "mlp"),  # before the norm, as in saved memories
}
# A layer's attention leaves its mask here for the memory. The memory leaves its output for the end
# of the FFN. Each thread has its own, and checkpointing runs all three hooks again.
HERE = threading.local()


def add_memory(model, layers, alpha=1.0, beta=1.0, values="random", parts=None, **sizes):
    """Add a memory to `layers` of the model, counted from 1, in place.

    (alpha, beta) = (1, 1) is ResM. (0, 1) is PKM, which drops the FFN's weights. `sizes` are
    PKM's n_keys, heads, topk and key_dim. With values="zero" and (1, 1) the model's outputs stay
    as they are, bit for bit. All other weights keep their names, and layer 4's memory is
    <layers>.3.memory. In a half-precision model only the memory's query has half precision: in
    the values and sub-keys small updates would be lost. Call it before torch.compile, which
    would not see the memory. `parts` names the modules of layers that are unknown (see MODELS).

    Returns {layer: ValueTable}, for LazyAdam.
    """
    if values not in ("random", "zero"):
        raise ValueError(f"values = {values!r}: expected 'random' or 'zero'")
    try:
        d_model = model.config.hidden_size
        stack = find_layers(model, parts)
        known = parts or MODELS.get(model.config.model_type) or like_llama(stack)
    except Exception as error:
        raise ValueError(f"{model.config.model_type}: add_memory does not know its layers. Name "
                         "their attention, FFN and the module whose output joins the residual "
                         "stream, such as parts=('attn', ('mlp',), 'mlp')") from error
    if any(hasattr(layer, "memory") for layer in stack):
        raise ValueError("this model has memories: name all layers in one call")
    if len(set(layers) & set(range(1, len(stack) + 1))) < len(layers):
        raise ValueError(f"layers {layers}: expected different ones from 1 to {len(stack)}")
    tables = {}
    for n in layers:
        layer = stack[n - 1]
        memory = PKM(d_model, **sizes)
        memory.to(next(layer.parameters()).device, torch.promote_types(model.dtype, torch.float32))
        memory.query.to(model.dtype)
        if values == "zero":
            nn.init.zeros_(memory.values.weight)
        add_hooks(layer, memory, known, alpha, beta)
        layer.memory = memory.train(model.training)
        tables[n] = memory.values
    model.config.product_key_memory = {  # for save_memory
        "layers": list(layers), "alpha": alpha, "beta": beta, "parts": parts, **sizes}
    return tables


def find_layers(model, parts=None):
    """Find the model's list of layers, an nn.ModuleList. ValueError if it has no known ones."""
    attention = (parts or MODELS.get(model.config.model_type) or ["self_attn"])[0]
    [stack] = [module for module in model.modules() if isinstance(module, nn.ModuleList)
               and any(hasattr(layer, attention) or hasattr(layer, "memory") for layer in module)]
    return stack


def like_llama(stack):
    """Find the parts of layers that add their mlp's output to the residual stream.

    A call with an mlp that returns y and other modules that return 0 shows what y enters (Gemma
    2's norm, Phi's dropout) and its factor (Granite). Other layers raise an error of any kind.
    """
    y, x = torch.eye(2, dtype=torch.double, device="cpu")
    last = "mlp"

    def call(name, given=None, **_):
        nonlocal last
        if name == "mlp" or given is y:
            last = name
            return y
        return 0 * y

    for layer in stack:
        modules = {name: partial(call, name) for name in dict(layer.named_children())}
        forward = inspect.unwrap(type(layer).forward)  # without checkpointing
        factor, _ = forward(SimpleNamespace(**vars(layer), **modules), x).tolist()
        if not factor or "self_attn" not in modules or hasattr(layer.mlp, "experts"):
            raise ValueError
    return "self_attn", ("mlp",), last, factor


def add_hooks(layer, memory, parts, alpha, beta):
    """Make the layer's FFN return alpha * FFN(x) + beta * memory(x). parts: see MODELS."""
    attention, ffn, last, factor, *_ = *parts, 1
    attention = layer.get_submodule(attention)
    position = list(inspect.signature(attention.forward).parameters).index("attention_mask")
    attention.register_forward_pre_hook(partial(leave_mask, memory, position), with_kwargs=True)
    if alpha == 0:  # the FFN becomes 0 * x
        for name in ffn:
            layer.set_submodule(name, nn.Identity())
    layer.get_submodule(ffn[0]).register_forward_pre_hook(partial(read, memory))
    layer.get_submodule(last).register_forward_hook(partial(add_read, alpha, beta / factor))


# Hooks are functions bound by functools.partial: a deep copy of the model copies what they hold.
def leave_mask(memory, position, attention, args, kwargs):
    mask = args[position] if len(args) > position else kwargs.get("attention_mask")
    # in evaluation padding changes no real token
    HERE.real = real_tokens(mask) if memory.training and mask is not None else None
    HERE.read = None


def read(memory, ffn, args):
    HERE.read = memory(args[0], HERE.real)


def add_read(alpha, beta, last, args, y):
    if HERE.read is not None:  # else Phi's dropout has the attention's output
        y = alpha * y + beta * HERE.read
        HERE.read = None
    return y


def real_tokens(mask):
    """Tell from an attention's mask which tokens are real: (batch, time) bool.

    mask: (batch, time) or (batch, heads, time or 1, time). It is bool, 0 and 1, or added to the
    scores. A real token sees itself, and what is seen has the mask's largest value.
    """
    if mask.dim() == 4:
        mask = mask[:, 0].expand(-1, mask.shape[3], -1).diagonal(dim1=1, dim2=2)
    return mask == mask.max()
