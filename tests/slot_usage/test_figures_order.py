"""
The order of runs in Figure 4.
"""
import pytest

from lib.figures import draw_class_distances

pytest.importorskip("matplotlib")


def test_runs_are_in_the_order_in_which_they_were_named():
    """From top to bottom, whatever their folders are called; in a run by layer and time."""
    records = [{"run": run, "layer": layer, "when": when, "kl_between": 1, "kl_floor": 0.5,
                "iou_between": 0.5, "iou_floor": 0.75}
               for run in ("out/a", "out/b") for layer in (3, 2) for when in ("after", "before")]
    figure = draw_class_distances(records, {"out/b": "first", "out/a": "second"})
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[::-1] == [f"{name}\nlayer {layer}, {when}" for name in ("first", "second")
                            for layer in (2, 3) for when in ("before", "after")]
