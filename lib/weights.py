"""
Find and load trained weights, and know what they were trained on.

Weights are checkpoints of runs, or folders in Hugging Face's layout.
"""
import hashlib
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np

from lib.corpus import Corpus
from lib.files import file_sha256, load_file
from lib.huggingface import FILES, SETTINGS, read_folder, weight_files
from lib.ranks import first_rank
from lib.run import Run, read_state
from lib.settings import UserError
from lib.tokenizer import load_tokenizer, vocab_hash
from model import HEADS, BertConfig, Classifier, build_model


def model_file(model, labels=()):
    """Return the content of model.pt: config, weights, head (of HEADS), a classifier's labels.

    sha256 is of the weights, and tells models apart.
    """
    head = next(head for head, kind in HEADS.items() if type(model) is kind)
    weights = model.state_dict()
    digest = hashlib.sha256()
    if first_rank():  # the others do not write
        for weight in weights.values():
            digest.update(weight.cpu().numpy().reshape(-1))
    saved = {"config": asdict(model.bert.config), "weights": weights, "head": head,
             "sha256": digest.hexdigest()}
    if head == "classifier":
        saved["labels"] = list(labels)
    return saved


def find_weights(path):
    """Find the weights that `path` names. Returns (folder, path of its vocab.txt).

    out/<run>                 its newest checkpoint; if fine-tuned, those of its median seed
    out/<run>/seed1           the weights of its best epoch so far
    out/<run>/step_000500     this checkpoint; out/<run>/seed1/best works, too
    anything else             a folder in Hugging Face layout, or the name of one in data/weights/
    """
    run = median_seed(path)
    for folder in (run.folder, run.folder / "best", run.newest_checkpoint()):
        if folder and (folder / "model.pt").is_file():
            return folder, folder.parent / "vocab.txt"
    for folder in (Path(path), Path("data/weights", path)):
        if weight_files(folder):
            return folder, folder / "vocab.txt"
    raise UserError(f"{path} has no checkpoint, {' or '.join(FILES)}: pretrain.py trains one, "
                    "prepare_data.py weights NAME fetches one of the hub")


