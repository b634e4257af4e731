"""
Trained weights on disk: the checkpoints of a run, and what else a run can start from.

out/<run>/step_000500/{model,optimizer,state}.pt    a checkpoint: whole or absent
>>> model = load_model("out/demo")                  # its newest one; see find_weights
"""
import copy
import json
import re
from dataclasses import asdict
from pathlib import Path

import torch

import huggingface
import ranks
from common import PRETRAINED, Failure, UserError, atomic, discard, load_file, unknown_weights
from model import HEADS, BertConfig, Classifier, build_model


def model_file(model, labels=()):
    """What a model.pt holds: config and weights; unless it is a MaskedLM also its `head`, and of a
    Classifier the `labels` of its classes (none for a regression)."""
    saved = {"config": asdict(model.bert.config),
             "weights": ranks.mark_weights(model, model.state_dict())}
    if head := next(head for head, kind in HEADS.items() if type(model) is kind):
        saved |= {"head": head} | ({"labels": list(labels)} if head == "classifier" else {})
    return saved


def save_checkpoint(run, model, dense, values, state, keep=2, labels=()):
    """Write out/<run>/step_<step>/{model,optimizer,state}.pt, the folder whole or not at all, then
    drop all but the `keep` newest. dense, values: the two optimizers; state: a dict of plain
    Python, with `step`; labels: see model_file."""
    folder = Path(run) / f"step_{state['step']:06d}"
    moments = values.state_dict()
    files = {"model": model_file(model, labels),
             "optimizer": {"dense": dense.state_dict(), "values": ranks.mark_moments(moments)},
             "state": state}
    save_files(folder, files)
    for old in checkpoints(run)[:-keep]:
        discard(old)
    return folder


def save_files(folder, files):
    """Write {name: content} as <folder>/<name>.pt, the folder whole or not at all."""
    try:
        with atomic(folder) as temporary:
            temporary.mkdir()
            for name, content in files.items():
                ranks.save(content, temporary / f"{name}.pt")
        ranks.agree()  # it is there for all
    except RuntimeError as error:  # how torch.save reports a failed write
        if ranks.lost(error):
            raise
        reason = str(error).splitlines()[0]
        raise Failure(f"{folder}: not saved, is the disk full? ({reason}); older "
                      "checkpoints are untouched") from None


def numbered(folder, prefix):
    """The paths <folder>/<prefix><number>, the lowest number first."""
    numbers = {path: path.name.removeprefix(prefix) for path in Path(folder).glob(f"{prefix}*")}
    return sorted((path for path, number in numbers.items()
                   if re.fullmatch(r"\d+(\.\d+)?", number)), key=lambda path: float(numbers[path]))


def checkpoints(run):
    """The run's whole checkpoints, oldest first."""
    return numbered(run, "step_")


def find_checkpoint(path):
    """`path` itself if it is a checkpoint, the newest one of it if it is a run, else None."""
    if (Path(path) / "model.pt").is_file():
        return Path(path)
    return next(reversed(checkpoints(path)), None)


def find_weights(path):
    """Where the weights of `path` are, for whatever reads weights:

    out/<run>                 of pretraining: its newest checkpoint
    out/<run>/seed1           of fine-tuning: the weights of its best epoch so far
    out/<run>                 of fine-tuning: those of its first seed
    out/<run>/step_000500     itself; so is out/<run>/seed1/best
    anything else             a folder in Hugging Face layout, or the name of one in data/weights/

    Returns (folder, its vocab.txt); UserError where there is nothing."""
    for run in (Path(path), *numbered(path, "seed")):
        best = [run / "best", *numbered(run, "best_epoch_")]  # a finished run has best/ alone
        whole = [folder for folder in best if (folder / "model.pt").is_file()]
        if folder := whole[-1] if whole else find_checkpoint(run):
            return folder, folder.parent / "vocab.txt"
    for folder in (Path(path), Path("data/weights", path)):
        files = [folder / name for name in huggingface.FILES]
        if (folder / "config.json").is_file() and any(file.is_file() for file in files):
            return folder, folder / "vocab.txt"
    if str(path) in PRETRAINED:
        raise UserError(f"{path}: not there yet: python prepare_data.py weights {path}")
    raise unknown_weights(str(path))


