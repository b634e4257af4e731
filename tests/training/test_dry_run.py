"""
What a dry run says of a step's speed.
"""
import re

from tests.helpers import TINY, train


def test_the_speed_is_of_all_tokens_of_a_step(place, capsys):
    """A step has accumulation x batch_size x seq_len tokens."""
    assert train("--dry_run=True") == 0
    said = capsys.readouterr().out
    found = re.search(r"(\S+) s a step of [\d,]+ tokens, ([\d,]+) tokens/s", said)
    tokens = float(found[1]) * float(found[2].replace(",", ""))
    expected = TINY["accumulation"] * TINY["batch_size"] * TINY["seq_len"]
    assert abs(tokens / expected - 1) < 0.02  # three digits are printed
