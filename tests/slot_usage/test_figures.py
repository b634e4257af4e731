"""
Figures 2 to 4: lines, bars, legends, and whether light pages, dark pages and phones can show them.
"""
import io
import math

import pytest

from lib import figures
from lib.errors import UserError
from lib.figures import (
    draw_class_distances,
    draw_curves,
    draw_pruning,
    draw_staleness,
    run_names,
)

pytest.importorskip("matplotlib")


def evaluations(first, *perplexities, usage=(0.5, 0.5)):
    layers = {str(n): {"top1_mu": share} for n, share in enumerate(usage, 2)}
    return [{"step": first + n, "perplexity": p, "layers": layers}
            for n, p in enumerate(perplexities)]


def draw(runs):
    return draw_curves(runs, run_names(list(runs), None))


def legend_texts(figure):
    [legend] = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_curves_show_where_initialized_runs_start():
    """Their start is marked and in view, however high. No two runs look alike in grey."""
    runs = {"base": evaluations(0, 30000, 9, 5), "more": evaluations(2, 5, 4),
            "pkm": evaluations(2, 70, 6, 3), "resm": evaluations(2, 5.1, 3.5)}
    upper = draw(runs).axes[0]
    (first, last), (low, high) = upper.get_xlim(), upper.get_ylim()
    assert first < 1 and last > 4 and 2.5 < low < 3 and 70 < high < 90
    assert upper.get_yscale() == "log"
    base, *others = upper.lines
    assert base.get_marker() == "None" and all(line.get_marker() == "o" for line in others)
    assert len({str(line._dash_pattern) for line in upper.lines}) == len(runs)


def test_a_curve_from_scratch_comes_in_from_above():
    upper = draw({"base": evaluations(0, 30000, 5000, 90, 42, 40, usage=())}).axes[0]
    assert upper.lines[0].get_xdata().tolist() == [2, 3, 4]  # twice the end is 80
    assert 80 < upper.get_ylim()[1] < 90


def test_curves_are_not_cut_inside():
    hump = evaluations(2, 40, 90, 85, 39)  # higher than twice the end
    assert draw({"hump": hump}).axes[0].lines[0].get_ydata().tolist() == [40, 90, 85, 39]


def test_a_diverged_run_ends_where_it_was_a_number():
    runs = {"good": evaluations(0, 9, 5, 4), "bad": evaluations(0, 9, 6, math.nan)}
    upper = draw(runs).axes[0]
    low, high = upper.get_ylim()
    assert 3.5 < low < 4 and 8 < high < 10
    assert math.isnan(upper.lines[1].get_ydata()[-1])
    assert draw({"bad": runs["bad"]}).axes[0].get_ylim()[0] < 6
    with pytest.raises(UserError, match="nothing to draw"):
        draw({"nan": evaluations(0, math.nan)})


def test_rows_of_a_pruned_memory_are_not_drawn_as_slots():
    log = evaluations(0, 9, 5, 6, 7)
    log[-2]["n_rows"], log[-1]["n_rows"] = 17, 5
    lower = draw({"pruned": log}).axes[1]
    assert list(lower.lines[0].get_xdata()) == [0, 1]
    assert list(lower.lines[0].get_ydata()) == [50, 50]


def test_usage_stands_below_on_the_same_steps():
    base = evaluations(0, 90, 42, 40, usage=())
    figure = draw({"out/base": base, "out/resm": evaluations(2, 41, 30, 20)})
    upper, lower = figure.axes
    assert upper.get_xlim() == lower.get_xlim() and upper.bbox.y0 > lower.bbox.y1
    assert legend_texts(figure) == ["base", "resm", "layer 2", "layer 3"]
    assert [line.get_marker() for line in lower.lines] == ["o", "s"] * 2  # layers, their legend
    assert len(draw({"out/base": base}).axes) == 1


def test_the_axis_speaks_of_an_initial_model_only_if_there_is_one():
    base, more = evaluations(0, 9, 8), evaluations(2, 8, 7)
    labels = [draw(runs).axes[-1].get_xlabel() for runs in ({"a": base}, {"a": base, "b": more})]
    assert labels == ["training steps", "training steps, those of the initial model included"]


def test_a_layer_has_the_same_marker_in_all_runs():
    one = [evaluation | {"layers": {"10": {"top1_mu": 0.5}}} for evaluation in evaluations(0, 9, 8)]
    figure = draw({"out/one": one, "out/two": evaluations(0, 9, 8)})
    assert legend_texts(figure) == ["one", "two", "layer 2", "layer 3", "layer 10"]
    of_run, legend = figure.axes[1].lines[0], figure.axes[1].lines[-1]
    assert of_run.get_marker() == legend.get_marker() == "^" and legend.get_label() == "layer 10"


def test_runs_are_called_by_their_names_or_folders():
    assert run_names(["out/a", "b/seed0"], None) == {"out/a": "a", "b/seed0": "b/seed0"}
    assert run_names(["out/a"], [r"$\beta$ = 1"]) == {"out/a": r"$\beta$ = 1"}
    name = run_names(["out/$a_$b"], None)["out/$a_$b"]
    figure = draw_curves({"r": evaluations(0, 90, 50, 40)}, {"r": name})
    figure.savefig(io.BytesIO(), format="svg")  # raised for a formula that is none
    assert figure.legends[0].get_texts()[0].get_text() == name == r"\$a_\$b"
    with pytest.raises(UserError, match="--names: 2 names for 1 runs"):
        run_names(["out/a"], ["x", "y"])


