"""
Hugging Face's BERT and DistilBERT: their weights under our names, ours under theirs.

>>> saved = read_folder(Path("data/weights/bert-base-uncased"))   # {"config": ..., "weights": ...}
"""
import re
from dataclasses import asdict

import torch

from lib.files import load_file, read_json
from lib.settings import UserError
from lib.tokenizer import load_tokenizer
from model import SIZES, BertConfig, build_model

FILES = ("model.safetensors", "pytorch_model.bin")
PRETRAINED = {  # weights that prepare_data.py fetches from the hub, all Apache-2.0
    "bert-base-uncased": "google-bert/bert-base-uncased",
    "bert-large-uncased": "google-bert/bert-large-uncased",
    "distilbert-base-uncased": "distilbert/distilbert-base-uncased"}
# Hugging Face's names for our modules: outside of layers, and in a layer of BERT
NAMES = {
    "words": "embeddings.word_embeddings", "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings", "norm": "embeddings.LayerNorm",
    "pooler": "pooler.dense", "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm", "": "cls.predictions"}  # the bias
LAYER_NAMES = {
    "qkv": "attention.self.{}", "out": "attention.output.dense", "norm": "output.LayerNorm",
    "attention_norm": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense"}
BERT_NAMES = {  # BERT's names for DistilBERT's, and for those of TensorFlow's LayerNorm
    "transformer.layer": "encoder.layer", "attention.q_lin": "attention.self.query",
    "attention.k_lin": "attention.self.key", "attention.v_lin": "attention.self.value",
    "attention.out_lin": "attention.output.dense", "sa_layer_norm": "attention.output.LayerNorm",
    "ffn.lin1": "intermediate.dense", "ffn.lin2": "output.dense",
    "output_layer_norm": "output.LayerNorm", "vocab_transform": NAMES["transform"],
    "vocab_layer_norm": NAMES["transform_norm"], "vocab_projector.bias": "cls.predictions.bias",
    "vocab_projector.weight": "cls.predictions.decoder.weight",
    "LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
SETTINGS = {  # config.json's names for BertConfig's settings
    "bert": {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
             "d_model": "hidden_size", "d_ff": "intermediate_size", "vocab_size": "vocab_size",
             "max_len": "max_position_embeddings", "type_vocab": "type_vocab_size",
             "dropout": "hidden_dropout_prob", "init_std": "initializer_range",
             "causal": "is_decoder"},
}
SETTINGS["distilbert"] = {  # it has no token types, and is never causal
    "n_layer": "n_layers", "n_head": "n_heads", "d_model": "dim", "d_ff": "hidden_dim",
    "vocab_size": "vocab_size", "max_len": "max_position_embeddings", "dropout": "dropout",
    "init_std": "initializer_range"}
# an exported memory's settings keep their names
SETTINGS["pkm-bert"] = {name: name for name in asdict(BertConfig())} | SETTINGS["bert"]
# The hidden_act of a model with memory. transformers' own BERT would load the folder and leave the
# memory out. It has no activation of this name, and its error shows the name.
MEMORY_ACT = "gelu (this model has a memory: AutoModelFor..., trust_remote_code=True)"
COPIES = {  # tensors that may be stored, and what they must equal
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "embeddings.position_ids": "0, 1, 2, ..."}
KINDS = {  # what a config.json may have in a setting, if it has it
    "model_type": ("bert", "distilbert", "pkm-bert"), "hidden_act": ("gelu", MEMORY_ACT),
    "activation": ("gelu",), "position_embedding_type": ("absolute",),
    "layer_norm_eps": (1e-12,), "tie_word_embeddings": (True,), "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "problem_type": (None, "single_label_classification", "regression")}
HEAD_NAMES = {"classifier": "classifier", "span": "qa_outputs"}
ARCHITECTURES = {None: "BertForMaskedLM", "classifier": "BertForSequenceClassification",
                 "span": "BertForQuestionAnswering"}


def their_names(name, head=None):
    """Return BERT's names, without prefix, for our tensor: one, or three for qkv."""
    module, _, last = name.removeprefix("bert.").rpartition(".")
    if module.startswith("layers."):
        _, number, module = module.split(".", 2)
        theirs = f"encoder.layer.{number}.{LAYER_NAMES.get(module, module)}.{last}"
    else:
        theirs = f"{HEAD_NAMES[head] if module == 'head' else NAMES[module]}.{last}"
    parts = ("query", "key", "value") if "{}" in theirs else ("",)
    return [theirs.format(part) for part in parts]


def to_huggingface(weights, head=None):
    """Rename the tensors of our state dict as Hugging Face's BERT does; qkv becomes three."""
    renamed = {}
    for name, w in weights.items():
        prefix = "bert." if name.startswith("bert.") else ""
        names = their_names(name, head)
        for part_name, part in zip(names, w.chunk(3) if len(names) == 3 else [w]):
            renamed[prefix + part_name] = part.clone()
    return renamed


def from_huggingface(weights, config, head=None, source="the weights"):
    """Rename the tensors of Hugging Face's BERT or DistilBERT as ours.

    Their prefix, heads and pooler may be missing. UserError if another tensor is. Returns (weights,
    dropped): names of what our model has no place for.
    """
    theirs = {"0, 1, 2, ...": torch.arange(config.max_len)[None]}
    for name, w in weights.items():
        name = re.sub(r"^(distil)?bert\.", "", name)
        for other, bert in BERT_NAMES.items():
            name = name.replace(other, bert)
        theirs[name] = w
    for copy, name in COPIES.items():
        if copy in theirs and not torch.equal(theirs[copy], theirs.setdefault(name, theirs[copy])):
            raise UserError(f"{source}: {copy} is not {name}: of another model?")
    with torch.device("meta"):  # only its names are needed
        ours = build_model(config, head).state_dict()
    renamed, dropped = {}, set()
    for name in ours:
        names = their_names(name, head)
        parts = [theirs.pop(part) for part in names if part in theirs]
        if parts:
            renamed[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
        elif name.startswith("bert.") and "pooler" not in name:
            raise UserError(f"{source}: it has no {names[0]}: of another model?")
    padding = len(renamed["bert.words.weight"]) - config.vocab_size
    if not 0 <= padding < 128:
        raise UserError(f"{source}: {config.vocab_size + padding:,} rows for a vocabulary of "
                        f"{config.vocab_size:,} tokens: of another model?")
    for name in renamed.keys() & {"bert.words.weight", "bias"}:
        if padding:  # Google and NVIDIA pad to a multiple of 8 or 64
            dropped.add(f"{padding} rows beyond the vocabulary")
            renamed[name] = renamed[name][:-padding]
    rest = theirs.keys() - {*COPIES, *COPIES.values()}
    return renamed, dropped | {name.rpartition(".")[0] for name in rest}


def read_folder(folder):
    """Read a folder in Hugging Face's layout, theirs or an exported one.

    Returns a dict like a checkpoint's: config, weights under our names, head and a classifier's
    labels; and what was dropped, see from_huggingface(). UserError for a damaged folder or another
    kind of model.
    """
    settings, config = read_config(folder / "config.json")
    if any((folder / name).is_file() for name in ("vocab.txt", "tokenizer.json")):
        config.vocab_size = load_tokenizer(folder).get_vocab_size()
    theirs = {}
    for file in weight_files(folder):
        theirs |= load_file(file)
    for name, w in theirs.items():
        if not torch.is_tensor(w) or not w.isfinite().all():
            raise UserError(f"{folder}: {name} is no tensor, or has NaN or infinity in it")
    head = next((head for head, name in HEAD_NAMES.items() if f"{name}.weight" in theirs), None)
    weights, dropped = from_huggingface(theirs, config, head, folder)
    saved = {"config": config, "weights": weights, "head": head, "dropped": dropped}
    if head == "classifier":
        names, count = settings.get("id2label") or {}, len(weights["head.weight"])
        if len(names) not in (0, count):
            raise UserError(f"{folder}/config.json: id2label does not name the {count} classes")
        labels = [names.get(str(n), f"LABEL_{n}") for n in range(count)]
        saved["labels"] = labels if count > 1 else []  # [] is a regression
    return saved


def weight_files(folder):
    """List the files of a folder's weights: one, or the shards that an index names."""
    for name in FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            shards = read_json(index).get("weight_map", {})
            return sorted({folder / shard for shard in shards.values()})
    return []


def read_config(file):
    """Read a config.json. Returns its settings and the BertConfig.

    A missing setting has the default of transformers. UserError for another kind of model.
    """
    settings = read_json(file)
    try:
        settings = {"model_type": "bert"} | settings
        for key, choices in KINDS.items():
            if settings.get(key, choices[0]) not in choices:
                raise ValueError(f"{key} = {settings[key]!r}: expected {choices[0]!r}")
        kind = settings["model_type"]
        given = {ours: settings[theirs] for ours, theirs in SETTINGS[kind].items()
                 if theirs in settings}
        config = BertConfig(**SIZES["distil" if kind == "distilbert" else "base"] | given)
        if min(config.n_layer, config.n_head, config.d_ff, config.max_len) < 1:
            raise ValueError("layers, heads, widths and positions are at least 1")
        with torch.device("meta"):  # does it make a model?
            build_model(config)
    except Exception as error:  # noqa: BLE001 - a setting may be anything
        raise UserError(f"{file}: {error}") from None
    return settings, config
