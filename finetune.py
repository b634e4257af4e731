"""
Fine-tune a pretrained model on GLUE, SQuAD 1.1 or a task of your own.

$ python finetune.py configs/demo_finetune.py         # after configs/demo.py; minutes, no network
$ python finetune.py configs/finetune_glue.py --task=SST-2 --init_from=out/base_resm_init --seeds=5
$ python finetune.py configs/finetune_squad.py --init_from=out/base_resm_init
$ torchrun --standalone --nproc_per_node=4 finetune.py CONFIG --batch_size=8 --accumulation=4
$ python finetune.py CONFIG --out=out/NAME --seed=1   # beside a process with --seed=0

A task of your own is a folder: --task=FOLDER. Its train.tsv and dev.tsv begin with a header. Texts
are in the column `sentence`, or in `sentence1` and `sentence2`. The target is `label` (a class) or
`score` (a number). --key=value overrides a setting below. The same command goes on where a stopped
run left off.

out/<run>/seed0/                 config.json, log.jsonl and vocab.txt as in a run of pretrain.py;
                                 the newest step_000500/ until the seed is done, then only best/
out/<run>/seed0/eval_results.json, predictions_dev.tsv: of the weights in best/
out/<run>/eval_results.json      the medians over the finished seeds, and the scores of each
"""
import json
import math
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lib import ranks, tasks, training, weights
from lib.corpus import ORDER
from lib.device import set_up_device
from lib.files import discard, file_sha256, lock, tsv_text, write_text
from lib.run import CHECKPOINT, Run, numbered
from lib.settings import UserError, from_zero, load_settings, run_script, share
from lib.squad import best_answers
from lib.tokenizer import text_tokenizer
from model import build_model


@dataclass
class Settings:
    # the defaults are Table 3's for GLUE
    out: str = ""  # its folder; empty: out/<init_from>_<task>
    init_from: str = ""  # a run, a Hugging Face folder, or a name: bert-base-uncased
    task: str = ""  # of GLUE (sst2, ...), squad, docs_task, or a folder
    seed: int = from_zero(0)  # for the head's weights, data order and dropout
    seeds: int = 1  # how many; the median is reported
    update_memory: bool = True  # False: the whole memory is frozen (Table 5)
    # data
    max_len: int = 128  # tokens of an example or a window
    doc_stride: int = 128  # tokens from one of SQuAD's windows to the next
    train_examples: int = from_zero(0)  # examples or windows to train on; 0: all
    # batch: batch_size x accumulation examples a step, of similar length
    batch_size: int = 32  # examples at a time on the device
    accumulation: int = 1  # batches in a step; a multiple of the ranks
    # optimization: AdamW; linear warm-up, then linear decay to 0
    epochs: int = 10  # passes over the training examples
    max_steps: int = from_zero(0)  # 0: as many as the epochs take
    warmup: float = share(0.06)  # share of the steps
    lr: float = 2e-5  # highest learning rate
    keys_lr: float = from_zero(1.0)  # rate of the memory's sub-keys, as a factor of lr
    value_lr: float = from_zero(1e-3)  # rate of the value tables, constant
    weight_decay: float = from_zero(0.1)  # biases, norms and memories have none
    grad_clip: float = from_zero(1.0)  # largest norm of the dense gradients (our reading); 0: any
    dropout: float = share(0.1)  # in embeddings, attention, FFN and pooled [CLS] (our reading)
    # watching
    log_interval: int = 100  # steps between log records
    checkpoint_interval: int = 1000  # steps between checkpoints
    tensorboard: bool = False  # curves: tensorboard --logdir out
    # machine
    device: str = "auto"  # auto, cuda, mps or cpu
    dtype: str = "auto"  # of matrix products: auto, float32, bfloat16 or float16
    compile: str = "auto"  # on, off, or auto: on CUDA

    # settings that you may change when resuming
    MAY_CHANGE = ("out", "init_from", "seeds", "log_interval", "checkpoint_interval", "tensorboard",
                  "device", "compile")

    @property
    def warmup_steps(self):
        return round(self.warmup * self.max_steps)


def main(argv):
    settings = load_settings(Settings, argv)
    if not settings.init_from:
        raise UserError("init_from is empty, which model? --init_from=RUN, or a recipe: "
                        "python finetune.py configs/demo_finetune.py starts from out/demo")
    ranks.check_accumulation(settings)
    initial, vocab = weights.find_weights(settings.init_from)
    memory = check_initial(settings, initial) and settings.update_memory
    device, dtype = set_up_device(settings.device, settings.dtype, memory=memory)
    settings = replace(settings, device=str(device), dtype=str(dtype).removeprefix("torch."))
    task, train, dev = load_task(settings, vocab)
    if not settings.max_steps:
        per_epoch = TrainingBatches(train, settings).steps_per_epoch
        settings = replace(settings, max_steps=settings.epochs * per_epoch)

    fixed = "" if settings.update_memory else "_fixed"
    out = Path(settings.out or f"out/{Path(settings.init_from).name}_{task.name}{fixed}")
    data = check_earlier_seeds(settings, out, task, initial)
    signals = training.catch_signals()
    for seed in range(settings.seed, settings.seed + settings.seeds):
        run = Run(out / f"seed{seed}")
        with lock(run.folder, "trains there"):
            if ranks.of_first_rank(run.results()):
                print(f"{run.folder} is done: --out=out/NAME starts anew")
            else:
                fine_tune(replace(settings, seed=seed), initial, run, task, data, train, dev,
                          signals)
            if ranks.any_signalled(signals):
                print(f"stopped; go on with: python finetune.py {shlex.join(argv)}")
                return training.status_after(signals)
            for checkpoint in numbered(run.folder, CHECKPOINT).values():  # best/ stays
                discard(checkpoint)
        if ranks.first_rank():
            with lock(out, "writes medians", timeout=-1):  # other seeds may end now, too
                write_medians(task, out)
    return 0


