"""
Small random models of transformers with a memory, and models that compute it by hand.
"""
import copy

import pytest
import torch
from torch import nn

from for_transformers.add_memory import add_memory, find_layers

transformers = pytest.importorskip("transformers")

NO_DROPOUT = "hidden_dropout_prob", "attention_probs_dropout_prob", "embd_pdrop", "attn_pdrop", \
    "resid_pdrop", "dropout", "attention_dropout"
SIZES = {  # in each model's own words
    "vocab_size": 40, "pad_token_id": 0, "max_position_embeddings": 24, "hidden_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "n_inner": 24,
    "ffn_dim": 24, "hidden_dim": 24, "embedding_size": 16, "word_embed_proj_dim": 16,
    **dict.fromkeys(NO_DROPOUT, 0.0)}
GROUPED = {"num_key_value_heads": 1, "head_dim": 8}
WINDOWS = {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
DECODERS = {  # {class: more settings}
    "LlamaForCausalLM": GROUPED, "MistralForCausalLM": {**GROUPED, "sliding_window": 4},
    "Qwen2ForCausalLM": {"num_key_value_heads": 1}, "Qwen3ForCausalLM": GROUPED,
    "Gemma3ForCausalLM": {**GROUPED, **WINDOWS},
    "GPT2LMHeadModel": {}, "GPTNeoXForCausalLM": {}, "OPTForCausalLM": {},
}
ENCODERS = {
    "BertForMaskedLM": {}, "RobertaForMaskedLM": {}, "XLMRobertaForMaskedLM": {},
    "CamembertForMaskedLM": {}, "DistilBertForMaskedLM": {}, "ElectraForMaskedLM": {},
    "MPNetForMaskedLM": {}, "ModernBertForMaskedLM": {**WINDOWS, "local_attention": 4},
    "DebertaV2ForMaskedLM": {"relative_attention": True, "position_buckets": 4,
                             "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm",
                             "conv_kernel_size": 3, "conv_act": "gelu"},
}
MODELS = {**DECODERS, **ENCODERS}
PRE = "input_layernorm", None, "post_attention_layernorm", None
PARALLEL = "input_layernorm", None, "input_layernorm", None
SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
            "post_feedforward_layernorm")
LIKE_LLAMA = {  # {class: (more settings, the norms before and after attention and FFN)}
    "OlmoForCausalLM": ({}, PRE), "SmolLM3ForCausalLM": (GROUPED, PRE),
    "Phi3ForCausalLM": ({}, PRE), "StableLmForCausalLM": (GROUPED, PRE),
    "GraniteForCausalLM": ({"residual_multiplier": 0.22}, PRE),
    "PhiForCausalLM": ({}, PARALLEL), "CohereForCausalLM": (GROUPED, PARALLEL),
    "Olmo2ForCausalLM": ({}, (None, SANDWICH[1], None, SANDWICH[3])),
    "Gemma2ForCausalLM": ({**GROUPED, **WINDOWS}, SANDWICH),
    "Glm4ForCausalLM": (GROUPED, ("input_layernorm", "post_self_attn_layernorm",
                                  "post_attention_layernorm", "post_mlp_layernorm")),
}
MEMORY = {"n_keys": 4, "heads": 2, "topk": 3, "key_dim": 4}


def small_model(kind, **more):
    """Make a random model whose weights are large enough that each shows in the output."""
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    settings = MODELS.get(kind) or LIKE_LLAMA.get(kind, [{}])[0]
    return spread(model_class(model_class.config_class(**{**SIZES, **settings, **more})))


def spread(model):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(float("norm" in name.lower() and p.dim() == 1), 0.3)
    return model


def with_memory(kind, layers=(1, 2), alpha=0.6, beta=1.5, parts=None, **more):
    """Make a model with memories, whose batch norms have random statistics."""
    model = small_model(kind, **more).double()
    add_memory(model, layers, alpha, beta, parts=parts, **MEMORY)
    spread(model)
    for n in layers:
        norm = find_layers(model)[n - 1].memory.query_norm
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return model.eval()


def batch(padding="right"):
    """Draw sentences of 6, 4 and 3 tokens: ids and a mask of 0 and 1."""
    torch.manual_seed(1)
    mask = torch.arange(6) < torch.tensor([[6], [4], [3]])
    mask = mask.flip(1) if padding == "left" else mask
    return torch.randint(3, 40, (3, 6)).where(mask, 0), mask.long()


def logits(model, ids, mask):
    """Compute the logits of the real tokens."""
    plain = getattr(model, "_orig_mod", model)  # of a compiled one
    cache = {"use_cache": False} if type(plain).__name__ in {**DECODERS, **LIKE_LLAMA} else {}
    return model(ids, attention_mask=mask, **cache).logits[mask.bool()]


