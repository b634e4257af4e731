"""
The data that a run was trained on.
"""
from pathlib import Path

import pytest

import pretrain
from lib.errors import UserError
from lib.run import Run


def test_data_that_are_gone_or_new_are_other_data(place):
    run, config = Run("run"), pretrain.Config()
    run.begin(config, Path("tiny.txt"), {"init_checkpoint": "", "first_step": 0,
                                         "pooler_trained": False}, {"train": "a", "dev": "b"})
    run.check_settings(config, {"train": "a", "dev": "b"})
    for data, word in (({"train": "a"}, "dev was b, is now None"),
                       ({"train": "a", "dev": "b", "more": "c"}, "more was None, is now c"),
                       ({"train": "x", "dev": "b"}, "train was a, is now x")):
        with pytest.raises(UserError, match=f"trained on other data: {word}"):
            run.check_settings(config, data)
