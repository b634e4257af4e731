"""
Hugging Face's BERT and DistilBERT: their weights under our names, ours under theirs.

>>> saved = read_folder(Path("data/weights/bert-base-uncased"))   # {"config": ..., "weights": ...}
"""
import re
from dataclasses import asdict

import torch

from lib.errors import UserError
from lib.files import load_file, read_json
from lib.tokenizer import read_vocab
from model import BertConfig, build_model

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
    "LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
SETTINGS = {  # config.json's names for BertConfig's settings
    "bert": {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
             "d_model": "hidden_size", "d_ff": "intermediate_size", "vocab_size": "vocab_size",
             "max_len": "max_position_embeddings", "type_vocab": "type_vocab_size",
             "dropout": "hidden_dropout_prob", "init_std": "initializer_range",
             "causal": "is_decoder"},
    "distilbert": {"n_layer": "n_layers", "n_head": "n_heads", "d_model": "dim",
                   "d_ff": "hidden_dim", "vocab_size": "vocab_size", "dropout": "dropout",
                   "max_len": "max_position_embeddings", "init_std": "initializer_range",
                   "causal": "is_decoder"}}
# an exported memory's settings keep their names
SETTINGS["pkm-bert"] = {name: name for name in asdict(BertConfig())} | SETTINGS["bert"]
# The hidden_act of a model with memory. transformers' own BERT would load the folder and leave the
# memory out. It has no activation of this name, and its error shows the name.
MEMORY_ACT = "gelu (this model has a memory: AutoModelFor..., trust_remote_code=True)"
OUR_KIND = {"hidden_act": "gelu", "activation": "gelu", "layer_norm_eps": 1e-12,
            "position_embedding_type": "absolute", "tie_word_embeddings": True}
MULTI_LABEL = "multi_label_classification"
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
        theirs = their_names(name, head)
        prefix = "bert." if name.startswith("bert.") else ""
        parts = [w] if len(theirs) == 1 else [part.clone() for part in w.chunk(len(theirs))]
        renamed |= {prefix + n: part for n, part in zip(theirs, parts, strict=True)}
    return renamed


def from_huggingface(weights, config, head=None, source="the weights"):
    """Rename the tensors of Hugging Face's BERT or DistilBERT as ours; their prefix is optional.

    Heads and pooler may be missing on either side. UserError with `source` if the encoder has other
    tensors than `config` describes, such as more layers or a memory.
    """
    theirs = {}
    for name, w in weights.items():
        name = re.sub(r"^(distil)?bert\.", "", name)
        for other, bert in BERT_NAMES.items():
            name = name.replace(other, bert)
        theirs[name] = w
    with torch.device("meta"):  # only its names are needed
        ours = build_model(config, head).state_dict()
    renamed, encoder = {}, set()
    for name in ours:
        parts = their_names(name, head)
        if name.startswith("bert.") and "pooler" not in name:
            encoder.update(parts)
        if all(part in theirs for part in parts):
            tensors = [theirs[part] for part in parts]
            renamed[name] = torch.cat(tensors) if len(tensors) > 1 else tensors[0]

    layers = {name for name in theirs if name.startswith("encoder.layer.")}
    wrong = sorted(encoder - theirs.keys()) + sorted(layers - encoder)
    if wrong:
        has = "no" if wrong[0] in encoder else "an unknown"
        raise UserError(f"{source}: it has {has} {wrong[0]}: config.json describes another model")
    return renamed


def read_folder(folder):
    """Read a folder in Hugging Face's layout, theirs or an exported one.

    Returns a dict like a checkpoint's: config, weights under our names, head and a classifier's
    labels. UserError for a damaged folder or another kind of model.
    """
    file = folder / "config.json"
    settings = read_json(file)
    config = read_config(settings, file)
    vocab = folder / "vocab.txt"
    if vocab.is_file() or (folder / "tokenizer.json").is_file():
        tokens = len(read_vocab(vocab))
        if tokens != config.vocab_size:
            raise UserError(f"{vocab}: {tokens:,} tokens do not fit weights for "
                            f"{config.vocab_size:,}")
    weights_file = next(folder / name for name in FILES if (folder / name).is_file())
    weights = load_file(weights_file)
    head = next((head for head, name in HEAD_NAMES.items() if f"{name}.weight" in weights), None)
    saved = {"config": config, "head": head,
             "weights": from_huggingface(weights, config, head, weights_file)}
    if head == "classifier":
        kind = settings.get("architectures") or ["BertForSequenceClassification"]
        problem = settings.get("problem_type")
        if not kind[0].endswith("ForSequenceClassification") or problem == MULTI_LABEL:
            raise UserError(f"{file}: {kind[0]}, {problem}: expected a classifier that gives a "
                            "text one class, or one number")
        names, count = settings.get("id2label", {}), len(saved["weights"]["head.weight"])
        saved["labels"] = []  # of a regression
        if count > 1:
            saved["labels"] = [names.get(str(n), f"LABEL_{n}") for n in range(count)]
    return saved


def read_config(settings, file):
    """Return the BertConfig that the content of a config.json describes."""
    kind = settings.get("model_type", "bert")  # BERT's first folders have none
    if kind not in SETTINGS:
        raise UserError(f"{file}: model_type = {kind!r}: expected bert or distilbert")
    for key, ours in OUR_KIND.items():
        if settings.get(key, ours) not in (ours, MEMORY_ACT):
            raise UserError(f"{file}: {key} = {settings[key]!r}: this BERT has {ours!r}")
    settings = {"is_decoder": False, **settings}
    sizes = {"type_vocab": 0}  # DistilBERT has none
    for name, theirs in SETTINGS[kind].items():
        if theirs not in settings:
            raise UserError(f"{file}: it has no setting {theirs}")
        sizes[name] = settings[theirs]
    return BertConfig(**sizes)
