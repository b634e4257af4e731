"""
Predict with a fine-tuned model: classes with probabilities, scores, or answers.

>>> header, rows = predict_file("out/base_sst2", Path("new.tsv"), torch.device("cpu"))
"""
import json

import numpy as np
import torch

from lib.device import autocast, to_device
from lib.distributed import deal_batches, sum_over_ranks
from lib.errors import UserError
from lib.files import write_text
from lib.run import Run
from lib.squad import Question, best_answers, make_windows, read_squad
from lib.tasks import (
    TEXTS,
    batches_by_length,
    encode_examples,
    pick_columns,
    read_split,
    read_table,
    row_names,
    score,
    tsv_text,
)
from lib.tokenizer import text_tokenizer
from lib.weights import check_objective, find_weights, load_model, read_weights
from model import SpanReader


@torch.no_grad()
def predict_examples(model, examples, batch_size=32, dtype=torch.float32):
    """Predict for Examples with a Classifier, or for Windows with a SpanReader.

    Returns an array (n, columns): the probabilities of the classes, or a score if there are no
    classes. A SpanReader gives what best_spans returns."""
    was_training, device = model.training, model.head.weight.device
    reads_spans = isinstance(model, SpanReader)
    columns = 3 if reads_spans else model.head.out_features
    predictions = np.zeros((len(examples.ids), columns))
    model.eval()  # not the compiled model, which would be compiled again
    for index in deal_batches(batches_by_length(examples.lengths, batch_size)):
        batch = to_device(examples.pad(index, device), device)
        with autocast(device, dtype):
            output = model(**batch).float().cpu()
        if reads_spans:
            end = examples.lengths[index] - 1  # a [SEP]
            first = examples.first_length[index]
            output = best_spans(output, examples.starts[index], first, end)
        elif columns > 1:
            output = output.softmax(1)
        predictions[index] = output
    model.train(was_training)
    return sum_over_ranks(predictions)


def best_spans(logits, starts, first, end, n=20, longest=30):
    """Choose each window's span with the highest sum of two logits, as Devlin et al. do.

    It joins one of the n best starts to one of the n best ends, in at most `longest` tokens.

    logits: (batch, time, 2). starts: (batch, 2), see Windows. first, end: (batch,): the paragraph
    is in positions first to end - 1. Returns (batch, 3): score, first and last position. A window
    without a span scores -inf."""
    position = np.arange(logits.shape[1])
    is_start = (starts[:, :1] <= position) & (position < starts[:, 1:])  # (batch, time)
    is_end = (first[:, None] <= position) & (position < end[:, None])
    allowed = torch.from_numpy(np.stack([is_start, is_end], 2))
    logits = logits.masked_fill(~allowed, -torch.inf)
    best, positions = logits.topk(min(n, logits.shape[1]), 1)  # (batch, n, 2)
    scores = best[:, :, None, 0] + best[:, None, :, 1]  # (batch, n starts, n ends)
    length = positions[:, None, :, 1] - positions[:, :, None, 0] + 1
    scores = scores.masked_fill((length < 1) | (length > longest), -torch.inf)
    highest, pair = scores.flatten(1).max(1)
    at = torch.stack(torch.unravel_index(pair, scores.shape[1:]), 1)  # (batch, 2)
    return torch.column_stack([highest, positions.gather(1, at[:, None])[:, 0]])


def score_dev(model, data, batch_size, dtype):
    """Score the dev splits of a TaskData: {metric: number}."""
    results = {}
    for suffix, examples in data.dev.items():
        predictions = predict_examples(model, examples, batch_size, dtype)
        for metric, number in score(data.task, examples, predictions).items():
            results[metric + suffix] = number
    return results


