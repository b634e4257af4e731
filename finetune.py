"""
Fine-tune a pretrained model on GLUE, SQuAD 1.1 or a task of your own.

$ python finetune.py configs/demo_finetune.py         # after configs/demo.py; minutes, no network
$ python finetune.py configs/finetune_glue.py --task=SST-2 --init_from=out/base_resm_init --seeds=5
$ python finetune.py configs/finetune_squad.py --init_from=out/base_resm_init
$ torchrun --standalone --nproc_per_node=4 finetune.py CONFIG --accumulation=4

A task of your own is a folder: --task=FOLDER. Its train.tsv and dev.tsv begin with a header. Texts
are in the column `sentence`, or in `sentence1` and `sentence2`. The target is `label` (a class) or
`score` (a number). --key=value overrides a setting below. The same command goes on where a stopped
run left off.

out/<run>/seed0/                 config.json, log.jsonl, vocab.txt and step_000500/ as in a run of
                                 pretrain.py; only the newest checkpoint stays
out/<run>/seed0/best_epoch_2/    the best epoch's weights; renamed best/ at the end
out/<run>/seed0/{eval_results.json,predictions_dev.tsv,submission/} of the weights in best/
out/<run>/eval_results.json      the medians over the seeds, and the scores of each seed
"""
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lib import weights as checkpoint
from lib.device import use_device
from lib.distributed import (
    any_signalled,
    first_rank_first,
    max_over_ranks,
    my_micro_batches,
    run_ranks,
)
from lib.download import file_sha256
from lib.errors import UserError, need
from lib.files import lock
from lib.predict import score_dev, write_dev_predictions, write_submissions
from lib.run import Run, recipe_differences
from lib.settings import load_settings
from lib.tasks import TaskData, TrainingBatches, find_task
from lib.tokenizer import text_tokenizer
from lib.training import State, Trainer, catch_signals, status_after
from model import build_model, value_tables


@dataclass
class Config:
    # the defaults are Table 3's for GLUE
    out: str = ""  # its folder; empty: out/<init_from>_<task>
    init_from: str = ""  # a run, a Hugging Face folder, or a name: bert-base-uncased
    task: str = ""  # of GLUE (sst2, ...), squad, docs, or a folder
    seed: int = 0  # for the head's weights, data order and dropout
    seeds: int = 1  # how many; the median is reported
    update_memory: bool = True  # False: the value tables are frozen (Table 5)
    # data
    max_len: int = 128  # tokens of an example or a window
    doc_stride: int = 128  # tokens from one of SQuAD's windows to the next
    train_examples: int = 0  # examples or windows to train on; 0: all
    # optimization: AdamW; linear warm-up, then linear decay to 0
    batch_size: int = 32  # examples per step; Table 3 has none (our reading)
    accumulation: int = 1  # parts of a batch; a multiple of the ranks
    epochs: int = 10  # passes over the training examples
    max_steps: int = 0  # 0: as many as the epochs take
    warmup: float = 0.06  # share of the steps
    lr: float = 2e-5  # highest learning rate
    keys_lr: float = 1.0  # rate of the memory's sub-keys, as a factor of lr
    value_lr: float = 1e-3  # rate of the value tables, constant (our reading)
    weight_decay: float = 0.1  # biases, norms and memories have none
    grad_clip: float = 1.0  # largest norm of all gradients except the value tables'
    dropout: float = 0.1  # in embeddings, attention, FFN and the pooled [CLS]
    # watching
    log_interval: int = 100  # steps between log records
    checkpoint_interval: int = 1000  # and after each epoch
    tensorboard: bool = False  # curves: tensorboard --logdir out
    # machine
    device: str = "auto"  # auto, cuda, mps or cpu
    dtype: str = "auto"  # of matrix products: auto, float32, bfloat16 or float16
    compile: str = "auto"  # on, off, or auto: on CUDA

    # what may be another when a run goes on
    MAY_CHANGE = ("out", "seeds", "log_interval", "checkpoint_interval", "tensorboard", "device",
                  "compile")

    @property
    def warmup_steps(self):
        return round(self.warmup * self.max_steps)


def train_epochs(trainer, run, state, data, signals):
    """Train to the end, and score the dev splits after each epoch.

    The weights of the best epoch so far are on disk before a checkpoint names it.
    """
    config, batches, task = trainer.config, trainer.batches, data.task
    metric = task.metrics[0]

    def due(step):
        if step % batches.steps_per_epoch == 0 or step == config.max_steps:
            return {"log", "evaluate", "save"}
        every = {"log": config.log_interval, "save": config.checkpoint_interval}
        return {what for what, n in every.items() if step % n == 0}

    def score_epoch(step):
        epoch = batches.epochs(step)
        results = score_dev(trainer.model, data, config.batch_size, trainer.dtype)
        state.last = {"epoch": epoch, **results}
        run.log({"step": step, **state.last})
        print(f"epoch {epoch:g}: {in_percent(task, results)}", flush=True)
        best = state.best[metric] if state.best else np.nan
        if np.isnan(best) or results[metric] > best:
            state.best = state.last
            run.save_best(checkpoint.model_file(trainer.model, task.labels))

    trainer.train(run, state, due, score_epoch, signals)


def in_percent(task, results, prefix=""):
    """Show the metrics of the dev splits in percent."""
    return ", ".join(f"{metric}{suffix} {task.scale * results[prefix + metric + suffix]:.2f}"
                     for suffix in task.dev for metric in task.metrics)


