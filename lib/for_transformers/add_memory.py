"""
Product-key memory in an encoder of transformers: x' = LN(x + alpha * FFN(x) + beta * PKM(x)).

>>> model = AutoModelForMaskedLM.from_pretrained("bert-base-uncased")
>>> tables = add_memory(model, layers=(4, 8))       # random memories, to be trained
>>> values = LazyAdam(tables.values(), lr=1e-3)     # beside the optimizer of the rest

For BERT, RoBERTa, DistilBERT, ELECTRA and every class with their layers. Needs torch only.
"""
import functools
import inspect

import torch
from torch import nn

from pkm import PKM


def add_memory(model, layers=(4, 8), alpha=1.0, beta=1.0, **sizes):
    """Give `layers`, counted from 1, a memory of PKM's `sizes` (n_keys, heads, topk, key_dim), in
    place: (alpha, beta) = (1, 1) is ResM; (0, 1) PKM, which drops the FFN's weights. All weights
    keep their names; layer 4's memory is <layers>.3.memory. Tokens that attention_mask leaves out
    read nothing and are not in the batch statistics. Returns {layer: ValueTable}, for LazyAdam;
    ValueError for a model of other layers."""
    (stack, encoder, position), memories = find_layers(model), {}
    if alpha == beta == 0:
        raise ValueError("alpha = beta = 0: layers would have neither FFN nor memory")
    if bad := [n for n in layers if not 1 <= n <= len(stack)]:
        raise ValueError(f"layers = {tuple(layers)}: no layer {bad[0]}: from 1 to {len(stack)}")
    if any(hasattr(layer, "memory") for layer in stack):
        raise ValueError("there is a memory already")
    for n, layer in [(n, stack[n - 1]) for n in layers]:
        bert = hasattr(layer, "output")  # else DistilBERT's
        if alpha == 0 and bert:
            layer.intermediate, layer.output.dense = nn.Identity(), Zero()
        elif alpha == 0:
            layer.ffn = Zero()
        elif alpha != 1:
            ffn = layer.output.dense if bert else layer.ffn
            ffn.register_forward_hook(functools.partial(scale, alpha))
        if beta:
            norm = layer.output.LayerNorm if bert else layer.output_layer_norm
            memory = PKM(len(norm.weight), **sizes)
            layer.memory = memories[n] = memory.to(norm.weight).train(layer.training)
            if bert:
                layer.output.register_forward_pre_hook(functools.partial(add_read_to_input, memory, beta))
            else:
                layer.ffn.register_forward_hook(functools.partial(add_read_to_ffn, memory, beta))
    encoder.register_forward_pre_hook(
        functools.partial(hand_on_mask, list(memories.values()), position), with_kwargs=True)
    return {n: memory.values for n, memory in memories.items()}


def find_layers(model):
    """The model's one list of layers that end as BERT's or as DistilBERT's do, the module that is
    called with attention_mask, and the position of that argument."""
    stacks = [module for module in model.modules()
              if isinstance(module, nn.ModuleList) and len(module) and all(map(is_supported, module))]
    encoder = getattr(model, "base_model", model)
    arguments = list(inspect.signature(encoder.forward).parameters)
    if len(stacks) != 1 or "attention_mask" not in arguments:
        raise ValueError(
            f"{type(model).__name__}: expected a model called with attention_mask, with one list of "
            "layers that end as BERT's, output(intermediate(x), x), or as DistilBERT's, "
            f"output_layer_norm(ffn(x) + x), not in chunks; found {len(stacks)} lists")
    return stacks[0], encoder, arguments.index("attention_mask")


def is_supported(layer):
    """Whether a layer ends so. A pre-LN layer has its norm elsewhere."""
    names = dict(layer.named_modules())
    bert = isinstance(names.get("output.LayerNorm"), nn.LayerNorm) and (
        {"intermediate", "output.dense"} <= names.keys()
        and len(inspect.signature(layer.output.forward).parameters) == 2)
    distil = {"ffn", "sa_layer_norm", "output_layer_norm"} <= names.keys()
    return (bert or distil) and not getattr(layer, "chunk_size_feed_forward", 0)


# Hooks, bound by functools.partial: a deep copy of the model then has hooks of its own.
def add_read_to_input(memory, beta, output, args):
    """BERT's layer ends with output(FFN's inside, x), the norm of FFN + x: x gets the read."""
    inside, x = args
    return inside, x + beta * memory(x, memory.mask)


def add_read_to_ffn(memory, beta, ffn, args, y):
    """DistilBERT's layer ends with norm(ffn(x) + x): the FFN's output gets the read."""
    return y + beta * memory(args[0], memory.mask)


def scale(alpha, ffn, args, y):
    return alpha * y


def hand_on_mask(memories, position, encoder, args, kwargs):
    """The encoder's attention_mask, for its memories. It stays, for activation checkpointing."""
    mask = args[position] if len(args) > position else kwargs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)}: expected (batch, time), to "
                         "tell which tokens are padding")
    for memory in memories:
        memory.mask = mask


class Zero(nn.Module):  # in the place of a PKM layer's FFN
    def forward(self, x):
        return torch.zeros_like(x)
