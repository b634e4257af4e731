"""
Add a product-key memory to an encoder of transformers.

x' = LN(x + alpha * FFN(x) + beta * PKM(x)), as in model.py.

>>> model = AutoModelForMaskedLM.from_pretrained("bert-base-uncased")
>>> tables = add_memory(model, layers=(4, 8))       # random memories, to be trained
>>> values = LazyAdam(tables.values(), lr=1e-3)     # beside the optimizer of the rest

BERT, RoBERTa, DistilBERT, ELECTRA and every class with their layers can take one. Needs torch only.
"""
import inspect
from functools import partial

from torch import nn

from lib.for_transformers.folder import save_with_code
from pkm import PKM


def add_memory(model, layers=(4, 8), alpha=1.0, beta=1.0, **sizes):
    """Add a memory to `layers` of the model, counted from 1, in place.

    (alpha, beta) = (1, 1) is ResM. (0, 1) is PKM, which drops the FFN's weights. sizes: PKM's
    n_keys, heads, topk, key_dim and query_norm. All weights keep their names, and layer 4's memory
    is <layers>.3.memory. Tokens that attention_mask leaves out read nothing and do not enter the
    batch norm's statistics. Returns {layer: ValueTable}, for LazyAdam. ValueError if the model has
    no such layers.
    """
    stack, encoder, position = find_layers(model)
    if alpha == beta == 0:
        raise ValueError("alpha = beta = 0: layers would have neither FFN nor memory")
    if bad := [n for n in layers if not 1 <= n <= len(stack)]:
        raise ValueError(f"layers = {tuple(layers)}: no layer {bad[0]}: from 1 to {len(stack)}")
    if any(hasattr(layer, "memory") for layer in stack):
        raise ValueError("there is a memory already")
    memories = {}
    for n in layers:
        layer = stack[n - 1]
        is_bert = hasattr(layer, "output")  # else it is DistilBERT's
        if alpha == 0 and is_bert:  # the FFN becomes 0 * x
            layer.intermediate, layer.output.dense = nn.Identity(), nn.Identity()
        elif alpha == 0:
            layer.ffn = nn.Identity()
        if alpha != 1:
            ffn = layer.output.dense if is_bert else layer.ffn
            ffn.register_forward_hook(partial(scale, alpha))
        if beta:
            norm = layer.output.LayerNorm if is_bert else layer.output_layer_norm
            memory = PKM(len(norm.weight), **sizes).to(norm.weight).train(layer.training)
            layer.memory = memories[n] = memory
            if is_bert:
                layer.output.register_forward_pre_hook(partial(add_read_to_input, memory, beta))
            else:
                layer.ffn.register_forward_hook(partial(add_read_to_ffn, memory, beta))
    hook = partial(hand_on_mask, list(memories.values()), position)
    encoder.register_forward_pre_hook(hook, with_kwargs=True)
    if memories:
        defaults = {name: parameter.default for name, parameter
                    in inspect.signature(PKM).parameters.items() if name != "d_model"}
        save_with_code(model, {"layers": list(memories), "alpha": alpha, "beta": beta,
                               **defaults, **sizes})
    return {n: memory.values for n, memory in memories.items()}


def find_layers(model):
    """Find the model's one list of layers that can take a memory.
    Returns the list, the module that takes attention_mask, and that argument's position."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    stacks = [layers for layers in lists if len(layers) and all(map(is_supported, layers))]
    encoder = getattr(model, "base_model", model)
    arguments = list(inspect.signature(encoder.forward).parameters)
    if len(stacks) != 1 or "attention_mask" not in arguments:
        raise ValueError(
            f"{type(model).__name__}: expected a model that takes attention_mask and has one list "
            "of layers that end as BERT's or DistilBERT's, without chunk_size_feed_forward: found "
            f"{len(stacks)} lists")
    return stacks[0], encoder, arguments.index("attention_mask")


def is_supported(layer):
    """Tell whether this layer can take a memory (post-LN, BERT or DistilBERT style)."""
    names = dict(layer.named_modules())
    bert = isinstance(names.get("output.LayerNorm"), nn.LayerNorm) and (
        {"intermediate", "output.dense"} <= names.keys()
        and len(inspect.signature(layer.output.forward).parameters) == 2)
    distil = {"ffn", "sa_layer_norm", "output_layer_norm"} <= names.keys()
    return (bert or distil) and not getattr(layer, "chunk_size_feed_forward", 0)


# Hooks are functions bound by functools.partial: a deep copy of the model copies what they hold.
def scale(alpha, ffn, args, y):
    return alpha * y


def add_read_to_input(memory, beta, output, args):
    """Add the read to x in output(inside of the FFN, x), which ends a layer of BERT."""
    inside, x = args
    return inside, x + beta * memory(x, memory.mask)


def add_read_to_ffn(memory, beta, ffn, args, y):
    """Add the read to ffn(x) in norm(ffn(x) + x), which ends a layer of DistilBERT."""
    return y + beta * memory(args[0], memory.mask)


def hand_on_mask(memories, position, encoder, args, kwargs):
    """Give the encoder's attention_mask to its memories. It stays for activation checkpointing."""
    mask = args[position] if len(args) > position else kwargs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)}: expected (batch, time)")
    for memory in memories:
        memory.mask = mask
