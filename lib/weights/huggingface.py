"""
Hugging Face's BERT and DistilBERT: their weights under our names, ours under theirs.

>>> saved = read_folder(Path("data/weights/bert-base-uncased"))   # {"config": ..., "weights": ...}
"""
import json
import re
from dataclasses import asdict

import torch

from lib.common.errors import UserError
from lib.common.files import load_file
from lib.corpus.download import unknown_weights
from lib.corpus.vocabulary import read_vocab
from model import BertConfig, build_model

FILES = ("model.safetensors", "pytorch_model.bin")
# Hugging Face's names for our modules; {} stands for the parts of our qkv.
NAMES = {
    "bert": {
        "words": "embeddings.word_embeddings", "positions": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings", "norm": "embeddings.LayerNorm",
        "layers": "encoder.layer", "qkv": "attention.self.{}", "out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm", "up": "intermediate.dense",
        "down": "output.dense", "layer norm": "output.LayerNorm", "pooler": "pooler.dense",
        "transform": "cls.predictions.transform.dense", "bias": "cls.predictions.bias",
        "transform_norm": "cls.predictions.transform.LayerNorm",
        "parts": ("query", "key", "value")},
    "distilbert": {
        "words": "embeddings.word_embeddings", "positions": "embeddings.position_embeddings",
        "norm": "embeddings.LayerNorm", "layers": "transformer.layer",
        "qkv": "attention.{}_lin", "out": "attention.out_lin", "attention_norm": "sa_layer_norm",
        "up": "ffn.lin1", "down": "ffn.lin2", "layer norm": "output_layer_norm",
        "transform": "vocab_transform", "bias": "vocab_projector.bias",
        "transform_norm": "vocab_layer_norm", "parts": ("q", "k", "v")}}
SETTINGS = {  # config.json's names for BertConfig's settings
    "bert": {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
             "d_model": "hidden_size", "d_ff": "intermediate_size", "vocab_size": "vocab_size",
             "max_len": "max_position_embeddings", "type_vocab": "type_vocab_size",
             "dropout": "hidden_dropout_prob", "init_std": "initializer_range"},
    "distilbert": {"n_layer": "n_layers", "n_head": "n_heads", "d_model": "dim",
                   "d_ff": "hidden_dim", "vocab_size": "vocab_size", "dropout": "dropout",
                   "max_len": "max_position_embeddings", "init_std": "initializer_range"}}
SETTINGS["pkm-bert"] = {**SETTINGS["bert"], **{name: name for name in (
    "memory_layers", "alpha", "beta", "n_keys", "memory_heads", "topk", "key_dim")}}
# The hidden_act of a model with memory. transformers' own BERT would load the folder and leave the
# memory out. It has no activation of this name, and its error shows the name.
MEMORY_ACT = "gelu (this model has a memory: AutoModelFor..., trust_remote_code=True)"
HEAD_NAMES = {"classifier": "classifier", "span": "qa_outputs"}
ARCHITECTURES = {None: "BertForMaskedLM", "classifier": "BertForSequenceClassification",
                 "span": "BertForQuestionAnswering"}


def their_names(name, head=None, kind="bert"):
    """Return Hugging Face's names, without prefix, for our tensor: one, or three for qkv."""
    names = NAMES[kind]
    if layer := re.fullmatch(r"bert\.layers\.(\d+)\.(\w+)\.(.+)", name):
        number, module, rest = layer.groups()
        module = names.get("layer norm" if module == "norm" else module, module)  # or memory
        theirs = f"{names['layers']}.{number}.{module}.{rest}"
        return [theirs.format(p) for p in names["parts"]] if "{}" in theirs else [theirs]
    module, _, rest = name.removeprefix("bert.").partition(".")
    if module == "head":
        return [f"{HEAD_NAMES[head]}.{rest}"]
    return [f"{names.get(module, module)}.{rest}" if rest else names[module]]


def to_huggingface(weights, head=None):
    """Rename the tensors of our state dict as Hugging Face's BERT does; qkv becomes three."""
    renamed = {}
    for name, w in weights.items():
        theirs = their_names(name, head)
        prefix = "bert." if name.startswith("bert.") else ""
        parts = [w] if len(theirs) == 1 else [part.clone() for part in w.chunk(len(theirs))]
        renamed |= {prefix + n: part for n, part in zip(theirs, parts, strict=True)}
    return renamed