def check_initial(settings, initial):
    """Return the layers with a memory of the model in the folder `initial`.

    UserError if it cannot be fine-tuned like this.
    """
    config = weights.read_weights(initial)["config"]
    weights.check_objective(initial, config, causal=False)
    if not 7 <= settings.max_len <= config.max_len:  # a window of SQuAD needs 7
        raise UserError(f"max_len = {settings.max_len}: expected 7 to {config.max_len}, the "
                        "positions")
    trained = weights.run_settings(initial).get("seq_len", config.max_len)
    if settings.max_len > trained:
        print(f"max_len is beyond the {trained} tokens that {initial} was trained on: positions "
              "beyond are untrained, or its initial model's")
    return config.memory_layers


def load_task(settings, vocab):
    """Load the task: (Task, training examples, {suffix of its metrics: examples of dev})."""
    if settings.task == "docs_task" and ranks.first_rank() and not Path("data/docs_task").exists():
        run_script("prepare_data.py", "docs_task")
    ranks.barrier()  # the other ranks wait until it is there
    task = tasks.find_task(settings.task)
    encoding = text_tokenizer(vocab), settings.max_len, settings.doc_stride
    train = tasks.load_examples(task, "train", *encoding, settings.train_examples)
    dev = {suffix: tasks.load_examples(task, split, *encoding)
           for suffix, split in task.dev.items()}
    return task, train, dev


def check_earlier_seeds(settings, out, task, initial):
    """Raise UserError if seeds in `out` have other settings, data or initial weights.

    Returns the data: {name of a file: SHA-256, "labels": the classes}.
    """
    files = [task.file(split) for split in ("train", *task.dev.values())]
    data = {file.name: file_sha256(file) for file in files} | {"labels": task.labels}
    sha256 = weights.model_hash(initial)
    for earlier in Run(out).seed_runs():
        before = earlier.settings()
        if not before:  # it was killed before it began
            continue
        earlier.check_settings(replace(settings, seed=before["seed"]), data)
        if before["init_sha256"] != sha256:
            raise UserError(f"{earlier.folder} started from other weights than {initial} (from "
                            f"{before['init_checkpoint']}): give another --out=out/NAME")
    return data


def set_up(settings, initial, run, task, data, checkpoint):
    """Make the model and what trains it, and open the run.

    initial: see fine_tune. checkpoint: where the run goes on, or None. Returns the model, and what
    training.prepare() does.
    """
    initial, vocab = weights.find_weights(initial)
    config = replace(weights.read_weights(initial)["config"], dropout=settings.dropout)
    torch.manual_seed(settings.seed)  # of the head
    model = build_model(config, "span" if task.reads_spans else "classifier", task.labels)
    for layer in model.bert.layers:
        if layer.memory is not None and not settings.update_memory:
            layer.memory.requires_grad_(False).eval()  # its batch norm keeps its statistics
            layer.memory.values.learns = False
    origin = {}
    if checkpoint:
        model.load_state_dict(weights.read_weights(checkpoint)["weights"])
    else:
        origin = {**weights.init_from(model, initial), "texts": task.texts}
    net, optimizers, state = training.prepare(model, settings, checkpoint)
    run.open(settings, vocab, origin, data, state["step"])
    return model, net, optimizers, {"best": -math.inf, "results": {}, **state}


def fine_tune(settings, initial, run, task, data, train, dev, signals):
    """Fine-tune with one seed, or go on. Afterwards `run` has results, unless a signal came.

    initial: the folder of the weights, the same for all seeds though init_from may train on.
    """
    checkpoint = ranks.of_first_rank(run.newest_checkpoint())
    model, net, optimizers, state = set_up(settings, initial, run, task, data, checkpoint)
    batches = TrainingBatches(train, settings)
    recent, start = [], time.perf_counter()  # what step() returned since the last record
    for step in range(state["step"], settings.max_steps):
        training.set_rate(optimizers, settings, step)
        recent.append(training.step(step, net, batches, optimizers, settings))

        done = step + 1  # updates
        stopped = ranks.any_signalled(signals)
        epoch_ends = done % batches.steps_per_epoch == 0 or done == settings.max_steps
        log = epoch_ends or training.is_due(done, settings.log_interval, settings)
        save = stopped or training.is_due(done, settings.checkpoint_interval, settings)
        if not (log or save):
            continue

        norm = training.take_stock(recent, state, settings, done, start)
        if log:
            training.log_training(run, state, settings, batches, norm)
        if epoch_ends:
            evaluate(settings, run, task, dev, model, state, batches.epochs(done))
        if save:
            files = training.checkpoint_files(model, task.labels, optimizers, state)
            run.save_checkpoint(done, files, keep=1)
        if stopped:
            break
        recent, start = [], time.perf_counter()

    if state["step"] == settings.max_steps:
        run.write_results(state["results"])  # last: now the seed is done