def test_the_legend_names_every_line_in_its_look_beside_the_panels():
    runs = {f"out/run_{n}": evaluations(0, 90, 50 + n, 40 + n) for n in range(7)}
    runs["out/a_run_of_another_length"] = evaluations(0, 900, 800, 41, 40, usage=(0.5,))
    figure = draw(runs)
    figure.draw_without_rendering()
    [legend] = figure.legends
    assert legend_texts(figure)[:8] == [path.removeprefix("out/") for path in runs]
    for line, entry in zip(figure.axes[0].lines, legend.get_lines(), strict=False):
        assert line.get_color() == entry.get_color()
        assert line.get_linestyle() == entry.get_linestyle()
    box = legend.get_window_extent()
    assert figure.bbox.x1 >= box.x1 and figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
    assert not any(box.overlaps(axes.get_tightbbox()) for axes in figure.axes)


CLASSES = [{"run": "out/a", "layer": 2, "when": when, "kl_between": length, "kl_floor": length / 4,
            "iou_between": length / 8, "iou_floor": length / 2}
           for when, length in (("after", 2), ("before", 0.5))]


def test_bars_stand_beside_their_noise_floor():
    kl, iou = draw_class_distances(CLASSES, {"out/a": "a"}).axes
    assert [label.get_text() for label in kl.get_yticklabels()] == [
        "a\nlayer 2, after", "a\nlayer 2, before"]  # from below
    assert [patch.get_width() for patch in kl.patches] == [2, 0.5, 0.5, 0.125]
    assert [patch.get_width() for patch in iou.patches] == [0.25, 0.0625, 1, 0.25]
    assert [text.get_text() for text in kl.texts] == ["2.00", "0.50", "0.50", "0.12"]
    for between, floor in zip(kl.patches[:2], kl.patches[2:], strict=True):
        assert floor.get_hatch() and not between.get_hatch()
        assert floor.get_y() + floor.get_height() == pytest.approx(between.get_y())


STALE = [{"run": run, "layer": layer, "slots": {"never": 0.25, 100: 0.05, 2000: 0.7}}
         for run, layer in (("out/a", 2), ("out/a", 3), ("out/b", 2))]


def test_staleness_has_a_panel_for_each_run_and_layer():
    figure = draw_staleness(STALE, {"out/a": "memory added", "out/b": "b"})
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "memory added\nlayer 2", "memory added\nlayer 3", "b\nlayer 2"]
    first = figure.axes[0]
    assert [patch.get_height() for patch in first.patches] == [25, 5, 70]
    assert [text.get_text() for text in first.texts] == ["25.0", "", "70.0"]
    assert [label.get_text() for label in first.get_xticklabels()] == ["never", "100", "2,000"]
    assert first.patches[0].get_hatch() and not first.patches[1].get_hatch()


def contrast(one, other):
    """WCAG 2's contrast of two colours."""
    from matplotlib.colors import to_rgb

    def luminance(color):
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
                  for c in to_rgb(color)]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_all_colours_have_contrast_on_white_and_on_dark():
    for page in ("#ffffff", "#0d1117"):
        assert all(contrast(color, page) >= 3 for color in figures.COLORS)
        assert contrast(figures.INK, page) >= 4.2


def test_figures_have_no_background_of_their_own_and_text_for_a_phone():
    image = pytest.importorskip("matplotlib.image")
    names = {"out/a": "memory added (ResM)", "out/b": "without memory"}
    runs = {"out/a": evaluations(5, 40, 30, 28), "out/b": evaluations(0, 90, 42, 40, usage=())}
    for figure in (draw_curves(runs, names), draw_staleness(STALE, names),
                   draw_class_distances(CLASSES, names)):
        file = io.BytesIO()
        figure.savefig(file)
        pixels = image.imread(io.BytesIO(file.getvalue()))
        assert pixels.shape[1] == 825 and (pixels[..., 3] == 0).mean() > 0.7
        visible = pixels[pixels[..., 3] == 1]
        assert visible[:, :3].sum(1).max() < 2.6  # nothing white, nothing black
        assert visible[:, :3].sum(1).min() > 0.5
        texts = [text for text in figure.findobj(lambda part: hasattr(part, "get_fontsize"))
                 if text.get_text()]
        points = figure.get_figwidth() * 72
        assert min(text.get_fontsize() for text in texts) * 400 / points >= 11  # pixels of 400
        assert all(text.get_color() == figures.INK for text in texts)


def test_pruned_memories_are_compared_with_their_own_whole():
    records = [{"run": run, "keep": keep, "float32_bytes": size, "int8_bytes": size / 4,
                "float32_perplexity": first * rise, "int8_perplexity": first * (rise + 0.01)}
               for run, first in (("out/a", 20.0), ("out/b", 50.0))
               for keep, size, rise in ((1.0, 800, 1.0), (0.5, 500, 1.02))]
    figure = draw_pruning(records, run_names(["out/a", "out/b"], None))
    assert legend_texts(figure) == ["a, float32", "a, int8", "b, float32", "b, int8"]
    lines = [line.get_xydata().ravel() for line in figure.axes[0].lines]
    float32, int8 = [100, 0, 62.5, 2], [25, 1, 15.625, 3]
    assert [line.tolist() for line in lines] == [pytest.approx(float32, abs=1e-9),
                                                 pytest.approx(int8)] * 2