def gradients(model, *batches):
    """Run all batches, then go backward. Returns {name: gradient}; of values: by their reads."""
    model.zero_grad()
    sum(logits(model, *b).square().mean() for b in batches).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, module in model.named_modules():
        if hasattr(module, "pending"):
            found[f"{name}.weight"] = grad = torch.zeros_like(module.weight)
            for slots, weights, grad_out in module.pending:
                products = weights[..., None] * grad_out[:, None]
                grad.index_add_(0, slots.flatten(), products.flatten(0, 1))
            module.pending.clear()
    return found


def assert_same_gradients(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        size = max(grad.norm().item(), 1e-3)  # some have a gradient of 0, such as a query's bias
        assert (found[name] - grad).norm() <= tolerance * size, name


class ByHand(nn.Module):
    """Compute alpha * FFN(x) + beta * memory(x), where each query is compared with all slots."""

    def __init__(self, ffn, memory, alpha, beta, norm=None):
        super().__init__()
        self.ffn, self.memory, self.alpha, self.beta, self.norm = ffn, memory, alpha, beta, norm

    def forward(self, inside, x=None):
        """Take x and the FFN's input, which is x, or in BERT what enters its last layer."""
        x = inside if x is None else x
        y = self.beta * self.read(x)
        if self.alpha:
            y = y + self.alpha * self.ffn(inside)
        return y if self.norm is None else self.norm(y + x)

    def read(self, x):
        memory, real = self.memory, self.real.reshape(x.shape[:-1])
        query, norm = memory.query(x[real]), memory.query_norm
        mean, var = norm.running_mean, norm.running_var
        if self.training:
            mean, var = query.mean(0), query.var(0, correction=0)
        query = (query - mean) / (var + norm.eps).sqrt() * norm.weight + norm.bias
        heads, _, _, half = memory.keys.shape
        query = query.view(-1, heads, 2, half)
        first, second = torch.einsum("thsd, hsnd -> sthn", query, memory.keys)
        scores = (first[..., None] + second[..., None, :]).flatten(2)  # (tokens, heads, slots)
        best, slots = scores.topk(memory.topk)
        read = torch.einsum("thk, thkd -> td", best.softmax(2), memory.values.weight[slots])
        return torch.zeros_like(x).index_put((real,), read)


class LayerByHand(nn.Module):
    """Compute a decoder's layer from its attention, norms and a ByHand for its FFN."""

    def __init__(self, layer, norms, memory, alpha, beta):
        super().__init__()
        norms = [getattr(layer, name) if name else nn.Identity() for name in norms]
        self.before, self.after, self.before_ffn, after_ffn = norms
        self.layer, self.factor = layer, getattr(layer, "residual_multiplier", 1)
        self.ffn = ByHand(lambda x: self.factor * after_ffn(layer.mlp(x)), memory, alpha, beta)

    def forward(self, x, **settings):
        inside = self.before(x)
        y = x + self.factor * self.after(self.layer.self_attn(inside, **settings)[0])
        return y + self.ffn(inside if self.before_ffn is self.before else self.before_ffn(y))


def by_hand(model, mask, alpha=0.6, beta=1.5, **more):
    """Make a plain model whose two FFNs are replaced by hand.

    Returns it and {name: parameter}, with the names of `model`, a model with two memories.
    """
    plain = small_model(type(model).__name__, **more).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    parameters = dict(plain.named_parameters())
    modules = {module: name for name, module in model.named_modules()}
    stack, kind = find_layers(plain, model.config.product_key_memory["parts"]), type(model).__name__
    for n, (layer, original) in enumerate(zip(stack, find_layers(model), strict=True)):
        memory = copy.deepcopy(original.memory).requires_grad_(True)
        if kind in LIKE_LLAMA:
            stack[n] = LayerByHand(layer, LIKE_LLAMA[kind][1], memory, alpha, beta)
            ours = stack[n].ffn
        elif hasattr(layer, "fc1"):
            ffn = nn.Sequential(layer.fc1, layer.activation_fn, layer.fc2)
            layer.fc1 = layer.activation_fn = nn.Identity()
            layer.fc2 = ours = ByHand(ffn, memory, alpha, beta)
        elif hasattr(layer, "intermediate"):
            ours = ByHand(layer.output.dense, memory, alpha, beta, layer.output.LayerNorm)
            layer.output = ours
        else:
            name = "mlp" if hasattr(layer, "mlp") else "ffn"
            ours = ByHand(getattr(layer, name), memory, alpha, beta)
            setattr(layer, name, ours)
        ours.real = mask.bool()
        prefix = f"{modules[original]}.memory."
        parameters |= {prefix + name: p for name, p in memory.named_parameters()}
    return plain.train(model.training), parameters
