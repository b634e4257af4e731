"""
What the figures show.
"""
import itertools

import pytest

from lib.slot_usage.figures import draw_bars, draw_curves

pytest.importorskip("matplotlib")


def evaluations(first, *perplexities, usage=(0.5, 0.5)):
    layers = {str(n): {"top1_mu": share} for n, share in enumerate(usage, 2)}
    return [{"step": first + n, "perplexity": p, "layers": layers}
            for n, p in enumerate(perplexities)]


def names(axes):
    return [text.get_text() for text in axes.texts]


def test_curves_show_where_initialized_runs_start():
    """However high, and marked; not where the others start. No two runs look alike in grey."""
    found = {"base": evaluations(0, 30000, 9, 5), "more": evaluations(2, 5, 4),
             "pkm": evaluations(2, 70, 6, 3), "resm": evaluations(2, 5.1, 3.5)}
    left = draw_curves(found).axes[0]
    (first, last), (low, high) = left.get_xlim(), left.get_ylim()
    assert 0 < first < 2 and last > 4 and low < 3 and 70 < high < 30000
    assert len(left.get_yticks()) > 3 and left.get_yscale() == "log"
    base, *others = left.lines
    assert base.get_marker() == "None" and all(line.get_marker() == "o" for line in others)
    assert len({str(line._dash_pattern) for line in left.lines}) == len(found)


def test_usage_has_its_own_panel_from_where_memories_start():
    base = evaluations(0, 90, 42, 40, usage=())
    found = {"out/base": base, "out/resm": evaluations(2, 41, 30, 20)}
    left, right = draw_curves(found).axes
    assert left.get_xlim()[0] < 1 and 1.9 < right.get_xlim()[0] < 2 and right.get_xlim()[1] > 4
    assert sorted(names(left)) == ["base", "resm"]
    assert set(names(right)) == {"● resm, layer 2", "■ resm, layer 3"}
    assert len(draw_curves({"out/base": base}).axes) == 1


@pytest.mark.parametrize("spread", [0, 0.02])
def test_names_at_the_ends_of_lines_do_not_overlap(spread):
    found = {f"out/run_{n}": evaluations(0, 90, 50 + n * spread, 40 + n * spread,
                                         usage=(0.99, 0.99 - n * spread)) for n in range(6)}
    found["out/high"] = evaluations(0, 900, 800, usage=(0.5,))  # ends before the others, and far above
    figure = draw_curves(found)
    figure.canvas.draw()
    Text, edge = pytest.importorskip("matplotlib.text").Text, figure.bbox
    for axes in figure.axes:
        boxes = [Text.get_window_extent(text) for text in axes.texts]  # without its leader
        assert len(boxes) == len(axes.lines)
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        assert all(box.x0 >= 0 and box.x1 <= edge.x1 and box.y1 <= edge.y1 for box in boxes)
        heights = {text.get_text(): Text.get_window_extent(text).y0 for text in axes.texts}
        order = [name for name in sorted(heights, key=heights.get) if name[0] in "r■"]
        if spread:  # in the lines' own order, from below
            assert order == ([f"run_{n}" for n in range(6)] if axes is figure.axes[0] else
                             [f"■ run_{n}, layer 3" for n in reversed(range(6))])


def test_bars_stand_beside_their_noise_floor():
    bars = [(title, label, height, height / 4) for title in ("KL", "IOU")
            for label, height in (("before", 0.5), ("after", 2))]
    figure = draw_bars(bars, 1, 1.7, "%.2f")
    for axes in figure.axes:
        assert [patch.get_height() for patch in axes.patches] == [0.5, 2, 0.125, 0.5]
        assert names(axes) == ["0.50", "2.00", "0.12", "0.50"]
    bars = [(f"layer {n}", label, 10.0) for n in (2, 3, 4) for label in ("never", "100")]
    figure = draw_bars(bars, 2, 0.45, "%.1f", "step", "slots (%)")
    never, used = figure.axes[0].patches
    assert len(figure.axes) == 3 and never.get_facecolor() != used.get_facecolor()
