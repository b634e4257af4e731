"""
Facts about a trained run, read from its folder: steps, corpus, seeds, scores.
"""
import contextlib
from pathlib import Path

from lib.common.errors import UserError
from lib.common.files import load_file, read_json
from lib.training.run import read_settings
from lib.weights.checkpoint import find_weights, numbered, read_weights


def trained_steps(path):
    """Return (steps, seed) of the weights at `path`, for a table. The steps are a text, "4,000 +
    3,000": those of the initial model and the run's own. An unfinished run has "100 of 3,000".
    Weights in Hugging Face layout have "?" for both."""
    checkpoint, _ = find_weights(path)
    if not (checkpoint / "state.pt").is_file():
        return "?", "?"
    settings = read_settings(checkpoint.parent, ["max_steps", "seed"])
    step, last = load_file(checkpoint / "state.pt")["step"], settings["max_steps"]
    steps = f"{step:,} of {last:,}" if step < last else f"{step:,}"
    if settings["init_checkpoint"]:
        before = settings["first_step"]  # 0: the initial model has Hugging Face layout
        steps = f"{before:,} + {steps}" if before else f"? + {steps}"
    return steps, settings["seed"]


def training_text(path):
    """Return (sequence length, corpus) that a model was trained on. Weights in Hugging Face layout
    have (number of positions, None)."""
    folder, _ = find_weights(path)
    if (folder / "model.pt").is_file():
        settings = read_settings(folder.parent, ["seq_len", "dataset"])
        return settings["seq_len"], settings["dataset"]
    return read_weights(path)["config"]["max_len"], None


def check_same_text(paths):
    """Return the corpus of pretrained runs; UserError if they differ in what they predict."""
    first = read_settings(paths[0], ["dataset"])
    for path in paths:
        settings = read_settings(path, ["dataset"])
        if any(settings.get(key, "masked") != first.get(key, "masked")
               for key in ("tokenizer_hash", "dataset", "objective")):
            raise UserError(f"{path} has another vocabulary, corpus or objective than {paths[0]}: "
                            "their perplexities cannot be compared")
    return first["dataset"]


def seed_folders(path):
    """List the folders of a fine-tuned run's seeds. The list is [path] for the folder of one seed,
    and empty for any other run."""
    folders = []
    for folder in (Path(path), *numbered(path, "seed")):
        with contextlib.suppress(UserError):
            if "task" in read_settings(folder):
                folders.append(folder)
    return folders


def is_finished(seed_folder):
    """Whether the fine-tuning of one seed is done."""
    return (seed_folder / "eval_results.json").is_file()


def read_scores(seed_folder):
    """Read the dev scores of a finished seed: {"eval_accuracy": 0.93, ...}."""
    return read_json(seed_folder / "eval_results.json")
