"""
Predict with a fine-tuned model: classes with probabilities, scores, or answers. Score it.

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
from lib.squad import Question, Window, best_answers, make_windows, read_squad, score_squad
from lib.tasks import (
    batches_by_length,
    encode_examples,
    pad,
    pick_texts,
    read_split,
    read_table,
    tsv_text,
)
from lib.tokenizer import text_tokenizer
from lib.weights import find_weights, load_model, read_weights
from model import SpanReader


@torch.no_grad()
def predict_examples(model, examples, batch_size=32, dtype=torch.float32):
    """Predict for Examples with a Classifier, or for Windows with a SpanReader.

    A Classifier gives an array (n, classes) of probabilities, or (n, 1) of scores if there are no
    classes. A SpanReader gives (n, 3), see best_spans.
    """
    was_training = model.training
    device = model.head.weight.device
    reads_spans = isinstance(model, SpanReader)
    predictions = np.zeros((len(examples), 3 if reads_spans else model.head.out_features))
    lengths = np.array([len(example.ids) for example in examples])
    model.eval()  # not the compiled model, which would be compiled again
    for index in deal_batches(batches_by_length(lengths, batch_size)):
        batch = [examples[n] for n in index]
        with autocast(device, dtype):
            output = model(**to_device(pad(batch), device)).float().cpu()
        if reads_spans:
            output = best_spans(output, batch)
        elif output.shape[1] > 1:
            output = output.softmax(1)
        predictions[index] = output
    model.train(was_training)
    return sum_over_ranks(predictions)


def best_spans(logits, windows, longest=30):
    """Choose each window's span with the highest sum of two logits.

    A span has at most `longest` tokens, as in Devlin et al. All spans are tried.
    logits: (batch, time, 2), of the start and the end. Returns (batch, 3): the score, the first and
    the last position. A window without a span scores -inf.
    """
    spans = np.full((len(windows), 3), -np.inf)
    for span, (start, end), window in zip(spans, logits.mT, windows):
        scores = start[:, None] + end  # (time, time)
        allowed = torch.ones_like(scores, dtype=torch.bool).triu().tril(longest - 1)
        allowed[:window.starts[0]] = allowed[window.starts[1]:] = False
        allowed[:, len(window.ids) - 1:] = False  # the [SEP] and padding
        scores = scores.where(allowed, -torch.inf)
        first, last = divmod(scores.argmax().item(), len(start))
        span[:] = scores[first, last], first, last
    return spans


def score_dev(task, dev, predictions):
    """Score the predictions for the dev splits: {metric: number}.

    dev: Examples or Windows, predictions: see predict_examples; both by the keys of task.dev.
    """
    scores = {}
    for suffix, examples in dev.items():
        if task.reads_spans:
            return score_squad(best_answers(examples, predictions[suffix]))
        labels = np.array([example.label for example in examples])
        predicted = predictions[suffix]
        predicted = predicted.argmax(1) if task.labels else predicted[:, 0]
        for metric in task.metrics:
            scores[metric + suffix] = float(METRICS[metric](labels, predicted))
    return scores


def pearson(x, y):
    """Compute the correlation; nan if x or y is constant."""
    return np.corrcoef(x, y)[0, 1] if np.ptp(x) and np.ptp(y) else np.nan


def mean_ranks(x):
    """Rank numbers from 1; equal numbers share their mean rank."""
    _, inverse, count = np.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[inverse]


METRICS = {  # of labels x and predictions y, arrays (n,)
    "accuracy": lambda x, y: (x == y).mean(),
    "f1": lambda x, y: 2 * (x @ y) / max(1, (x + y).sum()),  # of class 1; 0 if it never occurs
    "matthews_correlation": lambda x, y: np.nan_to_num(pearson(x, y)),  # 0 if x or y is constant
    "pearson": pearson,
    "spearmanr": lambda x, y: pearson(mean_ranks(x), mean_ranks(y)),
}


def write_predictions(folder, task, dev, predictions):
    """Write predictions_DEV.tsv, or the official .json of SQuAD.

    The table has texts and labels, too. dev, predictions: see score_dev.
    """
    for suffix, split in task.dev.items():
        header, cells = prediction_table(dev[suffix], predictions[suffix], task.labels)
        if task.reads_spans:
            questions = dict.fromkeys(window.question for window in dev[suffix])
            answers = {question.id: text for question, (text, _) in zip(questions, cells)}
            write_text(folder / f"predictions_{split}.json", json.dumps(answers, indent=1))
            continue
        texts, labels = read_split(task, split)
        columns = ["sentence"] if len(texts[0]) == 1 else ["sentence1", "sentence2"]
        table = [["index", *columns, "label", *header]]
        for n, (text, label, row) in enumerate(zip(texts, labels, cells)):
            table.append([n, *text, task.labels[label] if task.labels else label, *row])
        write_text(folder / f"predictions_{split}.tsv", tsv_text(table))


def prediction_table(examples, predictions, labels):
    """Return header and rows: answers, scores, or classes with probabilities.

    labels: the names of the classes, none for scores and answers.
    """
    if isinstance(examples[0], Window):
        answers = best_answers(examples, predictions).values()
        return ["prediction", "score"], [[text, f"{score:.3f}"] for text, score in answers]
    if not labels:
        return ["prediction"], [[f"{score:.3f}"] for [score] in predictions]
    rows = [[labels[row.argmax()], f"{row.max():.4f}"] for row in predictions]
    return ["prediction", "probability"], rows


def predict_file(run, file, device):
    """Predict for a file of new texts with a fine-tuned model.

    run: see find_weights. file: a TSV file with the columns of training. For SQuAD it has question
    and context, or is a .json as SQuAD's. Other columns may be there. Returns header and rows of a
    table: the file's columns, the prediction, and a class's probability or an answer's score.
    """
    folder, vocab = find_weights(run)
    saved = read_weights(folder)
    if not saved["head"]:
        raise UserError(f"{run}: not a fine-tuned model: python finetune.py makes one")
    model = load_model(folder).to(device)
    tokenizer = text_tokenizer(vocab)
    settings = {"max_len": min(384, saved["config"].max_len), "doc_stride": 128}
    if (folder / "model.pt").is_file():  # not in Hugging Face layout
        settings = Run(folder.parent).settings()
    if saved["head"] == "span":
        rows, questions = read_questions(file)
        limits = settings["max_len"], settings["doc_stride"]
        examples = make_windows(tokenizer, questions, *limits)
    else:
        rows = read_table(file)
        texts = pick_texts(file, rows)
        examples = encode_examples(tokenizer, texts, [None] * len(rows), settings["max_len"])
    predictions = predict_examples(model, examples)
    more, cells = prediction_table(examples, predictions, saved.get("labels"))
    table = [[*row.values(), *new] for row, new in zip(rows, cells, strict=True)]
    return [*rows[0], *more], table


def read_questions(file):
    """Read new questions: the rows of a table, dicts by column, and the Questions."""
    if file.suffix == ".json":
        questions = read_squad(file)
        return [{"id": q.id, "question": q.text} for q in questions], questions
    rows = read_table(file)
    if not rows[0].keys() >= {"question", "context"}:
        raise UserError(f"{file}:1: columns {list(rows[0])}: expected question and context")
    return rows, [Question("", row["question"], row["context"], []) for row in rows]
