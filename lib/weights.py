"""
Save and load trained weights: checkpoints of runs, and folders in Hugging Face layout.

>>> model = load_model("out/demo")                  # its newest checkpoint; see find_weights
"""
import collections
import re
from dataclasses import asdict
from pathlib import Path

import torch

from lib.distributed import mark_weights
from lib.download import PRETRAINED, unknown_weights
from lib.errors import UserError
from lib.files import load_file
from lib.huggingface import FILES, is_state_dict, read_folder
from lib.run import Run, read_state
from lib.tokenizer import full_tokenizer
from model import HEADS, BertConfig, Classifier, build_model


def model_file(model, labels=()):
    """Return the content of model.pt: a dict of config, weights and head (a key of model.HEADS). A
    classifier also has the `labels` of its classes, which are none for a regression."""
    head = next(head for head, kind in HEADS.items() if type(model) is kind)
    saved = {"config": asdict(model.bert.config), "weights": mark_weights(model), "head": head}
    return saved | {"labels": list(labels)} if head == "classifier" else saved


def find_weights(path):
    """Find the weights that `path` names. Returns (folder, path of its vocab.txt).

    out/<run>                 its newest checkpoint; if fine-tuned, the weights of its first seed
    out/<run>/seed1           the weights of its best epoch so far
    out/<run>/step_000500     this checkpoint; out/<run>/seed1/best works, too
    anything else             a folder in Hugging Face layout, or the name of one in data/weights/
    """
    if weights := Run(path).weights_folder():
        return weights, weights.parent / "vocab.txt"
    for folder in (Path(path), Path("data/weights", path)):
        if (folder / "config.json").is_file() and any((folder / name).is_file() for name in FILES):
            return folder, folder / "vocab.txt"
    if str(path) in PRETRAINED:
        raise UserError(f"{path}: not there yet: python prepare_data.py weights {path}")
    raise unknown_weights(str(path))


def read_weights(path):
    """Read the weights that `path` names (see find_weights). Returns what model_file() does, but
    the config is a BertConfig. A Hugging Face folder gives the weights that it has, under our
    names."""
    folder, _ = find_weights(path)
    if not (folder / "model.pt").is_file():
        return read_folder(folder)
    saved = load_file(folder / "model.pt", mmap=True)
    saved |= {"config": BertConfig(**saved["config"])}
    check_model_file(saved, folder / "model.pt")
    return saved


def check_model_file(saved, file):
    """Raise UserError unless `saved` is what model_file() returns for its config. It needs a head
    that exists, labels that are texts, and all weights of this model and no others."""
    head, labels, weights = saved.get("head"), saved.get("labels", []), saved["weights"]
    if not (head is None or isinstance(head, str)) or head not in HEADS:
        raise UserError(f"{file}: head = {head!r}: expected classifier, span or none")
    if not (isinstance(labels, list) and all(isinstance(label, str) for label in labels)):
        raise UserError(f"{file}: labels = {labels!r}: expected a list of texts")
    if not is_state_dict(weights):
        raise UserError(f"{file}: its weights are no dict of names and tensors")
    with torch.device("meta"):  # needs no memory
        expected = build_model(saved["config"], head, labels).state_dict()
    if wrong := sorted(expected.keys() ^ weights.keys()):
        has = "no" if wrong[0] in expected else "an unknown"
        raise UserError(f"{file}: it has {has} {wrong[0]}: its config is another model's")
    for name in expected.keys() - {"head.weight", "head.bias"}:  # their size is not in the config
        found, w = weights[name], expected[name]
        if found.shape != w.shape or found.is_floating_point() != w.is_floating_point():
            raise UserError(f"{file}: {name} has shape {tuple(found.shape)} and {found.dtype}: its "
                            f"config describes {tuple(w.shape)}")


def load_model(path):
    """Load the LanguageModel, Classifier or SpanReader that `path` names (see find_weights). The model
    maps a checkpoint's file, without a second copy in memory. Changing the model does not change
    the file."""
    folder, _ = find_weights(path)
    saved = read_weights(folder)
    head, weights = saved.get("head"), saved["weights"]
    if not head and "bert.words.weight" in weights and "bias" not in weights:
        raise UserError(f"{path}: an encoder without a masked-LM head, which cannot predict words: "
                        "fine-tune it, or pretrain with --init_from, which makes a random head")
    model = build_model(saved["config"], head, saved.get("labels", ()))
    # Hugging Face leaves the pooler out if the head does not need it
    spare = {name: w for name, w in model.state_dict().items()
             if "pooler" in name and head != "classifier"}
    load_weights(model, spare | weights, path, assign=(folder / "model.pt").is_file())
    return model


def load_run(path):
    """Load the model that `path` names (see find_weights), in evaluation mode, and its tokenizer.
    Returns (model, tokenizers.Tokenizer). The tokenizer adds [CLS] and [SEP] and pads a batch."""
    return load_model(path).eval(), full_tokenizer(find_weights(path)[1])


