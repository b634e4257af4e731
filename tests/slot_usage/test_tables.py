"""
The cells of tables.
"""
import json

import pytest

from lib.errors import UserError
from lib.figures import USAGE, curves_table, pruning_table, usage_cells, write_table


def test_each_metric_is_in_its_column():
    """Two layers, two maskings: a cell is the mean of a layer; the uniform shares are of one."""
    usage = {"mu": 0.5, "mu_uniform": 0.75, "top1_mu": 0.25, "top1_mu_uniform": 0.375, "kl_u": 1.5,
             "kl_w": 2.5, "effective_k": 3.5, "accesses": 4000}
    other = usage | {"mu": 0.3, "top1_mu": 0.15, "kl_u": 0.5, "kl_w": 1.0, "effective_k": 2.5}
    cells = usage_cells([{2: usage, 3: usage}, {2: other, 3: usage}])
    assert list(zip(USAGE, cells, strict=True)) == [
        ("layers", "2/3"), ("MU %", "40.0/50.0"), ("uniform", "75.0"),
        ("top-1 MU %", "20.0/25.0"), ("uniform", "37.5"), ("KL_u", "1.00/1.50"),
        ("KL_w", "1.75/2.50"), ("effective k", "3.0/3.5"), ("accesses", "4,000")]


def test_a_pruned_memory_is_compared_with_the_whole_one():
    whole = {"run": "a", "data": "docs", "keep": 1, "rows": 4096, "model_bytes": 5e6,
             "float32_bytes": 2e6, "float32_perplexity": 20.0, "int8_bytes": 6e5,
             "int8_perplexity": 20.1}
    half = whole | {"keep": 0.5, "rows": 2049, "model_bytes": 4e6, "float32_bytes": 1e6,
                    "float32_perplexity": 20.4, "int8_bytes": 3e5, "int8_perplexity": 19.8}
    header, rows, note = pruning_table([whole, half])
    assert list(zip(header, rows[1], strict=True)) == [
        ("run", "a"), ("kept", "50.0%"), ("rows", "2,049"), ("model MB", "4.00"),
        ("memory MB", "1.00"), ("ppl", 20.4), ("change", "+2.00%"), ("int8 MB", "0.30"),
        ("ppl", 19.8), ("change", "-1.00%")]
    assert rows[0][6:] == ["+0.00%", "0.60", 20.1, "+0.50%"] and "data/docs" in note


def test_curves_say_whose_usage_is_of_rows():
    def log(*n_rows):
        return [{"step": step, "perplexity": 9.0, "accuracy": 0.5,
                 "layers": {"2": {"top1_mu": 0.1 * (step + 1)}}, **({"n_rows": n} if n else {})}
                for step, n in enumerate(n_rows)]

    _, rows, note = curves_table({"a": log(0, 0), "b": log(0, 0, 17), "c": log(17, 17)}, "docs")
    assert [row[-1] for row in rows] == ["20.0", "20.0", "20.0"]
    assert note.endswith("count. Usage of c counts rows of values, which slots share. Usage of b: "
                         "before it was pruned.")


def test_a_figure_that_cannot_be_drawn_leaves_the_old_table(tmp_path, capsys):
    def fail(data):
        raise UserError("no matplotlib")

    out = str(tmp_path / "t")
    write_table(out, ["a"], [[1]], "note", {})
    with pytest.raises(UserError):
        write_table(out, ["a"], [[2]], "note", {}, fail)
    assert "1" in (tmp_path / "t.md").read_text() and len(list(tmp_path.iterdir())) == 2


def test_a_number_that_is_none_is_null_in_the_json(tmp_path):
    write_table(str(tmp_path / "t"), ["a"], [[1]], "note", [{"perplexity": float("nan")}])
    assert json.loads((tmp_path / "t.json").read_text(), parse_constant=pytest.fail) == [
        {"perplexity": None}]
