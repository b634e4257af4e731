"""
Tables and figures: cells, bars and lines.
"""
import json

import pytest

from lib.figures import (
    USAGE,
    draw_class_distances,
    draw_curves,
    draw_staleness,
    markdown,
    usage_cells,
    write_table,
)


def test_a_table_in_markdown():
    assert markdown(["name", "x|y"], [["a", 1.234], ["long one", None]]) == (
        "| name     | x\\|y |\n| -------- | ---- |\n| a        | 1.23 |\n| long one |      |\n")


def test_each_metric_is_in_its_column():
    usage = {"mu": 0.5, "mu_uniform": 0.75, "top1_mu": 0.25, "top1_mu_uniform": 0.375, "kl_u": 1.5,
             "kl_w": 2.5, "effective_k": 3.5, "accesses": 4000}
    assert usage_cells({2: usage, 3: usage | {"mu": 0.4}}) == {
        "layers": "2/3", "MU": "50.0%/40.0%", "uniform MU": "75.0%/75.0%",
        "top-1 MU": "25.0%/25.0%", "uniform top-1": "37.5%/37.5%", "KL_u": "1.50/1.50",
        "KL_w": "2.50/2.50", "effective k": "3.5/3.5", "accesses": "4,000/4,000"}
    assert usage_cells({}) == dict.fromkeys(["layers", *USAGE], "-")


def test_a_table_is_printed_and_written(tmp_path, capsys):
    """Rows may have other columns. JSON knows no nan."""
    out = str(tmp_path / "new" / "t")
    rows = [{"run": "a", "5": 1}, {"run": "b", "7": 2}]
    write_table(out, rows, "A note.", [{"x": float("nan")}])
    text = capsys.readouterr().out
    assert (tmp_path / "new/t.md").read_text() == text
    assert text.splitlines()[0] == "| run | 5 | 7 |" and text.endswith("A note.\n")
    saved = json.loads((tmp_path / "new/t.json").read_text(), parse_constant=pytest.fail)
    assert saved == [{"x": None}]
    write_table(None, [{"run": "a"}], "", [])
    assert len(list(tmp_path.rglob("t.*"))) == 2


def evaluations(first, *perplexities, usage=(0.5, 0.75)):
    layers = {str(n): {"top1_mu": share} for n, share in enumerate(usage, 2)}
    return [{"step": first + n, "perplexity": p, "layers": layers}
            for n, p in enumerate(perplexities)]


def test_curves_have_a_line_for_each_run_and_layer():
    pytest.importorskip("matplotlib")
    runs = {"out/base": evaluations(0, 30000, 9, 5, usage=()),
            "out/more": evaluations(2, 5, 4),
            "out/nan": evaluations(0, 9, float("nan"), usage=(0.5,))}
    figure = draw_curves(runs)
    upper, lower = figure.axes
    base, more, _ = upper.lines
    assert base.get_xydata().tolist() == [[0, 30000], [1, 9], [2, 5]]
    assert more.get_xydata().tolist() == [[2, 5], [3, 4]]
    assert upper.get_ylim()[1] == 10  # the start of base is cut off
    assert {line.get_label(): line.get_ydata().tolist() for line in lower.lines} == {
        "more, layer 2": [50, 50], "more, layer 3": [75, 75], "nan, layer 2": [50, 50]}


def test_staleness_has_a_panel_for_each_run_and_layer():
    pytest.importorskip("matplotlib")
    records = [{"run": run, "layer": layer, "slots": {"never": 0.25, 100: 0.05, 2000: 0.7}}
               for run, layer in (("out/a", 2), ("out/a", 3), ("out/b", 2))]
    figure = draw_staleness(records)
    assert [axes.get_title() for axes in figure.axes] == [
        "a, layer 2", "a, layer 3", "b, layer 2"]
    for axes in figure.axes:
        assert [patch.get_height() for patch in axes.patches] == [25, 5, 70]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["never", "100", "2000"]


def test_bars_of_classes_stand_beside_their_noise_floor():
    pytest.importorskip("matplotlib")
    records = [{"run": "out/a", "layer": 2, "when": when, "kl_between": length,
                "kl_floor": length / 4, "iou_between": length / 8, "iou_floor": length / 2}
               for when, length in (("before", 0.5), ("after", 2))]
    kl, iou = draw_class_distances(records).axes
    assert [label.get_text() for label in kl.get_yticklabels()] == [
        "a\nlayer 2, before", "a\nlayer 2, after"]
    assert [patch.get_width() for patch in kl.patches] == [0.5, 2, 0.125, 0.5]
    assert [patch.get_width() for patch in iou.patches] == [0.0625, 0.25, 0.25, 1]
