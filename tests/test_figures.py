"""
What the figures show.
"""
import pytest

import figures


def test_curves_show_where_initialized_runs_start():
    """However high, and marked; not where the others start. No two runs look alike in grey."""
    pytest.importorskip("matplotlib")

    def evaluations(first, *perplexities):
        return [{"step": first + n, "perplexity": p, "layers": {"2": {"top1_mu": 0.5}}}
                for n, p in enumerate(perplexities)]

    found = {"base": evaluations(0, 30000, 9, 5), "more": evaluations(2, 5, 4),
             "pkm": evaluations(2, 70, 6, 3), "resm": evaluations(2, 5.1, 3.5)}
    left = figures.draw_curves(found).axes[0]
    (first, last), (low, high) = left.get_xlim(), left.get_ylim()
    assert 0 < first < 2 and last > 4 and low < 3 and 70 < high < 30000
    assert len(left.get_yticks()) > 3 and left.get_yscale() == "log"
    base, *others = left.lines
    assert base.get_marker() == "None" and all(line.get_marker() == "o" for line in others)
    assert len({str(line._dash_pattern) for line in left.lines}) == len(found)
