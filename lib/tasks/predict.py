"""
Predict with a fine-tuned model: classes with probabilities, scores, or answers.

>>> header, rows = predict_file("out/base_sst2", Path("new.tsv"), torch.device("cpu"))
"""
import json

import numpy as np
import torch

from lib.common.errors import UserError
from lib.common.files import write_text
from lib.corpus.vocabulary import text_tokenizer
from lib.distributed.processes import deal_batches, sum_over_ranks
from lib.tasks.examples import batches_by_length, encode_examples
from lib.tasks.glue import TEXTS, find_columns, read_lines, read_split, row_names, tsv_text
from lib.tasks.scores import score
from lib.tasks.squad import Question, best_answers, make_windows, read_squad
from lib.training.trainer import autocast, to_device
from lib.weights.checkpoint import check_objective, find_weights, load_model, read_weights
from lib.weights.run import Run
from model import SpanReader


@torch.no_grad()
def predict_examples(model, examples, batch_size, device, dtype=torch.float32):
    """Predict for Examples with a Classifier, or for Windows with a SpanReader. A Classifier gives
    an array of probabilities (n, classes), or of scores (n,) if it has one output. A SpanReader
    gives the scores (n,) and positions (n, 2) of the windows' best spans."""
    was_training, n = model.training, len(examples.ids)
    reads_spans, n_classes = isinstance(model, SpanReader), model.head.out_features
    scores = np.zeros((n, n_classes) if n_classes > 1 and not reads_spans else n)
    spans = np.zeros((n, 2), int)
    model.eval()  # not the compiled model, which would be compiled again
    for index in deal_batches(batches_by_length(examples.lengths, batch_size)):
        batch = to_device(examples.pad(index, device), device)
        with autocast(device, dtype):
            logits = model(**batch).float().cpu()
        if reads_spans:
            end = examples.lengths[index] - 1  # a [SEP]
            scores[index], spans[index] = best_spans(logits, examples.starts[index],
                                                     examples.first_length[index], end)
        else:
            scores[index] = logits.softmax(1) if n_classes > 1 else logits[:, 0]
    model.train(was_training)
    scores, spans = sum_over_ranks(scores), sum_over_ranks(spans)
    return (scores, spans) if reads_spans else scores


