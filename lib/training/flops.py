"""
Count the operations of a training step, and look up a card's peak.
"""
import re

import torch

from lib.corpus.batches import MASKED

# Dense bf16/fp16 tensor-core peaks in FLOP/s, from NVIDIA's data sheets (for the SXM cards)
PEAK_FLOPS = {"V100": 125e12, "A100": 312e12, "H100": 989e12, "H200": 989e12, "L4": 121e12,
              "4090": 165e12}


def peak_flops(device):
    """Return a CUDA device's peak in FLOP/s, or None if it is unknown."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    names = re.findall(r"\w+", card)  # whole words: an L40 is no L4
    return next((peak for name, peak in PEAK_FLOPS.items() if name in names), None)


def flops_per_token(model, seq_len):
    """Count the floating-point operations of a training step per token, forward and backward. A
    weight that multiplies a token has 6, sub-keys too; the head only at predicted positions.
    Attention has 12 * seq_len * d_model a layer. The few operations of value reads do not count."""
    config = model.bert.config
    weights = sum(p.numel() for name, p in model.bert.layers.named_parameters()
                  if p.dim() > 1 and not name.endswith("values.weight"))
    predicted = 1 if config.causal else MASKED  # share of the positions
    weights += predicted * config.d_model * (config.d_model + config.vocab_size)
    return 6 * weights + 12 * config.n_layer * seq_len * config.d_model
