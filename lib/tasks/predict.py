"""
What a fine-tuned model says of texts: classes with probabilities, scores, or answers.

>>> header, rows = predict_file("out/base_sst2", Path("new.tsv"), torch.device("cpu"))
"""
import numpy as np
import torch

from lib.common.errors import UserError
from lib.corpus.vocabulary import special_ids, text_tokenizer
from lib.distributed.processes import deal_batches, sum_over_ranks
from lib.tasks.glue import TEXTS, batches_by_length, encode_examples, read_lines
from lib.tasks.squad import Question, best_answers, make_windows, read_squad
from lib.training.run import read_settings
from lib.training.trainer import autocast, to_device
from lib.weights.checkpoint import check_objective, find_weights, load_model, read_weights
from model import SpanReader


@torch.no_grad()
def predict_examples(model, examples, labels, size, padding, device, dtype=torch.float32):
    """What a model says of examples, in batches of `size`, padded by `padding` (see Examples.pad).
    Of a Classifier with labels an array (n, classes) of probabilities, without any of scores (n,);
    of a SpanReader the scores (n,) and the positions (n, 2) of the best span of each window."""
    reads_spans, was_training = isinstance(model, SpanReader), model.training
    found = np.zeros((len(examples.ids), len(labels)) if labels else len(examples.ids))
    spans = np.zeros((len(examples.ids), 2), int)
    model.eval()  # not the compiled model, which would be compiled again
    for index in deal_batches(batches_by_length(examples.lengths, size)):
        batch = to_device(examples.pad(index, *padding), device)
        with autocast(device, dtype):
            logits = model(**batch).float().cpu()
        if reads_spans:
            end = examples.lengths[index] - 1  # a [SEP]
            found[index], spans[index] = best_spans(logits, examples.starts[index],
                                                    examples.first[index], end)
        else:
            found[index] = logits.softmax(1) if labels else logits[:, 0]
    model.train(was_training)
    found, spans = sum_over_ranks(found), sum_over_ranks(spans)
    return (found, spans) if reads_spans else found


def best_spans(logits, starts, first, end, n=20, longest=30):
    """The best span of each window: of the n best starts in Windows.starts and the n best ends in
    the paragraph, which is in positions first to end - 1, the pair with the highest sum of logits
    that spans at most `longest` tokens (Devlin et al.). logits: (batch, time, 2); starts: numpy
    (batch, 2); first, end: (batch,). Returns the spans' scores (batch,), -inf if there is none, and
    their positions (batch, 2)."""
    position = np.arange(logits.shape[1])
    is_start = (starts[:, :1] <= position) & (position < starts[:, 1:])  # (batch, time)
    is_end = (first[:, None] <= position) & (position < end[:, None])
    allowed = torch.from_numpy(np.stack([is_start, is_end], 2))
    logits = logits.masked_fill(~allowed, -torch.inf)
    best, positions = logits.topk(min(n, logits.shape[1]), 1)  # (batch, n, 2)
    scores = best[:, :, None, 0] + best[:, None, :, 1]  # (batch, n starts, n ends)
    length = positions[:, None, :, 1] - positions[:, :, None, 0] + 1
    scores = scores.masked_fill((length < 1) | (length > longest), -torch.inf)
    score, pair = scores.flatten(1).max(1)
    at = torch.stack(torch.unravel_index(pair, scores.shape[1:]), 1)  # (batch, 2)
    return score, positions.gather(1, at[:, None])[:, 0]


def prediction_rows(found, labels):
    """What predict says of classes or scores, for a table: its header, and a row for each example:
    class and probability, or score."""
    if not labels:
        return ["prediction"], [[f"{score:.3f}"] for score in found]
    best = found.argmax(1)
    return ["prediction", "probability"], [[labels[n], f"{row[n]:.4f}"]
                                           for n, row in zip(best, found, strict=True)]


def predict_file(run, file, device):
    """Predict for a file of new texts with the fine-tuned model of `run` (see find_weights).

    file: a TSV file whose header names the columns of the texts as in training: sentence, or
    sentence1 and sentence2 (or GLUE's names), question and context for a model of SQuAD; or for
    this one a .json as SQuAD's. Other columns may be there, an empty text is a text. Returns the
    header and the rows of a table: the columns of the file, and the prediction with its
    probability or, of an answer, its score: the sum of two logits. What is predicted on a scale (as
    STS-B's 0 to 5) can lie outside of it, as in GLUE's metrics; only a submission is clipped.
    """
    folder, vocab = find_weights(run)
    saved = read_weights(folder)
    if not saved.get("head"):
        check_objective(run, saved["config"], causal=False)
        raise UserError(f"{run}: not a fine-tuned model: python finetune.py --init_from={run} ...")
    model, tokenizer = load_model(folder).to(device), text_tokenizer(vocab)
    settings = read_settings(folder.parent) if (folder / "model.pt").is_file() else {}
    longest = settings.get("max_len", min(384, model.bert.config.max_len))
    padding = special_ids(tokenizer)[0], 1

    def say(examples):
        return predict_examples(model, examples, saved.get("labels"), 32, padding, device)

    if saved["head"] == "span":
        return answer_file(file, tokenizer, say, longest, settings.get("doc_stride", 128))
    header, rows, texts = read_table(file, TEXTS, "sentence, or sentence1 and sentence2")
    more, said = prediction_rows(say(encode_examples(tokenizer, texts, None, longest)), saved["labels"])
    return [*header, *more], [[*row, *new] for row, new in zip(rows, said, strict=True)]


def answer_file(file, tokenizer, say, max_len, stride):
    """predict_file for questions; say(windows): what predict says of them."""
    if file.suffix == ".json":
        questions = read_squad(file, answered=False)
        header, rows = ["id", "question"], [[question.id, question.text] for question in questions]
    else:
        header, rows, texts = read_table(file, [("question", "context")], "question and context")
        questions = [Question(str(n), *text, []) for n, text in enumerate(texts)]
    windows, _ = make_windows(tokenizer, questions, max_len, stride)
    scores, spans = say(windows)
    answers, best = best_answers(windows, scores, spans), {}
    for question, score in zip(windows.question, scores, strict=True):
        best[question.id] = max(score, best.get(question.id, -np.inf))
    return [*header, "prediction", "score"], [
        [*row, answers[question.id], f"{best[question.id]:.3f}"]
        for row, question in zip(rows, questions, strict=True)]


def read_table(path, names, expected):
    """A TSV file with one of the tuples of column names among its own. Returns its columns, its
    rows, and of each row the texts of these columns."""
    (_, columns), *lines = list(read_lines(path)) or [(1, [])]
    needed = next((each for each in names if set(each) <= set(columns)), None)
    if needed is None or not lines:
        raise UserError(f"{path}:1: columns {columns}, {len(lines)} rows: expected a header with "
                        f"{expected}, and rows")
    for number, fields in lines:
        if len(fields) != len(columns):
            raise UserError(f"{path}:{number}: {len(fields)} fields, expected {len(columns)}")
    places, rows = [columns.index(name) for name in needed], [fields for _, fields in lines]
    return columns, rows, [tuple(row[place] for place in places) for row in rows]
