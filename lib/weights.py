"""Load trained weights: checkpoints of runs, and folders in Hugging Face layout."""
import hashlib
import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np

from lib.files import file_sha256, load_file
from lib.huggingface import FILES, read_folder
from lib.ranks import first_rank, get_world_size
from lib.run import Run, numbered, read_state
from lib.settings import ROOT, UserError
from model import HEADS, BertConfig, Classifier, build_model


def model_file(model, labels=()):
    """Return the content of model.pt: config, weights, head (of HEADS), a classifier's labels.

    sha256 is of the weights, and tells models apart.
    """
    head = next(head for head, kind in HEADS.items() if type(model) is kind)
    weights = model.state_dict()
    if get_world_size() > 1:
        from lib import sharding

        weights = sharding.whole_weights(model)
    digest = hashlib.sha256()
    for weight in weights.values() if first_rank() else ():  # the others do not write
        digest.update(weight.cpu().numpy().reshape(-1))
    saved = {"config": asdict(model.bert.config), "weights": weights, "head": head,
             "sha256": digest.hexdigest()}
    if head == "classifier":
        saved["labels"] = list(labels)
    return saved


def find_weights(path):
    """Find the weights that `path` names. Returns (folder, path of its vocab.txt).

    out/<run>                 its newest checkpoint; if fine-tuned, the weights of its first seed
    out/<run>/seed1           the weights of its best epoch so far
    out/<run>/step_000500     this checkpoint; out/<run>/seed1/best works, too
    anything else             a folder in Hugging Face layout, or the name of one in data/weights/
    """
    for run in (Path(path), *numbered(Path(path), "seed{}").values()):
        for folder in (run, run / "best", Run(run).newest_checkpoint()):
            if folder and (folder / "model.pt").is_file():
                return folder, folder.parent / "vocab.txt"
    for folder in (Path(path), Path("data/weights", path)):
        if (folder / "config.json").is_file() and any((folder / name).is_file() for name in FILES):
            return folder, folder / "vocab.txt"
    recipe = f"configs/{Path(path).name}.py"
    way = f"prepare_data.py weights {path}"
    if (ROOT / recipe).is_file():
        way = f"pretrain.py {recipe}"
    raise UserError(f"{path}: no weights there: is the name right? If it is: python {way}")


