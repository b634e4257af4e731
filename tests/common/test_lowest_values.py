"""
The lowest value that a setting or a number on the command line may have.
"""
import argparse

import pytest

from lib.common.errors import UserError
from lib.common.settings import load_settings, whole_number
from tests.helpers import Settings


def test_the_lowest_value_is_a_value_and_what_is_below_is_not():
    assert load_settings(Settings, ["--lr=0"]).lr == 0
    with pytest.raises(UserError, match="lr = -0.1: expected at least 0"):
        load_settings(Settings, ["--lr=-0.1"])
    assert (whole_number("1"), whole_number("3", least=3)) == (1, 3)
    for text, least in (("0", 1), ("2", 3), ("1.5", 1), ("-1", 1), ("", 1)):
        with pytest.raises(argparse.ArgumentTypeError, match=f"at least {least}"):
            whole_number(text, least)