def median_seed(path):
    """Return the seed of a fine-tuned run that has the median score, else the run at `path`.

    Where two are in the middle, it is the lower one. UserError if no seed is done.
    """
    run = Run(path)
    seeds = run.seed_runs()
    if run.newest_checkpoint() or not seeds:
        return run
    # settings() is a UserError for another layout
    scores = seed_scores({seed: seed.results() for seed in seeds if seed.settings()})
    if not scores:
        raise UserError(f"{path}: no seed is done: go on with it, or name one: {seeds[0].folder}")
    ranked = sorted(scores, key=scores.get)
    return ranked[(len(ranked) - 1) // 2]


def seed_scores(results):
    """Return the scores that count in a median: {seed: its task's first metric on dev}.

    results: {seed: Run.results()}. A seed that is not done has no score. One whose score is nan is
    left out, unless all are.
    """
    scores = {seed: found[f"eval_{found['metric']}"] for seed, found in results.items() if found}
    numbers = {seed: score for seed, score in scores.items() if not np.isnan(score)}
    return numbers or scores


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
    """Return the SHA-256 of the weights in a folder, or of a Hugging Face folder's files."""
    if (folder / "model.pt").is_file():
        return load_file(folder / "model.pt")["sha256"]
    return "".join(map(file_sha256, weight_files(folder)))


def run_settings(folder):
    """Return the settings of the run that a checkpoint's folder is in. Others have none: {}."""
    return Run(folder.parent).settings() if (folder / "model.pt").is_file() else {}


def trained_on(folder):
    """Return the texts that the weights in a folder were trained on.

    The texts of initial models count. Returns dicts: name, and the SHA-256 of its documents and of
    train.bin, None if they are unknown.
    """
    unknown = {"name": str(folder), "documents": None, "train": None}
    return run_settings(folder).get("trained_on", [unknown])


def open_corpus(name, *paths, seen=False):
    """Open data/<name> for the models of `paths`, which must have its vocabulary.

    UserError if one was trained on the same documents, split otherwise, unless `seen`. Prints a
    line if a model's text is not known, or was another text of this name.
    """
    corpus = Corpus(name)
    own = vocab_hash(load_tokenizer(corpus.folder))
    for path in paths:
        folder, vocab = find_weights(path)
        if vocab_hash(load_tokenizer(vocab)) != own:
            raise UserError(f"{path} was trained with another vocabulary than data/{name}: prepare "
                            f"the corpus with --vocab {vocab}, or leave one of them out")
        for text in trained_on(folder):
            if text["train"] == corpus.text["train"]:
                continue
            if text["documents"] is None:
                print(f"{path}: not known whether it was trained on text of data/{name} "
                      f"({text['name']})")
            elif text["documents"] == corpus.text["documents"]:
                if not seen:
                    raise UserError(f"{path} was trained on the documents of data/{name}, split "
                                    "otherwise: prepare it as before (measure.py --seen measures "
                                    "its training text all the same)")
            elif text["name"] == name:
                print(f"{path} was trained on another text named {name}")
    return corpus


def load_model(path):
    """Load the model that `path` names (see find_weights). It maps a checkpoint's file."""
    saved = read_weights(path)
    weights = saved["weights"]
    model = build_model(saved["config"], saved["head"], saved.get("labels", ()))
    if saved["head"] != "classifier":  # other heads use no pooler, and Hugging Face has none
        pooler = {name: w for name, w in model.state_dict().items() if "pooler" in name}
        weights = pooler | weights
    load_weights(model, weights, path, assign=True)
    return model.float()  # a Hugging Face folder may have float16


def check_objective(path, config, causal):
    """Raise UserError if the model at `path`, whose BertConfig is `config`, is not as expected."""
    if config.causal != causal:
        found, expected = ("masked", "causal") if causal else ("causal", "masked")
        raise UserError(f"{path} is a {found} language model, expected a {expected} one")


def memory_settings(config):
    """Return the settings of a memory in a BertConfig, {name: value}; {} without one."""
    settings = asdict(config) if config and config.memory_layers else {}
    return {name: value for name, value in settings.items() if name not in SETTINGS["bert"]}


def check_sizes(path, initial, config):
    """Raise UserError if a model has another objective or other sizes than the initial one.

    Both are BertConfigs. If both have memories, all settings of these but their places and weights
    must agree, too.
    """
    check_objective(path, initial, config.causal)
    names = ["n_layer", "n_head", "d_model", "d_ff", "max_len", "type_vocab"]
    if config.memory_layers:
        free = ("memory_layers", "alpha", "beta")
        names += [name for name in memory_settings(initial) if name not in free]
    different = [f"{name} = {getattr(initial, name)}, not {getattr(config, name)}"
                 for name in names if getattr(initial, name) != getattr(config, name)]
    if different:
        raise UserError(f"{path} has {'; '.join(different)}: it brings its sizes and its memory's "
                        "along, leave them out (--model= --n_layer=0 ... undo a config file's)")


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
    init_checkpoint (path of the weights), init_sha256 (model_hash), init_memory (see
    memory_settings), first_step (0 if unknown), pooler_trained, trained_on (see trained_on).
    """
    source, _ = find_weights(path)
    saved = read_weights(source)
    config = model.bert.config
    check_sizes(source, saved["config"], config)
    # only Google's next-sentence pretraining and classification train a pooler
    first_step, pooler_trained = 0, any("pooler" in name for name in saved["weights"])
    if (source / "model.pt").is_file():
        settings = run_settings(source)
        pooler_trained = settings["pooler_trained"] or saved["head"] == "classifier"
        if (source / "state.pt").is_file():
            first_step = settings["first_step"] + read_state(source)["step"]
    random = ["head."]
    if reinit_ffn:
        for layer in config.memory_layers:
            random += [f"bert.layers.{layer - 1}.up.", f"bert.layers.{layer - 1}.down."]
    if isinstance(model, Classifier) and not pooler_trained:
        random.append("bert.pooler.")
    own, theirs = model.state_dict().keys(), saved["weights"]
    loaded = {name: w for name, w in theirs.items()
              if name in own and not name.startswith(tuple(random))}
    load_weights(model, loaded, source, strict=False)
    print(f"init_from {source}:")
    dropped = {*saved.get("dropped", ()), *map(module_name, theirs.keys() - own)}
    for what, parts in (("loaded", set(map(module_name, loaded))),
                        ("new", set(map(module_name, own - loaded.keys()))), ("dropped", dropped)):
        print(f"  {what:8} {', '.join(sorted(parts)) or 'nothing'}")
    return {"init_checkpoint": str(source), "init_sha256": model_hash(source),
            "init_memory": memory_settings(saved["config"]),
            "first_step": first_step, "pooler_trained": pooler_trained,
            "trained_on": trained_on(source)}