def check_objective(path, config, causal):
    """Raise UserError if the model at `path`, whose BertConfig is `config`, is not as expected."""
    if config.causal != causal:
        found, expected = ("masked", "causal") if causal else ("causal", "masked")
        raise UserError(f"{path} is a {found} language model, expected a {expected} one")


def load_weights(model, weights, source, partial=False, assign=False):
    """Copy a state dict into the model. Returns the names that were copied. Names and shapes must
    be the model's; with `partial` some may be missing, or unknown. With `assign` the model takes
    the tensors themselves. Error messages name `source`."""
    expected = {name: w.shape for name, w in model.state_dict().items()}
    shared = expected.keys() & weights.keys()
    for name in sorted(shared):
        if expected[name] != weights[name].shape:
            raise UserError(f"{source}: {name} has shape {tuple(weights[name].shape)}, here it is "
                            f"{tuple(expected[name])}: use the sizes that these weights were "
                            "trained with")
    if not partial and expected.keys() != weights.keys():
        name = min(expected.keys() ^ weights.keys())
        has = "no" if name in expected else "an unknown"
        raise UserError(f"{source}: it has {has} {name}: this is another kind of model")
    model.load_state_dict(weights, strict=False, assign=assign)
    for name, w in model.state_dict().items():
        if name in shared and not w.sum(dtype=torch.float32).isfinite():  # needs no copy of w
            raise UserError(f"{source}: {name} has numbers that are not finite: use an older "
                            "checkpoint")
    return shared


def init_from(model, path, reinit_ffn=False):
    """Start from the trained model at `path` (see find_weights; section 4.1 of the paper).

    Copies what fits, and prints what was loaded, left random or dropped. A task's head stays
    random; with reinit_ffn (ResM') the FFN of memory layers does, too. A pooler that was never
    trained is not copied into a Classifier, or all seeds would share it. Returns the origin that
    the run keeps: init_checkpoint (path of the weights), first_step (steps that they were trained,
    0 if unknown) and pooler_trained (bool).
    """
    source, _ = find_weights(path)
    saved = read_weights(source)
    check_objective(source, saved["config"], model.bert.config.causal)
    heads, own = saved["config"].n_head, model.bert.config.n_head
    if heads != own:  # their weights have the same shapes
        raise UserError(f"{source} has n_head = {heads}, this model {own}: give --n_head={heads}")
    pooler_trained, first_step = pooler_is_trained(source, saved), 0
    random = {("task head", None)}
    random |= {("FFN", n) for n in model.bert.config.memory_layers if reinit_ffn}
    if isinstance(model, Classifier) and not pooler_trained:
        random.add(("pooler", None))
    chosen = {name: w for name, w in saved["weights"].items() if _group(name) not in random}
    loaded = load_weights(model, chosen, source, partial=True)
    print(f"init_from {source}:")
    _print_loaded(model, saved["weights"], loaded)
    if (source / "state.pt").is_file():
        settings, steps = Run(source.parent).settings(), read_state(source)["step"]
        first_step = settings.get("first_step", 0) + steps
        if steps < settings.get("max_steps", 0):
            print(f"warning: {source} is of an unfinished run: {steps:,} of "
                  f"{settings['max_steps']:,} steps")
    return {"init_checkpoint": str(source), "first_step": first_step,
            "pooler_trained": pooler_trained}


def _print_loaded(model, weights, loaded):
    """Print how many parameters were loaded, left random or dropped, by part of the model."""
    groups = collections.defaultdict(collections.Counter)  # {(status, part): {layer: size}}
    dropped = {name: weights[name] for name in sorted(weights.keys() - model.state_dict().keys())}
    for name, w in (dict(model.named_parameters()) | dropped).items():
        status = "loaded" if name in loaded else "dropped" if name in dropped else "left random"
        part, layer = _group(name)
        groups[status, part][layer] += w.numel()
    for (status, part), sizes in groups.items():
        where = "" if None in sizes else f"  layers {', '.join(map(str, sorted(sizes)))}"
        print(f"  {status:12} {part:16} {sizes.total():13,d} parameters{where}")


def pooler_is_trained(folder, saved):
    """Return whether the pooler of `saved`, the weights in `folder`, was ever trained. Only
    Google's next-sentence pretraining and classification train it. At its start a run saves in
    config.json whether its pooler was trained."""
    if (folder / "model.pt").is_file() and saved.get("head") != "classifier":
        return Run(folder.parent).settings().get("pooler_trained", False)
    return any("pooler" in name for name in saved["weights"])


def _group(name):
    """Return a parameter's part of the model, and its layer, from 1."""
    layer = re.match(r"bert\.layers\.(\d+)\.(\w+)", name)
    if not layer:
        return ("pooler" if "pooler" in name else "embeddings" if name.startswith("bert.")
                else "task head" if name.startswith("head.") else "MLM head"), None
    part = {"memory": "memory", "up": "FFN", "down": "FFN"}.get(layer[2], "attention, norms")
    return part, int(layer[1]) + 1
