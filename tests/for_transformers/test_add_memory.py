"""
Test what add_memory accepts, refuses and drops, how it reads masks, and copies of models.
"""
import copy
import io

import pytest
import torch
from torch import nn

from for_transformers.add_memory import add_memory, find_layers, real_tokens
from tests.for_transformers.small_models import (
    BERT,
    GROUPED,
    MEMORY,
    SIZES,
    batch,
    by_hand,
    logits,
    small_model,
    tell_padding,
    transformers,
    with_memory,
)
from tests.helpers import assert_near

FORMS = ["BertForMaskedLM", "DistilBertForMaskedLM", "LlamaForCausalLM", "GPTNeoXForCausalLM",
         "OPTForCausalLM"]
MOE = {**GROUPED, "num_local_experts": 2}


@pytest.mark.parametrize("kind", FORMS)
def test_alpha_0_drops_the_ffn(kind):
    model, (ids, mask) = with_memory(kind, alpha=0, beta=1), batch()
    plain, _ = by_hand(model, alpha=0, beta=1)
    tell_padding(plain, mask)
    y, expected = logits(model, ids, mask), logits(plain, ids, mask)
    assert_near(y[mask.bool()], expected[mask.bool()], 1e-12)
    ours = {name for name in model.state_dict() if ".memory." not in name}
    all_names = small_model(kind).state_dict().keys()
    assert ours < all_names
    parts = ("mlp", "ffn", "intermediate", "output.dense", "fc1", "fc2")
    dropped = {name for name in all_names if "attention" not in name
               and any(f".{part}." in name for part in parts)}
    assert ours == all_names - dropped


@pytest.mark.parametrize("kind", FORMS)
def test_beta_0_is_the_model_without(kind):
    model, (ids, mask) = small_model(kind).eval(), batch()
    before = logits(model, ids, mask)
    assert add_memory(model, (1, 2), beta=0) == {}
    assert torch.equal(logits(model, ids, mask), before)


def test_only_chosen_layers_get_a_memory():
    model = small_model("LlamaForCausalLM").bfloat16().eval()
    model.model.layers[1].to("meta")  # another device
    tables = add_memory(model, [2], **MEMORY)
    assert list(tables) == [2] and tables[2] is model.model.layers[1].memory.values
    assert tables[2].weight.dtype is torch.float32 and tables[2].weight.is_meta
    assert model.model.layers[1].memory.query.weight.dtype is torch.bfloat16
    assert not hasattr(model.model.layers[0], "memory")
    assert not model.model.layers[1].memory.training


DROPOUT = pytest.mark.parametrize("kind, settings", [
    ("GPTNeoXForCausalLM", {"hidden_dropout": 0.5}), ("OPTForCausalLM", {"dropout": 0.5}),
    ("GPT2LMHeadModel", {"resid_pdrop": 0.5}), ("DistilBertForMaskedLM", {"dropout": 0.5})])


@DROPOUT
def test_no_dropout_on_the_memory(kind, settings):
    """All else being equal, also what dropout draws, a layer's output differs by the whole read."""
    model, (ids, mask) = with_memory(kind, (2,), 1.0, 1.5, **settings).train(), batch()
    layer, seen = find_layers(model)[1], []
    layer.memory.register_forward_hook(lambda memory, args, y: seen.append(y.view(3, 6, 16)))
    if kind.startswith("Distil"):
        layer.output_layer_norm = nn.Identity()
    layer.register_forward_hook(lambda layer, args, y: seen.append(y))
    with torch.no_grad():
        for _ in range(2):
            torch.manual_seed(0)
            logits(model, ids, mask)
            layer.memory.values.weight.zero_()
    read, y, nothing, without = seen
    assert (nothing == 0).all() and (read[mask.bool()] != 0).all()
    assert_near(y - without, 1.5 * read, 1e-12)
    torch.manual_seed(0)
    logits(model, ids, mask)
    assert torch.equal(seen[-1], without)
    torch.manual_seed(1)
    logits(model, ids, mask)
    assert not torch.equal(seen[-1], without)  # the FFN's is still there


@DROPOUT
def test_all_other_dropout_stays(kind, settings):
    """With values of 0 the model draws and drops the same as without memory."""
    model, (ids, mask) = with_memory(kind, (2,), 1.0, **settings).train(), batch()
    find_layers(model)[1].memory.values.weight.data.zero_()
    plain = small_model(kind, **settings).double().train()
    plain.load_state_dict(model.state_dict(), strict=False)
    outputs = []
    for m in (model, plain):
        torch.manual_seed(0)
        outputs.append(logits(m, ids, mask)[mask.bool()])
    assert_near(*outputs, 1e-12)