def best_spans(logits, starts, first, end, n=20, longest=30):
    """Choose the span of each window with the highest sum of two logits, as Devlin et al. do. It
    joins one of the n best starts to one of the n best ends, and has at most `longest` tokens.

    logits: (batch, time, 2). starts: (batch, 2), see Windows. first, end: (batch,): the paragraph
    is in positions first to end - 1. Returns scores (batch,) and positions (batch, 2). A window
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
    return highest, positions.gather(1, at[:, None])[:, 0]


def score_dev(data, predict):
    """Score the dev splits of a TaskData: {metric: number}. predict: predict_examples, as a
    function of Examples only."""
    return {metric + suffix: number for suffix, examples in data.dev.items()
            for metric, number in score(data.task, examples, predict(examples)).items()}


def write_dev_predictions(folder, data, predict):
    """Write predictions_DEV.tsv with texts and labels, or for SQuAD its official .json."""
    task = data.task
    for suffix, split in task.dev.items():
        path, predictions = folder / f"predictions_{split}", predict(data.dev[suffix])
        if task.reads_spans:
            answers = best_answers(data.dev[suffix], *predictions)
            write_text(path.with_suffix(".json"), json.dumps(answers, indent=1))
            continue
        texts, labels = read_split(task, split)
        columns = ["sentence"] if len(texts[0]) == 1 else ["sentence1", "sentence2"]
        names = [task.labels[n] for n in labels] if task.labels else labels.tolist()
        header, rows = prediction_table(predictions, task.labels)
        table = [["index", *columns, "label", *header]]
        for n, (text, name, row) in enumerate(zip(texts, names, rows, strict=True)):
            table.append([n, *text, name, *row])
        write_text(path.with_suffix(".tsv"), tsv_text(table))


def write_submissions(folder, data, predict):
    """Predict the test splits, and write <folder>/NAME.tsv in the form that GLUE wants."""
    task = data.task
    for name, examples in data.test.items():
        predictions = predict(examples)
        if not task.labels:  # GLUE wants scores in the range of the labels
            predictions = predictions.clip(data.train.labels.min(), data.train.labels.max())
        _, rows = prediction_table(predictions, task.labels)
        table = [["index", "prediction"]]
        for row_name, row in zip(row_names(task, task.test[name]), rows, strict=True):
            table.append([row_name, row[0]])
        write_text(folder / f"{name}.tsv", tsv_text(table))


def prediction_table(predictions, labels):
    """Return the header and rows of a table of classes with probabilities, or of scores."""
    if not labels:
        return ["prediction"], [[f"{number:.3f}"] for number in predictions]
    best = predictions.argmax(1)
    return ["prediction", "probability"], [[labels[n], f"{row[n]:.4f}"]
                                           for n, row in zip(best, predictions, strict=True)]


def predict_file(run, file, device):
    """Predict for a file of new texts with a fine-tuned model. run: see find_weights.

    file: a TSV file with the columns of training: sentence, or sentence1 and sentence2 (or GLUE's
    names). For SQuAD it has question and context, or it is a .json as SQuAD's. Other columns may be
    there, and texts may be empty. Returns the header and rows of a
    table. It has the file's columns and the prediction, then a class's probability or an answer's
    score, the sum of two logits. Regression scores may leave the label range; only submissions are
    clipped."""
    folder, vocab = find_weights(run)
    saved = read_weights(folder)
    if not saved.get("head"):
        check_objective(run, saved["config"], causal=False)
        raise UserError(f"{run}: not a fine-tuned model: python finetune.py --init_from={run} ...")
    model, tokenizer = load_model(folder).to(device), text_tokenizer(vocab)
    settings = Run(folder.parent).settings() if (folder / "model.pt").is_file() else {}
    max_len = settings.get("max_len", min(384, model.bert.config.max_len))

    if saved["head"] == "span":
        header, rows, questions = read_questions(file)
        windows, _ = make_windows(tokenizer, questions, max_len, settings.get("doc_stride", 128))
        new_header, new_rows = answer_table(windows, *predict_examples(model, windows, 32, device))
    else:
        header, rows, texts = read_table(file, TEXTS, "sentence, or sentence1 and sentence2")
        examples = encode_examples(tokenizer, texts, None, max_len)
        predictions = predict_examples(model, examples, 32, device)
        new_header, new_rows = prediction_table(predictions, saved.get("labels"))
    return [*header, *new_header], [[*row, *new] for row, new in zip(rows, new_rows, strict=True)]


def answer_table(windows, scores, spans):
    """Return the header and rows of a table: answer and score of each question."""
    answers, best = best_answers(windows, scores, spans), {}
    for question, number in zip(windows.question_of_window, scores, strict=True):
        best[question.id] = max(number, best.get(question.id, -np.inf))
    return ["prediction", "score"], [[answers[question.id], f"{best[question.id]:.3f}"]
                                     for question in windows.questions]


def read_questions(file):
    """Read new Questions. Returns a table of the questions, header and rows, and the Questions."""
    if file.suffix == ".json":
        questions = read_squad(file, answered=False)
        return ["id", "question"], [[q.id, q.text] for q in questions], questions
    header, rows, texts = read_table(file, [("question", "context")], "question and context")
    return header, rows, [Question(str(n), *text, []) for n, text in enumerate(texts)]


def read_table(path, choices, expected):
    """Read a TSV file of texts: its header, its rows, and the texts of each row. These are in one
    of `choices`, tuples of columns; `expected` says in a UserError what these are."""
    (_, header), *lines = list(read_lines(path)) or [(1, [])]
    needed = find_columns(header, choices)
    if needed is None or not lines:
        raise UserError(f"{path}:1: columns {header}, {len(lines)} rows: expected a header with "
                        f"{expected}, and rows")
    for number, fields in lines:
        if len(fields) != len(header):
            raise UserError(f"{path}:{number}: {len(fields)} fields, expected {len(header)}")
    places, rows = [header.index(name) for name in needed], [fields for _, fields in lines]
    return header, rows, [tuple(row[place] for place in places) for row in rows]