def read_weights(path):
    """What find_weights finds: a dict of config (BertConfig's settings), weights (under our names,
    of a Hugging Face folder those that it has), and maybe head and labels, as save_checkpoint
    writes it."""
    folder, _ = find_weights(path)
    if (folder / "model.pt").is_file():
        return load_file(folder / "model.pt", mmap=True)
    return huggingface.read_folder(folder)


def load_model(path):
    """The MaskedLM, Classifier or SpanReader of `path` (see find_weights). Outside torchrun it
    maps a checkpoint's file, and has no second copy in memory; writing to the model does not change
    the file."""
    folder, _ = find_weights(path)
    saved = read_weights(folder)
    weights = saved["weights"]
    if "head" not in saved and "bert.words.weight" in weights and "bias" not in weights:
        raise UserError(f"{path}: an encoder without a masked-LM head, which cannot predict words: "
                        "fine-tune it, or pretrain with --init_from, which makes a random head")
    model = build_model(BertConfig(**saved["config"]), saved.get("head"), saved.get("labels", ()))
    # Hugging Face leaves the pooler out where the head has no use for it
    spare = {} if isinstance(model, Classifier) else {
        name: w for name, w in model.state_dict().items() if name.startswith("bert.pooler.")}
    mapped = (folder / "model.pt").is_file() and not ranks.started()  # a rank copies its columns
    load_weights(model, spare | weights, path, assign=mapped)
    return model


def load_run(path):
    """The model of `path` (see find_weights) in evaluation mode, and its tokenizer, which adds
    [CLS] and [SEP] and pads a batch: (model, tokenizers.Tokenizer)."""
    return load_model(path).eval(), huggingface.full_tokenizer(find_weights(path)[1])


def check_objective(path, config, causal):
    """UserError unless the settings of a model, that of `path`, make it a causal language model, or
    a masked one, as expected."""
    if config.get("causal", False) != causal:
        found, expected = ("masked", "causal") if causal else ("causal", "masked")
        raise UserError(f"{path} is a {found} language model, expected a {expected} one")


def load_optimizers(checkpoint, model, dense, values):
    """The other half of save_checkpoint: the moments of both optimizers. Returns the state."""
    saved = load_file(Path(checkpoint) / "optimizer.pt", mmap=True)
    if "param_groups" not in saved["values"]:  # an older version's {layer: moments}
        moments = [{"step": old["steps"], "exp_avg": old["exp_avg"],
                    "exp_avg_sq": old["exp_avg_sq"]} for old in saved["values"].values()]
        saved["values"] = {**values.state_dict(), "state": dict(enumerate(moments))}
    if len(saved["dense"]["param_groups"][0]["params"]) > len(dense.param_groups[0]["params"]):
        decay_memory(model, dense)
    try:
        dense.load_state_dict(copy.deepcopy(saved["dense"]))  # not mapped from the file
        if ranks.started():  # columns, which are copies already
            torch.optim.Optimizer.load_state_dict(values, ranks.cut_moments(saved["values"]))
        else:
            values.load_state_dict(saved["values"])
    except ValueError as error:
        raise UserError(f"{checkpoint}/optimizer.pt: of another model than model.pt beside it "
                        f"({error})") from None
    return load_file(Path(checkpoint) / "state.pt")


def decay_memory(model, dense):
    """Group the parameters as an older version did, with weight decay on a memory's matrices: a run
    that began with it goes on with it, and its moments lie in that order."""
    mine = {id(p) for group in dense.param_groups for p in group["params"]}
    ordered = [p for p in model.parameters() if id(p) in mine]
    dense.param_groups[0]["params"] = [p for p in ordered if p.dim() > 1]
    dense.param_groups[1]["params"] = [p for p in ordered if p.dim() <= 1]
    print("this run began with weight decay on the memory's query and sub-keys, and keeps it")


