"""
Sizes of a memory that cannot be, whoever wrote them.
"""
from dataclasses import asdict

import pytest

from lib.common.errors import UserError
from model import BertConfig


@pytest.mark.parametrize("name, value, word", [
    ("key_dim", 7, "key_dim = 7: expected an even number"),
    ("topk", 513, "topk = 513: expected at most n_keys = 512"),
    ("memory_layers", (4, 4), "memory_layers = .*different layers")])
def test_a_config_says_which_size_cannot_be(name, value, word):
    with pytest.raises(UserError, match=word):
        BertConfig(**{name: value})
    with pytest.raises(UserError, match=f"config.json: {word}"):
        BertConfig.from_dict(asdict(BertConfig()) | {name: value}, "config.json")
