"""
Figures 2 to 4: lines, bars, legends.
"""
import pytest

from lib.slot_usage.figures import draw_class_distances, draw_curves, draw_staleness

pytest.importorskip("matplotlib")


def evaluations(first, *perplexities, usage=(0.5, 0.5)):
    layers = {str(n): {"top1_mu": share} for n, share in enumerate(usage, 2)}
    return [{"step": first + n, "perplexity": p, "layers": layers}
            for n, p in enumerate(perplexities)]


def legend_texts(figure):
    [legend] = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_curves_show_where_initialized_runs_start():
    """Their start is marked and in view, however high. No two runs look alike in grey."""
    runs = {"base": evaluations(0, 30000, 9, 5), "more": evaluations(2, 5, 4),
            "pkm": evaluations(2, 70, 6, 3), "resm": evaluations(2, 5.1, 3.5)}
    left = draw_curves(runs).axes[0]
    (first, last), (low, high) = left.get_xlim(), left.get_ylim()
    assert 0 < first < 2 and last > 4 and low < 3 and 70 < high < 30000
    ticks = {text.get_text() for text in left.get_yticklabels(which="both")}
    assert {"3", "4", "10", "50"} <= ticks and left.get_yscale() == "log"
    base, *others = left.lines
    assert base.get_marker() == "None" and all(line.get_marker() == "o" for line in others)
    assert len({str(line._dash_pattern) for line in left.lines}) == len(runs)


def test_usage_has_its_own_panel_from_where_memories_start():
    base = evaluations(0, 90, 42, 40, usage=())
    figure = draw_curves({"out/base": base, "out/resm": evaluations(2, 41, 30, 20)})
    left, right = figure.axes
    assert left.get_xlim()[0] < 1 and 1.8 < right.get_xlim()[0] < 2 and right.get_xlim()[1] > 4
    assert legend_texts(figure) == ["base", "resm", "layer 2", "layer 3"]
    assert [line.get_marker() for line in right.lines] == ["o", "s"] * 2  # layers, their legend
    assert len(draw_curves({"out/base": base}).axes) == 1


def test_a_layer_has_the_same_marker_in_all_runs():
    one = [evaluation | {"layers": {"10": {"top1_mu": 0.5}}} for evaluation in evaluations(0, 9, 8)]
    figure = draw_curves({"out/one": one, "out/two": evaluations(0, 9, 8)})
    assert legend_texts(figure) == ["one", "two", "layer 2", "layer 3", "layer 10"]
    of_run, legend = figure.axes[1].lines[0], figure.axes[1].lines[-1]
    assert of_run.get_marker() == legend.get_marker() == "^" and legend.get_label() == "layer 10"


def test_the_legend_names_every_line_in_its_look_beside_the_panels():
    runs = {f"out/run_{n}": evaluations(0, 90, 50 + n, 40 + n) for n in range(7)}
    runs["out/a_run_with_a_long_name"] = evaluations(0, 900, 800, usage=(0.5,))
    figure = draw_curves(runs)
    figure.canvas.draw()
    [legend] = figure.legends
    assert legend_texts(figure)[:8] == [path.removeprefix("out/") for path in runs]
    for line, entry in zip(figure.axes[0].lines, legend.get_lines(), strict=False):
        assert line.get_color() == entry.get_color()
        assert line.get_linestyle() == entry.get_linestyle()
    box = legend.get_window_extent()
    assert figure.bbox.x1 >= box.x1 and figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
    assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)


def test_bars_stand_beside_their_noise_floor():
    records = [{"run": "out/a", "layer": 2, "when": when, "kl_between": height,
                "kl_floor": height / 4, "iou_between": height / 8, "iou_floor": height / 2}
               for when, height in (("after", 2), ("before", 0.5))]
    kl, iou = draw_class_distances(records).axes
    assert [patch.get_height() for patch in kl.patches] == [0.5, 2, 0.125, 0.5]
    assert [patch.get_height() for patch in iou.patches] == [0.0625, 0.25, 0.25, 1]
    assert [text.get_text() for text in kl.texts] == ["0.50", "2.00", "0.12", "0.50"]
    assert [label.get_text() for label in kl.get_xticklabels()] == [
        "a\nlayer 2\nbefore", "a\nlayer 2\nafter"]


def test_staleness_has_a_panel_for_each_run_and_layer():
    records = [{"run": run, "layer": layer, "slots": {"never": 0.25, 100: 0.75}}
               for run, layer in (("out/a", 2), ("out/a", 3), ("out/b", 2))]
    figure = draw_staleness(records)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "out/a, layer 2", "out/a, layer 3", "out/b, layer 2"]
    never, used = figure.axes[0].patches
    assert [never.get_height(), used.get_height()] == [25, 75]
    assert never.get_facecolor() != used.get_facecolor()
