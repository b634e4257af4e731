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
from lib.squad import best_answers, make_windows, read_squad, score_squad
from lib.tasks import batches_by_length, encode_examples, pad, pick_texts, read_table, tsv_text
from lib.tokenizer import text_tokenizer
from lib.weights import find_weights, load_model, read_weights
from model import SpanReader


@torch.no_grad()
def predict_examples(model, examples, batch_size=32, dtype=torch.float32):
    """Predict for Examples with a Classifier, or for Windows with a SpanReader.

    A Classifier gives an array (n, classes) of probabilities, or (n, 1) of scores if there are no
    classes. A SpanReader gives (n, 3), see best_spans. Each module keeps its mode.
    """
    in_training = [module for module in model.modules() if module.training]
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
    for module in in_training:
        module.training = True
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
    """Write predictions_DEV.tsv with texts and labels, or SQuAD's official .json.

    dev, predictions: see score_dev.
    """
    for suffix, examples in dev.items():
        path = folder / f"predictions_{task.dev[suffix]}.tsv"
        if task.reads_spans:
            answers = best_answers(examples, predictions[suffix])
            said = {question.id: text for question, (text, _) in answers.items()}
            write_text(path.with_suffix(".json"), json.dumps(said, indent=1))
            continue
        header, cells = prediction_table(predictions[suffix], task.labels)
        columns = ["sentence"] if len(examples[0].texts) == 1 else ["sentence1", "sentence2"]
        table = [["index", *columns, "label", *header]]
        for n, (example, row) in enumerate(zip(examples, cells)):
            label = task.labels[example.label] if task.labels else example.label
            table.append([n, *example.texts, label, *row])
        write_text(path, tsv_text(table))


def prediction_table(predictions, labels):
    """Return header and rows: scores, or the classes named by `labels` with probabilities."""
    if not labels:
        return ["prediction"], [[f"{score:.3f}"] for [score] in predictions]
    rows = [[labels[row.argmax()], f"{row.max():.4f}"] for row in predictions]
    return ["prediction", "probability"], rows


def predict_file(run, file, device):
    """Predict for a file of new texts with a fine-tuned model.

    run: out/<run> or one of its seeds. file: a TSV file with the columns of training, or for SQuAD
    a .json in its layout. Returns header and rows of a table: the columns of the TSV, or ids and
    questions. Then come the prediction, and a class's probability or an answer's score.
    """
    folder, vocab = find_weights(run)
    settings = Run(folder.parent).settings()
    if "task" not in settings:
        raise UserError(f"{run}: not a fine-tuned model: python finetune.py makes one")
    model = load_model(folder).to(device)
    tokenizer, max_len = text_tokenizer(vocab), settings["max_len"]
    if isinstance(model, SpanReader):
        windows = make_windows(tokenizer, read_squad(file), max_len, settings["doc_stride"])
        answers = best_answers(windows, predict_examples(model, windows))
        table = [[question.id, question.text, text, f"{score:.3f}"]
                 for question, (text, score) in answers.items()]
        return ["id", "question", "prediction", "score"], table
    rows = read_table(file)
    examples = encode_examples(tokenizer, pick_texts(file, rows), [None] * len(rows), max_len)
    header, cells = prediction_table(predict_examples(model, examples),
                                     read_weights(folder)["labels"])
    table = [[*row.values(), *new] for row, new in zip(rows, cells)]
    return [*rows[0], *header], table