def test_a_copy_has_hooks_of_its_own():
    model, (ids, mask) = with_memory("LlamaForCausalLM"), batch()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    before = logits(model, ids, mask)
    find_layers(model)[1].memory.values.weight.data.zero_()
    for other in others:
        assert torch.equal(logits(other, ids, mask), before)
    assert not torch.equal(logits(model, ids, mask), before)


def additive(allowed, lowest=-3.4e38):
    return torch.zeros(allowed.shape).masked_fill(~allowed, lowest)


@pytest.mark.parametrize("padding", ["right", "left"])
def test_masks(padding):
    """Every form of mask tells the same tokens."""
    real = batch(padding)[1].bool()
    attention, shape = nn.Identity(), real.shape
    causal = torch.ones(6, 6).tril().bool()
    window = causal & ~causal.tril(-3)
    past = torch.ones(3, 4).bool()
    seen = real[:, None] & causal
    for allowed in (seen, real[:, None] & window, real[:, None].expand(3, 6, 6), real[:, None],
                    torch.cat([past[:, None].expand(3, 6, 4), seen], 2)):
        four = allowed[:, None].expand(-1, 2, -1, -1)
        for mask in (four, additive(four), additive(four, -torch.inf), additive(four, -1e4)):
            assert torch.equal(real_tokens(mask, attention, shape), real)
    for mask in (real, real.long(), real.float(), torch.cat([past, real], 1)):
        assert torch.equal(real_tokens(mask, attention, shape), real)
    assert torch.equal(real_tokens(causal[None, None], attention, shape), real | True)
    assert real_tokens(None, attention, shape) is None
    static = torch.cat([seen, torch.zeros(3, 6, 9).bool()], 2)[:, None]
    assert real_tokens(static, attention.eval(), shape) is None  # a cache with empty places
    assert real_tokens("BlockMask", attention.eval(), shape) is None
    for mask, words in ("BlockMask", "str"), (real[None], r"\[1, 3, 6\]"):
        with pytest.raises(ValueError, match=f"attention_mask: {words}: expected"):
            real_tokens(mask, attention.train(), shape)


def test_debertas_masks_are_0_and_1_also_as_floats():
    model, (ids, mask) = with_memory("DebertaV2ForMaskedLM").train(), batch()
    other = copy.deepcopy(model)
    y, expected = logits(model, ids, mask.double()), logits(other, ids, mask)
    assert_near(y[mask.bool()], expected[mask.bool()], 1e-12)


def test_longformers_masks_are_negative_at_padding():
    model = transformers.LongformerForMaskedLM(transformers.LongformerConfig(
        **BERT, attention_window=4))
    add_memory(model, (1,), **MEMORY)
    ids, mask = torch.randint(1, 40, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    seen = []
    memory = find_layers(model)[0].memory
    memory.register_forward_pre_hook(lambda memory, args: seen.append(args[1]))
    model(ids, attention_mask=mask, global_attention_mask=torch.eye(2, 8).long())
    assert torch.equal(seen[0], mask.bool())


def test_offloaded_layers_and_wrapped_ffns_are_refused():
    model = small_model("LlamaForCausalLM")
    model.model.layers[1].mlp._hf_hook = "accelerate's"
    model.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="layer 2: its weights are offloaded"):
        add_memory(model, (2,), **MEMORY)
    model = small_model("OPTForCausalLM")
    find_layers(model)[0].fc2.base_layer = nn.Identity()  # as PEFT's
    with pytest.raises(ValueError, match="layer 1: .* add the memory before the adapter"):
        add_memory(model, (1,), **MEMORY)


@pytest.mark.parametrize("kind, target", [
    ("BertForMaskedLM", "output.dense"), ("LlamaForCausalLM", "down_proj"),
    ("OPTForCausalLM", "fc2")])
def test_a_merged_adapter_changes_no_output(kind, target):
    """alpha scales the adapter with the FFN, and the memory stays."""
    peft = pytest.importorskip("peft")
    model, (ids, mask) = with_memory(kind, alpha=1 if kind == "OPTForCausalLM" else 0.5), batch()
    model = peft.get_peft_model(model, peft.LoraConfig(
        r=2, target_modules=[target], init_lora_weights=False, exclude_modules=["memory.query"]))
    expected = logits(model.eval(), ids, mask)
    merged = model.merge_and_unload()
    assert sum(name.endswith("memory") for name, _ in merged.named_modules()) == 2
    assert_near(logits(merged, ids, mask), expected, 1e-6)


@pytest.mark.parametrize("compile_it", [torch.compile, nn.Module.compile])
def test_a_compiled_model_sees_the_memory(compile_it):
    model, (ids, mask) = small_model("LlamaForCausalLM").float().eval(), batch()
    compiled = compile_it(model, backend="eager")
    compiled = model if compiled is None else compiled  # compiled in place
    before = logits(compiled, ids, mask)
    add_memory(model, (1, 2), **MEMORY)
    assert (logits(compiled, ids, mask) - before).abs().max() > 0.01


