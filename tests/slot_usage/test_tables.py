"""
The cells of tables of slot usage.
"""
from lib.slot_usage.tables import USAGE, usage_cells


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
