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


def add_memory(model, layers=(4, 8), alpha=1.0, beta=1.0, n_keys=512, heads=4, topk=32,
               key_dim=256):
    """Give `layers`, counted from 1, a product-key memory (section 4.2): (alpha, beta) = (1, 1) is
    ResM; (0, 1) PKM, which drops the FFN's weights; (1, 0) changes nothing. The model is changed
    in place. Its weights keep their names; layer 4's memory is <layers>.3.memory.

    A padded token, by the model's attention_mask, reads nothing and stays out of the memory's batch
    statistics. Returns {layer: ValueTable}, for LazyAdam. ValueError for a model of other layers.
    """
    stack = find_layers(model)
    if alpha == beta == 0:
        raise ValueError("alpha = beta = 0: layers would have neither FFN nor memory")
    if bad := [n for n in layers if not 1 <= n <= len(stack)]:
        raise ValueError(f"layers = {tuple(layers)}: there is no layer {bad[0]}, layers are counted "
                         f"from 1 to {len(stack)}")
    if any(hasattr(layer, "memory") for layer in stack):
        raise ValueError("there is a memory already")
    memories = {}
    for n in layers:
        layer = stack[n - 1]
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
            memory = PKM(len(norm.weight), n_keys, heads, topk, key_dim)
            layer.memory = memories[n] = memory.to(norm.weight).train(layer.training)
            memory.mask = None
            if bert:
                layer.output.register_forward_pre_hook(functools.partial(before, memory, beta))
            else:
                layer.ffn.register_forward_hook(functools.partial(after, memory, beta))
    encoder = getattr(model, "base_model", model)
    position = list(inspect.signature(encoder.forward).parameters).index("attention_mask")
    encoder.register_forward_pre_hook(
        functools.partial(hand_on_mask, list(memories.values()), position), with_kwargs=True)
    return {n: memory.values for n, memory in memories.items()}


# Hooks, so that all weights keep their names. What a hook needs is bound by functools.partial: a
# deep copy or a pickle of the model then has hooks that know its own memories.

def before(memory, beta, output, args):
    """BERT's layer ends with output(intermediate(x), x), the norm of FFN + x: x gets the read."""
    hidden, x = args
    return hidden, x + beta * memory(x, memory.mask)


def after(memory, beta, ffn, args, y):
    """DistilBERT's layer ends with norm(ffn(x) + x): the FFN's output gets the read."""
    return y + beta * memory(args[0], memory.mask)


def scale(alpha, ffn, args, y):
    return alpha * y


def hand_on_mask(memories, position, encoder, args, kwargs):
    """Before the encoder runs: its attention_mask for the memories, which a layer gets in another
    form, if at all. Kept after the pass, for activation checkpointing."""
    mask = args[position] if len(args) > position else kwargs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)}: expected (batch, time), to "
                         "tell which tokens are padding")
    for memory in memories:
        memory.mask = mask


class Zero(nn.Module):
    """What a PKM layer has in the place of its FFN."""

    def forward(self, x):
        return torch.zeros_like(x)


def find_layers(model):
    """The model's one nn.ModuleList of layers that end as BERT's or as DistilBERT's."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)
              and len(module) and all(map(known, module))]
    encoder = getattr(model, "base_model", model)
    if len(stacks) != 1 or "attention_mask" not in inspect.signature(encoder.forward).parameters:
        raise ValueError(
            f"{type(model).__name__}: expected a model called with attention_mask, and in it one "
            "list of layers that end as BERT's, self.output(self.intermediate(x), x), or as "
            "DistilBERT's, self.output_layer_norm(self.ffn(x) + x); chunk_size_feed_forward = 0; "
            f"found {len(stacks)}")
    return stacks[0]


def known(layer):
    """Whether a layer ends as BERT's or as DistilBERT's; a pre-LN layer has no norm there."""
    output = getattr(layer, "output", None)
    bert = hasattr(layer, "intermediate") and (
        isinstance(getattr(output, "dense", None), nn.Linear | Zero)
        and isinstance(getattr(output, "LayerNorm", None), nn.LayerNorm)
        and len(inspect.signature(output.forward).parameters) == 2)
    distil = isinstance(getattr(layer, "ffn", None), nn.Module) and (
        isinstance(getattr(layer, "output_layer_norm", None), nn.LayerNorm)
        and hasattr(layer, "sa_layer_norm"))
    return (bert or distil) and not getattr(layer, "chunk_size_feed_forward", 0)