def median_seed(path):
    """Find the seed of a fine-tuned run whose score on dev is the median. Prints which, to stderr.

    The score is the task's first metric; of two in the middle, the lower one counts. Another path,
    as that of a seed, is returned as it is.
    """
    scores = {}
    for run in Run(path).seeds():
        results = run.results()
        if results:  # it is done
            first = "eval_f1" if "eval_exact_match" in results else next(iter(results))  # SQuAD's
            scores[run.folder] = np.nan_to_num(results[first], nan=-2)  # less than any number
    if not scores:
        return path
    seed = sorted(scores, key=scores.get)[(len(scores) - 1) // 2]
    if len(scores) > 1:
        metric = first.removeprefix("eval_")
        print(f"{seed}: the median of {len(scores)} seeds, {metric} {scores[seed]:.4f}",
              file=sys.stderr)
    return seed


def read_weights(path):
    """Read the weights that `path` names (see find_weights).

    Returns what model_file() does, but the config is a BertConfig, and names are ours.
    """
    folder, _ = find_weights(path)
    if not (folder / "model.pt").is_file():
        return read_folder(folder)
    saved = load_file(folder / "model.pt")
    return {**saved, "config": BertConfig(**saved["config"])}


def model_hash(folder):
    """Return the SHA-256 of the weights in a folder, or of a Hugging Face folder's file."""
    if (folder / "model.pt").is_file():
        saved = load_file(folder / "model.pt")
        return saved.get("sha256") or file_sha256(folder / "model.pt")  # an old run has none
    return next(file_sha256(folder / name) for name in FILES if (folder / name).is_file())


def trained_on(folder):
    """Return the texts that the weights in a folder were trained on.

    The texts of initial models count. Returns dicts: name, and the SHA-256 of its documents and of
    train.bin, None if they are unknown.
    """
    unknown = {"name": str(folder), "documents": None, "train": None}
    return Run(folder.parent).settings().get("trained_on", [unknown])


def load_model(path):
    """Load the model that `path` names (see find_weights). It maps a checkpoint's file."""
    saved = read_weights(path)
    weights = saved["weights"]
    model = build_model(saved["config"], saved["head"], saved.get("labels", ()))
    if saved["head"] != "classifier":  # Hugging Face leaves out a pooler that the head needs not
        pooler = {name: w for name, w in model.state_dict().items() if "pooler" in name}
        weights = pooler | weights
    load_weights(model, weights, path, assign=True)
    return model.float()  # a Hugging Face folder may have float16


def check_objective(path, config, causal):
    """Raise UserError if the model at `path`, whose BertConfig is `config`, is not as expected."""
    if config.causal != causal:
        found, expected = ("masked", "causal") if causal else ("causal", "masked")
        raise UserError(f"{path} is a {found} language model, expected a {expected} one")


def check_sizes(path, initial, config):
    """Raise UserError if a model has other sizes than the initial one. Both are BertConfigs."""
    different = []
    names = ["n_layer", "n_head", "d_model", "d_ff", "max_len", "type_vocab"]
    free = ["vocab_size", "dropout", "init_std", "causal", "memory_layers", "alpha", "beta"]
    if initial.memory_layers and config.memory_layers:  # what is set of a memory stays set
        names += [name for name, default in asdict(BertConfig()).items()
                  if name not in names + free and getattr(initial, name) != default]
    for name in names:
        theirs, own = getattr(initial, name), getattr(config, name)
        if theirs != own:
            different.append(f"{name} = {theirs}, not {own}")
    if different:
        raise UserError(f"{path} has {'; '.join(different)}: it brings its sizes along, leave out "
                        "model, n_layer, n_head, d_model and d_ff (--model= --n_layer=0 ... undo "
                        "a config file's); give a memory's as they are there")


def load_weights(model, weights, source, strict=True, assign=False):
    """Load a state dict as torch does; UserError with `source` for another model's."""
    try:
        model.load_state_dict(weights, strict, assign)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()[:300]
        raise UserError(f"{source} has weights of another model: {reason}") from None


def module_name(name):
    """Return a tensor's module, without the layer: memory, up, LM head, ..."""
    if not name.startswith(("bert.", "head.")):
        return "LM head"
    return re.sub(r"bert\.|layers\.\d+\.", "", name).split(".")[0]


def init_from(model, path, reinit_ffn=False):
    """Start from the trained model at `path` (see find_weights; section 4.1 of the paper).

    Prints what was loaded, what is new, and what was dropped. A task's head keeps its random
    weights; with reinit_ffn (ResM'), memory layers' FFNs do, too. An untrained pooler is not
    copied into a Classifier: all seeds would share it. Returns the origin that the run keeps:
    init_checkpoint (path of the weights), init_sha256 (model_hash), first_step (0 if unknown),
    pooler_trained, trained_on (see trained_on).
    """
    source, _ = find_weights(path)
    saved = read_weights(source)
    config = model.bert.config
    check_objective(source, saved["config"], config.causal)
    check_sizes(source, saved["config"], config)
    # only Google's next-sentence pretraining and classification train a pooler
    first_step, pooler_trained = 0, any("pooler" in name for name in saved["weights"])
    if (source / "model.pt").is_file():
        settings = Run(source.parent).settings()
        pooler_trained = settings["pooler_trained"] or saved["head"] == "classifier"
        if (source / "state.pt").is_file():
            first_step = settings["first_step"] + read_state(source)["step"]
    random = ["head."]
    if reinit_ffn:
        for layer in config.memory_layers:
            random += [f"bert.layers.{layer - 1}.up.", f"bert.layers.{layer - 1}.down."]
    if isinstance(model, Classifier) and not pooler_trained:
        random.append("bert.pooler.")
    own, theirs = dict(model.named_parameters()), saved["weights"]
    loaded = {name: w for name, w in theirs.items()
              if name in model.state_dict() and not name.startswith(tuple(random))}
    load_weights(model, loaded, source, strict=False)
    print(f"init_from {source}:")
    sizes = {name: w.numel() for name, w in (theirs | own).items()}
    groups = {"loaded": own.keys() & loaded.keys(), "new": own.keys() - loaded.keys(),
              "dropped": theirs.keys() - model.state_dict().keys()}
    for what, names in groups.items():
        parts = Counter(saved.get("dropped", {}) if what == "dropped" else ())
        for name in names:
            parts[module_name(name)] += sizes[name]
        print(f"  {what:8} {parts.total():13,d} parameters  {', '.join(sorted(parts))}")

    return {"init_checkpoint": str(source), "init_sha256": model_hash(source),
            "first_step": first_step, "pooler_trained": pooler_trained,
            "trained_on": trained_on(source)}
