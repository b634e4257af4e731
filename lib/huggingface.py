"""
Hugging Face's BERT and DistilBERT: their weights under our names, ours under theirs.

>>> saved = read_folder(Path("data/weights/bert-base-uncased"))   # {"config": ..., "weights": ...}
"""
import itertools
import re
from dataclasses import asdict

import torch

from lib.download import unknown_weights
from lib.errors import UserError
from lib.files import load_file, read_json
from lib.tokenizer import read_vocab
from model import BertConfig, build_model

FILES = ("model.safetensors", "pytorch_model.bin")
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
    Tensors that only one side has are left out: our pooler where theirs has none, their tied
    decoder, BERT's head for next-sentence prediction. UserError with `source` if a layer has a
    tensor of theirs that we do not have, such as a memory's."""
    theirs = {}
    for name, w in weights.items():
        name = re.sub(r"^(distil)?bert\.", "", name)
        for other, bert in BERT_NAMES.items():
            name = name.replace(other, bert)
        theirs[name] = w
    with torch.device("meta"):  # only its names are needed
        ours = build_model(config, head).state_dict()
    names = {name: their_names(name, head) for name in ours}
    unknown = theirs.keys() - set(itertools.chain.from_iterable(names.values()))
    if unknown := sorted(name for name in unknown if name.startswith("encoder.layer.")):
        raise UserError(f"{source}: {unknown[0]} is no part of the model that config.json "
                        "describes")
    found = {name: parts for name, parts in names.items() if all(n in theirs for n in parts)}
    for name, parts in found.items():
        expected = ours[name].chunk(len(parts))[0] if len(parts) > 1 else ours[name]
        for n in parts if name.startswith("bert.") else ():
            w = theirs[n]
            if w.shape != expected.shape or w.is_floating_point() != expected.is_floating_point():
                raise UserError(f"{source}: {n} has shape {tuple(w.shape)} and {w.dtype}: "
                                f"config.json describes {tuple(expected.shape)}")
    return {name: torch.cat([theirs[n] for n in parts]) if len(parts) > 1 else theirs[parts[0]]
            for name, parts in found.items()}


def read_folder(folder):
    """Read a folder in Hugging Face's layout, theirs or an exported one.

    Returns a dict like a checkpoint's: config, weights under our names, and if the model has one,
    its head and a classifier's labels. UserError for a damaged folder or another kind of model.
    """
    settings, config = read_config(folder / "config.json")
    file = next(folder / name for name in FILES if (folder / name).is_file())
    weights = load_file(file, hint="fetch it again")
    if not is_state_dict(weights):
        raise UserError(f"{file}: no state dict: expected names and tensors")
    head = next((head for head, name in HEAD_NAMES.items() if f"{name}.weight" in weights), None)
    vocab = folder / "vocab.txt"
    if vocab.is_file() or (folder / "tokenizer.json").is_file():
        tokens, expected = len(read_vocab(vocab)), config.vocab_size
        if tokens != expected:
            raise UserError(f"{vocab}: {tokens:,} tokens do not fit weights for {expected:,}")
    saved = {"config": config, "weights": from_huggingface(weights, config, head, file)}
    if head:
        saved["head"] = head
    if head == "classifier":
        count, names = len(saved["weights"]["head.weight"]), settings.get("id2label") or {}
        check_classifier(folder, settings, count)
        if not isinstance(names, dict) or not all(isinstance(x, str) for x in names.values()):
            raise UserError(f"{folder}/config.json: id2label: expected the names of classes")
        saved["labels"] = [names.get(str(n), f"LABEL_{n}") for n in range(count) if count > 1]
    return saved


def check_classifier(folder, settings, outputs):
    """Raise UserError unless a classifier gives a text one class, or one number."""
    kinds, problem = settings.get("architectures") or [], settings.get("problem_type")
    for kind in map(str, kinds if isinstance(kinds, list) else [kinds]):
        if not kind.endswith("ForSequenceClassification"):  # of tokens, or of several choices
            raise UserError(f"{folder}: {kind}: expected a BertForSequenceClassification")
    if problem == "multi_label_classification" or (problem == "regression" and outputs > 1):
        raise UserError(f"{folder}: problem_type = {problem!r} with {outputs} outputs: expected "
                        "one class of a text, or one number")


def is_state_dict(content):
    """Tell whether this is a dict of names and ordinary tensors, none of them sparse."""
    return isinstance(content, dict) and all(
        isinstance(name, str) and torch.is_tensor(w) and w.layout == torch.strided
        for name, w in content.items())


def read_config(file):
    """Read a config.json: its content, and the BertConfig that it describes."""
    settings = read_json(file)
    kind = str(settings.get("model_type", "bert"))  # BERT's first folders have none
    if "roberta" in kind:
        raise unknown_weights(f"{file.parent}: {kind}")
    if kind not in SETTINGS:
        raise UserError(f"{file}: model_type = {kind!r}: expected bert or distilbert")
    names = SETTINGS[kind]
    unnamed = {name: value for name, value in asdict(BertConfig(type_vocab=0)).items()
               if name not in names}
    known = {name: settings[name] for name in names.values() if name in settings}
    ours = {name: known[theirs] for name, theirs in names.items() if theirs in known}
    config = BertConfig(**(unnamed | ours))
    for key, ours in (("hidden_act", "gelu"), ("activation", "gelu"), ("layer_norm_eps", 1e-12),
                      ("position_embedding_type", "absolute"), ("tie_word_embeddings", True)):
        if settings.get(key, ours) not in (ours, MEMORY_ACT):
            raise UserError(f"{file}: {key} = {settings[key]!r}: this BERT has {ours!r}")
    return settings, config