def fine_tune(config, run, data, sizes, initial, vocab, signals):
    """Fine-tune with one seed, or resume. Afterwards `run` has results, unless a signal stopped it.

    sizes: the BertConfig of the weights `initial`; vocab: the path of their vocab.txt.
    """
    known = identify_data(data.task)
    if settings := run.settings():
        run.check_settings(config, known)
        check_seeds(run, settings)
    if run.results():
        print(f"{run.folder} is done: --out=out/NAME starts anew")
        return
    torch.compiler.reset()  # torch limits recompilations; those of earlier seeds would count
    torch.manual_seed(config.seed)  # of the head
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    task = data.task
    model = build_model(sizes, "span" if task.reads_spans else "classifier", task.labels)
    for values in value_tables(model).values():
        values.weight.requires_grad_(config.update_memory)
    newest = run.newest_checkpoint()
    if newest:
        checkpoint.load_weights(model, checkpoint.read_weights(newest)["weights"], newest)
        origin = settings
    else:
        origin = checkpoint.init_from(model, initial)
        check_seeds(run, {**origin, **asdict(config), "data": known})
    batches = TrainingBatches(data.train, config)
    trainer = Trainer(config, model, batches, device, dtype, labels=task.labels)
    state = trainer.restore(newest) if newest else State()
    run.start(config, vocab, origin, known, state.step)
    train_epochs(trainer, run, state, data, signals)
    if any_signalled(signals):
        return
    best = checkpoint.load_model(run.folder / "best").to(device)
    write_dev_predictions(run.folder, best, data, config.batch_size, dtype)
    write_submissions(run.folder / "submission", best, data, config.batch_size, dtype)
    results = {f"eval_{key}": number for key, number in state.best.items()}
    results |= {f"last_{key}": number for key, number in state.last.items()}
    run.write_results(results)  # last: now the seed is done


def check_seeds(run, settings):
    """Raise UserError if other seeds differ in more than the seed: their median means nothing."""
    for other in Run(run.folder.parent).seeds():
        before = other.settings()
        if other.folder != run.folder and (names := recipe_differences(settings, [before])):
            found = f"{names[0]} = {before[names[0]]}, not {settings[names[0]]}"
            if names[0] == "data":
                found = "other texts or labels of the task"
            raise UserError(f"{other.folder} was trained with {found}: give {run.folder.name} its "
                            "own --out=out/NAME, or move the other seed away")


def identify_data(task):
    """Identify a task's data: the SHA-256 of the files of train and dev, and the labels."""
    files = {task.file(split) for split in ("train", *task.dev.values())}
    files |= {task.folder / name for name in task.archives}  # MRPC's dev split is a list of ids
    return {file.name: file_sha256(file) for file in files if file.is_file()} | {
        "labels": list(task.labels)}


def write_medians(task, out):
    """Write and print the medians over all seeds in `out` that are done."""
    results = {run.settings()["seed"]: run.results() for run in Run(out).seeds() if run.results()}
    medians = {key: float(np.median([scores[key] for scores in results.values()]))
               for key in results[min(results)]}
    Run(out).write_results({**medians, "seeds": results})
    print(f"median of {len(results)}: {in_percent(task, medians, 'eval_')}; "
          f"{out}/eval_results.json")


def main(argv):
    config = load_settings(Config, argv)
    if config.tensorboard:
        need("tensorboard", "tensorboard = True")
    if not config.init_from:
        raise UserError("init_from is empty, which model? --init_from=RUN, or a recipe: "
                        "python finetune.py configs/demo_finetune.py starts from out/demo")
    if config.warmup > 1:
        raise UserError(f"warmup = {config.warmup}: expected a share of the steps, 0 to 1")
    my_micro_batches(config.accumulation)  # raises before anything is read
    initial, vocab = checkpoint.find_weights(config.init_from)
    sizes = replace(checkpoint.read_weights(initial)["config"], dropout=config.dropout)
    checkpoint.check_objective(initial, sizes, causal=False)
    if config.max_len > sizes.max_len:
        raise UserError(f"max_len = {config.max_len}: there are {sizes.max_len} positions")

    device, dtype = use_device(config.device, config.dtype)
    with first_rank_first():
        task = find_task(config.task)
    data = TaskData(task, text_tokenizer(vocab), config.max_len, config.doc_stride)
    batches = TrainingBatches(data.train, config)
    max_steps = config.max_steps or config.epochs * batches.steps_per_epoch
    config = replace(config, device=str(device), dtype=str(dtype).removeprefix("torch."),
                     max_steps=max_steps)
    print(f"{len(batches.chosen):,} training examples, {config.max_steps:,} steps of "
          f"{batches.size}, {config.warmup_steps:,} of them warm-up")

    run = vocab.parent.parent if vocab.parent.name.startswith("seed") else vocab.parent
    fixed = "" if config.update_memory else "_fixed"
    out = Path(config.out or f"out/{run.name}_{task.name}{fixed}")
    with lock(out, "trains there"):
        max_over_ranks()  # wait until the first rank has the lock
        signals = catch_signals()
        for seed in range(config.seed, config.seed + config.seeds):
            run = Run(out / f"seed{seed}")
            fine_tune(replace(config, seed=seed), run, data, sizes, initial, vocab, signals)
            if any_signalled(signals):
                print(f"stopped; go on with: python finetune.py {shlex.join(argv)}")
                return status_after(signals)
            max_over_ranks()  # wait until the first rank has written the results
        write_medians(task, out)
    return 0


if __name__ == "__main__":
    run_ranks(lambda: main(sys.argv[1:]))