def write_dev_predictions(folder, model, data, batch_size, dtype):
    """Write predictions_DEV.tsv with texts and labels, or for SQuAD its official .json."""
    task = data.task
    for suffix, split in task.dev.items():
        path = folder / f"predictions_{split}"
        predictions = predict_examples(model, data.dev[suffix], batch_size, dtype)
        if task.reads_spans:
            answers, _ = best_answers(data.dev[suffix], predictions)
            write_text(path.with_suffix(".json"), json.dumps(answers, indent=1))
            continue
        texts, labels = read_split(task, split)
        columns = ["sentence"] if len(texts[0]) == 1 else ["sentence1", "sentence2"]
        labels = [task.labels[n] for n in labels] if task.labels else labels.astype(str)
        header, rows = prediction_table(predictions, task.labels)
        table = [["index", *columns, "label", *header]]
        for n, row in enumerate(rows):
            table.append([n, *texts[n], labels[n], *row])
        write_text(path.with_suffix(".tsv"), tsv_text(table))


def write_submissions(folder, model, data, batch_size, dtype):
    """Predict the test splits, and write <folder>/NAME.tsv in the form that GLUE wants."""
    task = data.task
    for name, examples in data.test.items():
        predictions = predict_examples(model, examples, batch_size, dtype)
        if not task.labels:  # GLUE wants scores in the range of the labels
            predictions = predictions.clip(data.train.labels.min(), data.train.labels.max())
        _, rows = prediction_table(predictions, task.labels)
        names = row_names(task, task.test[name])
        table = [[row_name, row[0]] for row_name, row in zip(names, rows, strict=True)]
        write_text(folder / f"{name}.tsv", tsv_text([["index", "prediction"], *table]))


def prediction_table(predictions, labels):
    """Return header and rows: classes with probabilities, or scores."""
    if not labels:
        return ["prediction"], [[f"{score:.3f}"] for [score] in predictions]
    rows = [[labels[row.argmax()], f"{row.max():.4f}"] for row in predictions]
    return ["prediction", "probability"], rows


def predict_file(run, file, device):
    """Predict for a file of new texts with a fine-tuned model. run: see find_weights.

    file: a TSV file with the columns of training; for SQuAD with question and context, or a .json
    as SQuAD's. Other columns may be there. Returns header and rows of a table: the file's columns,
    the prediction, and the probability of a class or the score of an answer."""
    folder, vocab = find_weights(run)
    saved = read_weights(folder)
    check_objective(run, saved["config"], causal=False)
    if not saved.get("head"):
        raise UserError(f"{run}: not a fine-tuned model: python finetune.py makes one")
    model, tokenizer = load_model(folder).to(device), text_tokenizer(vocab)
    settings = Run(folder.parent).settings() if (folder / "model.pt").is_file() else {}
    most = model.bert.config.max_len
    max_len = settings.get("max_len", min(384, most))
    if not 8 <= max_len <= most:
        raise UserError(f"{folder.parent}/config.json: max_len = {max_len}: expected 8 to {most}")

    if saved["head"] == "span":
        header, rows, questions = read_questions(file)
        windows = make_windows(tokenizer, questions, max_len, settings.get("doc_stride", 128))
        answers, scores = best_answers(windows, predict_examples(model, windows))
        more = ["prediction", "score"]
        predicted = [[answers[q.id], f"{scores[q.id]:.3f}"] for q in questions]
    else:
        header, rows = read_table(file)
        texts = pick_columns(file, header, rows, TEXTS)
        examples = encode_examples(tokenizer, texts, None, max_len)
        predictions = predict_examples(model, examples)
        more, predicted = prediction_table(predictions, saved.get("labels"))
    return [*header, *more], [row + cells for row, cells in zip(rows, predicted, strict=True)]


def read_questions(file):
    """Read new questions. Returns the header and rows of a table, and the Questions."""
    if file.suffix == ".json":
        questions = read_squad(file, answered=False)
        return ["id", "question"], [[q.id, q.text] for q in questions], questions
    header, rows = read_table(file)
    texts = pick_columns(file, header, rows, [("question", "context")])
    return header, rows, [Question(str(n), *text, []) for n, text in enumerate(texts)]
