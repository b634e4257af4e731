"""
Small random models of transformers with a memory, and models that compute it by hand.
"""
import copy
from functools import partial

import pytest
import torch
from torch import nn

from for_transformers.add_memory import add_memory, find_layers
from pkm import PKM, LazyAdam, ValueTable

transformers = pytest.importorskip("transformers")

NO_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "embd_pdrop", "attn_pdrop",
              "resid_pdrop", "dropout", "attention_dropout")
SIZES = {  # in each model's own words
    "vocab_size": 40, "pad_token_id": 0, "max_position_embeddings": 24, "hidden_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "n_inner": 24,
    "ffn_dim": 24, "hidden_dim": 24, "embedding_size": 16, "word_embed_proj_dim": 16,
    **dict.fromkeys(NO_DROPOUT, 0.0)}
GROUPED = {"num_key_value_heads": 1, "head_dim": 8}
WINDOWS = {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
PLAIN = [
    "OlmoForCausalLM", "Olmo2ForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel",
    "GPTNeoXForCausalLM", "OPTForCausalLM", "BertForMaskedLM", "RobertaForMaskedLM",
    "XLMRobertaForMaskedLM", "CamembertForMaskedLM", "DistilBertForMaskedLM",
    "ElectraForMaskedLM", "MPNetForMaskedLM"]
FEWER_KEYS = [
    "LlamaForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM", "CohereForCausalLM",
    "StableLmForCausalLM", "Glm4ForCausalLM"]
MODELS = dict.fromkeys(PLAIN) | dict.fromkeys(FEWER_KEYS, GROUPED) | {  # {class: settings}
    "MistralForCausalLM": {**GROUPED, "sliding_window": 4},
    "Qwen2ForCausalLM": {"num_key_value_heads": 1},
    "GraniteForCausalLM": {"residual_multiplier": 0.22},
    "Gemma2ForCausalLM": {**GROUPED, **WINDOWS},
    "Gemma3ForCausalLM": {**GROUPED, **WINDOWS},
    "ModernBertForMaskedLM": {**WINDOWS, "local_attention": 4},
    "DebertaV2ForMaskedLM": {"relative_attention": True, "position_buckets": 4,
                             "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm",
                             "conv_kernel_size": 3, "conv_act": "gelu"},
}
NORMS = {  # of the FFN's output, before the memory joins
    "Olmo2ForCausalLM": "post_feedforward_layernorm",
    "Gemma2ForCausalLM": "post_feedforward_layernorm",
    "Glm4ForCausalLM": "post_mlp_layernorm",
}
MEMORY = {"n_keys": 4, "heads": 2, "topk": 3, "key_dim": 4}


def small_model(kind, **more):
    """Make a random model whose weights are large enough that each shows in the output."""
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    settings = {**SIZES, **(MODELS.get(kind) or {}), **more}
    return spread(model_class(model_class.config_class(**settings)))


def spread(model):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(float("norm" in name.lower() and p.dim() == 1), 0.3)
    return model


def with_memory(kind, layers=(1, 2), alpha=0.6, beta=1.5, **more):
    """Make a model with memories, whose batch norms have random statistics."""
    model = small_model(kind, **more).double()
    add_memory(model, layers, alpha, beta, **MEMORY)
    for _, memory in memories_of(spread(model)):
        memory.query_norm.running_mean.normal_()
        memory.query_norm.running_var.uniform_(0.5, 2)
    return model.eval()


def memories_of(model):
    return [(name, m) for name, m in model.named_modules() if isinstance(m, PKM)]


def layers_of(model, parts=None):
    return find_layers(model, parts)[0]


def batch(padding="right"):
    """Draw sentences of 6, 4 and 3 tokens: ids and a mask of 0 and 1."""
    torch.manual_seed(1)
    mask = torch.arange(6) < torch.tensor([[6], [4], [3]])
    mask = mask.flip(1) if padding == "left" else mask
    return torch.randint(3, 40, (3, 6)).where(mask, 0), mask.long()


def logits(model, ids, mask):
    """Compute the logits of the real tokens."""
    return model(ids, attention_mask=mask).logits[mask.bool()]


def gradients(model, *batches):
    """Run all batches, then go backward. Returns {name: gradient}, the values' by their reads."""
    model.zero_grad()
    LazyAdam([module for module in model.modules() if isinstance(module, ValueTable)])
    sum(logits(model, *b).square().mean() for b in batches).backward()
    for module in model.modules():
        if isinstance(module, ValueTable):
            module.weight.grad = grad = torch.zeros_like(module.weight)
            for slots, weights, grad_out in module.pending:
                products = weights[..., None] * grad_out[:, None]
                grad.index_add_(0, slots.flatten(), products.flatten(0, 1))
            module.pending.clear()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        size = max(grad.norm().item(), 1e-3)  # some have a gradient of 0, such as a query's bias
        assert (found[name] - grad).norm() <= tolerance * size, name


class ByHand(nn.Module):
    """Compute alpha * FFN(x) + beta * memory(x), of BERT also the norm that follows."""

    def __init__(self, ffn, memory, real, alpha, beta, norm=None):
        super().__init__()
        self.ffn, self.memory, self.norm = ffn, memory, norm
        self.real, self.alpha, self.beta = real, alpha, beta

    def forward(self, inside, x=None):
        """Take the FFN's input, which is x. In BERT take what enters its last layer, and x."""
        x = inside if x is None else x
        y = self.alpha * self.ffn(inside) + self.beta * self.memory(x, self.real)
        return y if self.norm is None else self.norm(y + x)


def by_hand(model, mask, alpha=0.6, beta=1.5, **more):
    """Make a plain model, and replace its FFNs by ByHand with the memories of `model`.

    Returns it and {name: parameter} of all of it, with the names of `model`.
    """
    kind, parts = type(model).__name__, model.config.product_key_memory["parts"]
    plain = small_model(kind, **more).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    parameters = dict(plain.named_parameters())
    if kind.startswith("Granite"):  # its layer multiplies all that joins the stream
        beta = beta / 0.22
    for layer, (name, memory) in zip(layers_of(plain, parts), memories_of(model), strict=True):
        memory = copy.deepcopy(memory)
        parameters |= {f"{name}.{key}": p for key, p in memory.named_parameters()}
        ours = partial(ByHand, memory=memory, real=mask.bool(), alpha=alpha, beta=beta)
        if hasattr(layer, "fc1"):
            ffn = nn.Sequential(layer.fc1, layer.activation_fn, layer.fc2)
            layer.fc1 = layer.activation_fn = nn.Identity()
            layer.fc2 = ours(ffn)
        elif hasattr(layer, "intermediate"):
            layer.output = ours(layer.output.dense, norm=layer.output.LayerNorm)
        elif kind in NORMS:
            layer.mlp = ours(nn.Sequential(layer.mlp, layer.get_submodule(NORMS[kind])))
            layer.set_submodule(NORMS[kind], nn.Identity())
        else:
            name = "mlp" if hasattr(layer, "mlp") else "ffn"
            layer.set_submodule(name, ours(layer.get_submodule(name)))
    return plain.train(model.training), parameters
