"""
The contexts that read a slot.
"""
import numpy as np
import pytest

from lib.tokenizer import load_tokenizer
from lib.usage import CorpusReads


def test_equal_contexts_are_one_with_the_highest_weight(workdir):
    """A token's weight is the sum over its heads. Each context is shown once, the strongest first.
    """
    reads = CorpusReads.__new__(CorpusReads)  # without a model
    reads.tokenizer = load_tokenizer("vocab.txt")
    reads.ids = np.array([[2, 6, 3]] * 2 + [[2, 9, 3]])
    weights = {4: 0.375, 1: 0.625, 7: 0.25}  # of slot 5 in each of two heads, by token
    slots = np.zeros((9, 2, 1), int)
    shares = np.ones((9, 2, 1), np.float32)
    for token, weight in weights.items():
        slots[token], shares[token] = 5, weight
    reads.layers = {2: (slots, shares)}
    for most, expected in ((9, [(1.25, "[CLS] «cat» [SEP]"), (0.5, "[CLS] «mat» [SEP]")]),
                           (1, [(1.25, "[CLS] «cat» [SEP]")])):
        found = reads.contexts(2, 5, most)
        assert [text for _, text in found] == [text for _, text in expected]
        assert [weight for weight, _ in found] == pytest.approx([weight for weight, _ in expected])
    assert reads.contexts(2, 7, 9) == []