def evaluate(settings, run, task, dev, model, state, epoch):
    """Score the dev splits, log and print. Save the weights if they are the best so far."""
    dtype = getattr(torch, settings.dtype)
    predictions = {suffix: tasks.predict_examples(model, examples, settings.batch_size, dtype)
                   for suffix, examples in dev.items()}
    scores = tasks.score_dev(task, dev, predictions) | {"epoch": epoch}
    run.log({"kind": "dev", "step": state["step"], **scores})
    metric = task.metrics[0]
    print(f"epoch {epoch:.2f}: {metric} {scores[metric]:.4f}", flush=True)
    score = float(np.nan_to_num(scores[metric], nan=-2))  # less than any number
    if score > state["best"]:
        state["best"] = score
        named = {f"eval_{name}": value for name, value in scores.items()}
        state["results"] = {"metric": metric, **named}
        run.save_best(weights.model_file(model, task.labels))
        write_predictions(run.folder, task, dev, predictions)


class TrainingBatches:
    """Make the training batches of one seed, in random order.

    Examples are sorted by length within 64 steps at a time (our reading). The last step of an epoch
    has the examples that are left. They are spread evenly over its micro-batches, or left out if
    they are fewer than these.
    """

    unit = "examples"

    def __init__(self, examples, settings):
        self.examples = examples
        self.accumulation = settings.accumulation
        self.size = settings.batch_size * settings.accumulation  # examples of a step
        full, left = divmod(len(examples), self.size)
        self.steps_per_epoch = full + (left >= self.accumulation)
        if not self.steps_per_epoch:
            raise UserError(f"accumulation = {self.accumulation}: more than the {left} training "
                            "examples")
        self.steps = []  # the examples of each step, by index
        lengths = np.array([len(example.ids) for example in examples])
        place = np.arange(len(examples))
        for epoch in range(math.ceil(settings.max_steps / self.steps_per_epoch)):
            rng = np.random.default_rng([settings.seed, ORDER, epoch])
            order = rng.permutation(len(examples))
            order = order[np.lexsort((lengths[order], place // (64 * self.size)))]
            batches = np.split(order, place[self.size::self.size])[:self.steps_per_epoch]
            self.steps += [batches[n] for n in rng.permutation(len(batches))]

    def epochs(self, steps):
        """Return how often `steps` steps go through the examples."""
        return steps / self.steps_per_epoch

    def get(self, step, micro):
        """Return a micro-batch, arguments of a model as arrays, and its weight in the loss."""
        index = np.array_split(self.steps[step], self.accumulation)[micro]
        chosen = [self.examples[n] for n in index]
        labels = np.array([example.label for example in chosen])
        return {**tasks.pad(chosen), "labels": labels}, len(index) / len(self.steps[step])


def write_predictions(folder, task, dev, predictions):
    """Write predictions_DEV.tsv with texts and labels, or SQuAD's official .json.

    dev, predictions: see score_dev.
    """
    for suffix, examples in dev.items():
        path = folder / f"predictions_{task.dev[suffix]}.tsv"
        if task.reads_spans:
            answers = best_answers(examples, predictions[suffix])
            texts = {question.id: text for question, (text, _) in answers.items()}
            write_text(path.with_suffix(".json"), json.dumps(texts, indent=1))
            continue
        rows, cells = [], tasks.prediction_cells(predictions[suffix], task.labels)
        for example, said in zip(examples, cells):
            label = task.labels[example.label] if task.labels else example.label
            texts = dict(zip(task.texts, example.texts))
            rows.append({"index": len(rows), **texts, "label": label, **said})
        write_text(path, tsv_text(rows))


def write_medians(task, out):
    """Write the medians over all seeds in `out` that are done, and print the main one."""
    seeds = {run.settings()["seed"]: run.results() for run in Run(out).seed_runs() if run.results()}
    metric, counted = task.metrics[0], weights.seed_scores(seeds)
    medians = {name: float(np.median([seeds[seed][name] for seed in counted]))
               for name in seeds[min(seeds)] if name != "metric"}
    Run(out).write_results({"metric": metric, **medians, "seeds": seeds})
    for seed in sorted(seeds.keys() - counted.keys()):
        print(f"seed {seed} is left out of the median: its {metric} is nan")
    print(f"median of {len(counted)}: {metric} {medians[f'eval_{metric}']:.4f}; "
          f"{out}/eval_results.json")


if __name__ == "__main__":
    ranks.run_ranks(lambda: main(sys.argv[1:]))
