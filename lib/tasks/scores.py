"""
Compute the official scores of the tasks.
"""
import re
import string
from collections import Counter

import numpy as np

from lib.tasks.squad import best_answers


def score(task, examples, predictions):
    """Score predictions for a dev split (see predict_examples): {metric: number}."""
    if task.reads_spans:
        answers, _ = best_answers(examples, predictions)
        return score_squad(examples.questions, answers)
    predicted = predictions.argmax(1) if task.labels else predictions[:, 0]
    return {metric: float(METRICS[metric](examples.labels, predicted)) for metric in task.metrics}


def score_squad(questions, predictions):
    """Compute exact match and F1 in percent, as the official evaluate-v1.1.py does. Each counts the
    reference answer that fits best. predictions: {question id: text}."""
    exact = f1 = 0.0
    for question in questions:
        predicted = normalized_words(predictions[question.id])
        references = [normalized_words(text) for _, text in question.answers]
        exact += predicted in references
        f1 += max(2 * (Counter(predicted) & Counter(words)).total()
                  / max(1, len(predicted) + len(words)) for words in references)
    return {"exact_match": 100 * exact / len(questions), "f1": 100 * f1 / len(questions)}


def normalized_words(answer):
    """Split an answer into words in lower case, without ASCII punctuation and articles."""
    text = "".join(c for c in answer.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


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