def load_weights(model, weights, source, partial=False, assign=False):
    """Copy a state dict into the model, or with `assign` let the model have its tensors. Each must
    be there in the model's shape; with `partial` it may lack some, or bring more. Returns the
    names that were copied."""
    expected, weights = model.state_dict(), ranks.cut_weights(model, weights)
    for name in sorted(expected.keys() & weights.keys()):
        if expected[name].shape != weights[name].shape:
            raise UserError(f"{source}: {name} has shape {tuple(weights[name].shape)}, here it is "
                            f"{tuple(expected[name].shape)}: take the sizes of its training")
    if not partial and expected.keys() != weights.keys():
        name = min(expected.keys() ^ weights.keys())
        has = "no" if name in expected else "an unknown"
        raise UserError(f"{source}: it has {has} {name}: this is another kind of model")
    model.load_state_dict(weights, strict=False, assign=assign)
    return expected.keys() & weights.keys()


def init_from(model, path, reinit_ffn=False):
    """Start from the trained model at `path` (see find_weights; section 4.1): copy what fits, and
    print what was loaded, left random or dropped. With reinit_ffn (ResM') the FFN of memory layers
    stays random; a task's head always does, and a Classifier's pooler where `path` has one that
    was never trained."""
    source, _ = find_weights(path)
    saved = read_weights(source)
    check_objective(path, saved["config"], model.bert.config.causal)
    weights = saved["weights"]
    random = {("FFN", n) for n in model.bert.config.memory_layers if reinit_ffn}
    random.add(("task head", None))
    if isinstance(model, Classifier) and not pooler_is_trained(source, saved):
        random.add(("pooler", None))  # or all seeds would share one
    loaded = load_weights(model, {name: w for name, w in weights.items()
                                  if _group(name) not in random}, path, partial=True)
    parameters, groups = ranks.parameter_sizes(model), {}
    sizes = {name: w.numel() for name, w in weights.items()} | parameters
    for name in [*parameters, *sorted(weights.keys() - model.state_dict().keys())]:
        status = ("loaded" if name in loaded else "left random" if name in parameters
                  else "dropped")
        part, layer = _group(name)
        groups.setdefault((status, part), []).append((layer, sizes[name]))
    print(f"init_from {source}:")
    for (status, part), members in groups.items():
        layers = sorted({layer for layer, _ in members if layer})
        where = f"  layers {', '.join(map(str, layers))}" if layers else ""
        why = " (was not trained there)" if (status, part) == ("left random", "pooler") else ""
        print(f"  {status:12} {part:16} {sum(n for _, n in members):13,d} parameters{where}{why}")


def pooler_is_trained(folder, saved):
    """Whether the pooler of `saved`, the weights in `folder`, was ever trained: Google's was (next
    sentence prediction), so was a Classifier's; all other training leaves it as it found it."""
    while (folder / "model.pt").is_file():
        if saved.get("head") == "classifier":
            return True
        try:
            origin = json.loads((folder.parent / "config.json").read_text())["init_checkpoint"]
        except (OSError, ValueError, KeyError):
            return False  # where its run started is not known
        folder = Path(origin)
        if not any((folder / name).is_file() for name in ("model.pt", "config.json")):
            return folder.name != "" and not folder.name.startswith("step_")  # or it is gone
        saved = read_weights(folder)
    return any("pooler" in name for name in saved["weights"])


def _group(name):
    """The part of the model that a parameter belongs to, and its layer, counted from 1."""
    layer = re.match(r"bert\.layers\.(\d+)\.(\w+)", name)
    if not layer:
        return ("pooler" if "pooler" in name else "embeddings" if name.startswith("bert.")
                else "task head" if name.startswith("head.") else "MLM head"), None
    part = {"memory": "memory", "up": "FFN", "down": "FFN"}.get(layer[2], "attention, norms")
    return part, int(layer[1]) + 1