def from_huggingface(weights, config, head=None):
    """Rename the tensors of Hugging Face's BERT or DistilBERT as ours; their prefix is optional.

    Tensors that only one side has are left out: our pooler where theirs has none, their tied
    decoder, BERT's head for next-sentence prediction.
    """
    theirs = {re.sub(r"^(distil)?bert\.", "", name): w for name, w in weights.items()}
    for old, new in (("gamma", "weight"), ("beta", "bias")):  # TensorFlow's names of LayerNorm
        theirs = {re.sub(rf"LayerNorm\.{old}$", f"LayerNorm.{new}", n): w
                  for n, w in theirs.items()}
    kind = "distilbert" if "transformer.layer.0.ffn.lin1.weight" in theirs else "bert"
    with torch.device("meta"):  # only its names are needed
        ours = build_model(config, head).state_dict()
    names = {name: their_names(name, head, kind) for name in ours}
    return {name: torch.cat([theirs[n] for n in parts]) if len(parts) > 1 else theirs[parts[0]]
            for name, parts in names.items() if all(n in theirs for n in parts)}


def read_folder(folder):
    """Read a folder in Hugging Face's layout, theirs or an exported one.

    Returns a dict like a checkpoint's: config (BertConfig's settings), weights (under our names),
    and, where the model has one, its head and a classifier's labels. UserError if the folder is
    damaged or has another kind of model.
    """
    settings, config = read_config(folder / "config.json")
    weights = read_tensors(next(folder / name for name in FILES if (folder / name).is_file()))
    head = next((head for head, name in HEAD_NAMES.items() if f"{name}.weight" in weights), None)
    if head == "classifier" and settings.get("model_type") == "distilbert":
        raise UserError(f"{folder}: DistilBERT's classification head differs from BERT's: take a "
                        "DistilBERT without it")
    vocab = folder / "vocab.txt"
    if vocab.is_file() or (folder / "tokenizer.json").is_file():
        tokens = len(read_vocab(vocab))
        if tokens != config.vocab_size:
            raise UserError(f"{vocab}: {tokens:,} tokens do not fit weights for "
                            f"{config.vocab_size:,}")
    saved = {"config": asdict(config), "weights": from_huggingface(weights, config, head)}
    if head:
        saved["head"] = head
    if head == "classifier":
        n_classes, names = len(weights["classifier.weight"]), settings.get("id2label") or {}
        names = [names.get(str(n), f"LABEL_{n}") for n in range(n_classes)]
        saved["labels"] = names if n_classes > 1 else []
    return saved


def read_config(file):
    """Read a config.json: its content, and the BertConfig that it describes."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        kind = settings.get("model_type", "bert")  # BERT's first folders have none
        if "roberta" in str(kind):
            raise unknown_weights(f"{file.parent}: {kind}")
        if kind not in SETTINGS:
            raise UserError(f"{file}: model_type = {kind!r}: expected bert or distilbert")
        known = {ours: settings[theirs] for ours, theirs in SETTINGS[kind].items()}
        config = BertConfig(**{"type_vocab": 0, "causal": settings.get("is_decoder", False),
                               **known})
    except UserError:
        raise
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise UserError(f"{file}: damaged ({type(error).__name__}: {error})") from None
    for key, ours in (("hidden_act", "gelu"), ("activation", "gelu"), ("layer_norm_eps", 1e-12),
                      ("position_embedding_type", "absolute"), ("tie_word_embeddings", True)):
        if settings.get(key, ours) not in (ours, MEMORY_ACT):
            raise UserError(f"{file}: {key} = {settings[key]!r}: this BERT has {ours!r}")
    return settings, config


def read_tensors(path):
    """Read the tensors of a .safetensors or a .bin file, by name."""
    weights = load_file(path, hint="fetch it again")
    if not (isinstance(weights, dict) and all(map(torch.is_tensor, weights.values()))):
        raise UserError(f"{path}: no state dict: expected names and tensors")
    return weights