def test_a_replica_of_data_parallel_is_refused():
    model, (ids, mask) = with_memory("BertForMaskedLM"), batch()
    find_layers(model)[0].attention._is_replica = True  # as torch.nn.parallel.replicate does
    with pytest.raises(RuntimeError, match="torchrun"):
        logits(model, ids, mask)


REFUSED = [
    ("AlbertForMaskedLM", {**SIZES, "embedding_size": 16}, "layers share their weights"),
    ("MixtralForCausalLM", MOE, "layer 2: its FFN is a mixture of experts"),
    ("Qwen3MoeForCausalLM", {**GROUPED, "num_experts": 2, "num_experts_per_tok": 1,
                             "moe_intermediate_size": 8}, "mixture of experts"),
    ("T5ForConditionalGeneration", {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24,
                                    "num_layers": 2, "num_heads": 2}, "encoder-decoder"),
    ("BartForConditionalGeneration", {"vocab_size": 40, "d_model": 16, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
        "encoder-decoder"),
    ("BertForMaskedLM", {**BERT, "chunk_size_feed_forward": 2}, "chunk_size_feed_forward = 0"),
    ("DistilBertModel", {"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 2,
                         "hidden_dim": 24, "chunk_size_feed_forward": 2}, "all tokens at once"),
    ("MambaModel", {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 2},
     "MambaModel: expected a model .* found 0 lists"),
    ("MobileBertForMaskedLM", {**BERT, "embedding_size": 16, "intra_bottleneck_size": 16,
                               "true_hidden_size": 16}, "found 0 lists"),
    ("BloomForCausalLM", {"vocab_size": 40, "hidden_size": 16, "n_layer": 2, "n_head": 2},
     "found 0 lists"),  # its MLP adds the residual
    ("CTRLLMHeadModel", {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "dff": 24},
     "its config could not tell of the memory: it names no activation"),
]


@pytest.mark.parametrize("kind, sizes, words", REFUSED, ids=[kind for kind, _, _ in REFUSED])
def test_refused_models(kind, sizes, words):
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**sizes))
    with pytest.raises(ValueError, match=words):
        add_memory(model, (2,), **MEMORY)
    assert not any("memory" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("layers, settings, error, words", [
    (2, {}, TypeError, r"layers = 2: expected numbers in a list, as in layers=\(4, 8\)"),
    ((3,), {}, ValueError, "no layer 3: from 1 to 2"),
    ((0,), {}, ValueError, "no layer 0"),
    (("1",), {}, TypeError, "expected numbers in a list"),
    ((1.0,), {}, TypeError, "expected numbers in a list"),
    ((True,), {}, TypeError, "expected numbers in a list"),
    (None, {}, TypeError, "layers = None: expected numbers in a list"),
    ((1, 1), {}, ValueError, "each only once"),
    ((), {}, ValueError, "at least one"),
    ((1,), {"n_key": 4}, TypeError, "n_key is no size of a memory: n_keys, heads, topk"),
    ((1,), {"heads": 0}, ValueError, "heads = 0: expected a whole number from 1"),
    ((1,), {"n_keys": 4.0}, ValueError, "n_keys = 4.0: expected a whole number"),
    ((1,), {"topk": 5}, ValueError, "topk = 5: expected 1 to n_keys = 4"),
    ((1,), {"alpha": 0, "beta": 0}, ValueError, "neither FFN nor memory"),
    ((1,), {"beta": float("inf")}, TypeError, "beta = inf: expected a number"),
])
def test_wrong_arguments(layers, settings, error, words):
    model = small_model("BertForMaskedLM")
    with pytest.raises(error, match=words):
        add_memory(model, layers, **{**MEMORY, **settings})
    add_memory(model, (1,), **MEMORY)  # nothing was changed
    with pytest.raises(ValueError, match="memory already"):
        add_memory(model, (2,), **MEMORY)


def test_classes_of_the_same_layers():
    class Mine(transformers.BertPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.bert, self.top = transformers.BertModel(config), nn.Linear(16, 1)
            self.post_init()

        def forward(self, ids, attention_mask):
            return self.top(self.bert(ids, attention_mask=attention_mask)[0])

    mine, (ids, mask) = Mine(transformers.BertConfig(**BERT)), batch()
    assert len(add_memory(mine, (2,), **MEMORY)) == 1 and mine(ids, mask).shape == (3, 6, 1)
    with pytest.raises(ValueError, match="Linear: .* found 0 lists"):
        add_memory(nn.Linear(2, 2), (1,))
