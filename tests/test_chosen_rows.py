"""
Test LazyAdam where only chosen rows of a table may change.
"""
import copy

import pytest
import torch

from lib.distributed.sharded_values import ShardedValueTable
from results.teach import RowSGD
from test_pkm import assert_near
from tests.helpers import assert_same
from tests.test_pkm_modes import run_on_ranks
from values import LazyAdam, ValueTable

SLOTS, DIM = 30, 5
CHOSEN = torch.tensor([17, 2, 29, 8, 11, 3])  # in no order
SETTINGS = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}


def new_table(chosen=CHOSEN):
    torch.manual_seed(0)
    table = ValueTable(SLOTS, DIM).double()
    return table, LazyAdam([{"params": [table], "rows": chosen}], **SETTINGS)


def draw(step, tokens=3, slots=SLOTS):
    """Draw slots, weights and the gradient of some tokens, which read 2 x 3 rows each."""
    generator = torch.Generator().manual_seed(step)
    like = {"dtype": torch.float64, "generator": generator}
    return (torch.randint(slots, (tokens, 2, 3), generator=generator, dtype=torch.int32),
            torch.rand(tokens, 2, 3, **like), torch.randn(tokens, DIM, **like))


def backward(table, slots, weights, grad_out):
    (table(slots, weights) * grad_out).sum().backward()


def test_the_studys_sgd_moves_chosen_rows_as_a_dense_computation_says():
    table = new_table()[0]
    optimizer = RowSGD([{"params": [table], "rows": CHOSEN}], lr=0.5)
    expected = table.weight.detach().clone()
    for step in range(3):
        slots, weights, grad_out = draw(step)
        [grad] = torch.autograd.grad(
            ((expected.requires_grad_()[slots.long()] * weights[..., None]).sum((1, 2)) * grad_out
             ).sum(), expected)
        expected = expected.detach()
        expected[CHOSEN] -= 0.5 * grad[CHOSEN]
        backward(table, slots, weights, grad_out)
        optimizer.step()
    assert_near(table.weight, expected, 1e-12)


def test_chosen_rows_move_as_a_dense_computation_says():
    """Count steps for the whole table. Rows that were not read keep their moments."""
    table, optimizer = new_table()
    before = table.weight.detach().clone()
    weight, first, second = before.clone(), torch.zeros_like(before), torch.zeros_like(before)
    (beta1, beta2), chosen = SETTINGS["betas"], torch.zeros(SLOTS, dtype=torch.bool)
    chosen[CHOSEN] = True
    moves = []
    for step in range(1, 9):
        grad, read = torch.zeros_like(before), torch.zeros(SLOTS, dtype=torch.bool)
        for part in range(2):  # two backward passes for each update
            slots, weights, grad_out = draw(10 * step + part)
            backward(table, slots, weights, grad_out)
            products = weights[..., None] * grad_out[:, None, None]
            grad.index_add_(0, slots.flatten(), products.flatten(0, 2))
            read[slots.flatten().long()] = True
        optimizer.step()
        rows = chosen & read
        moves.append(int(rows.sum()))
        first[rows] = beta1 * first[rows] + (1 - beta1) * grad[rows]
        second[rows] = beta2 * second[rows] + (1 - beta2) * grad[rows]**2
        root = (1 - beta2**step)**0.5
        weight[rows] -= (SETTINGS["lr"] / (1 - beta1**step) * root * first[rows]
                         / (second[rows].sqrt() + SETTINGS["eps"]))
        assert_near(table.weight, weight, 1e-12)
    state = optimizer.state[table.weight]
    assert_near(state["exp_avg"], first, 1e-12)
    assert_near(state["exp_avg_sq"], second, 1e-12)
    assert state["step"] == 8
    assert 0 < min(moves) < max(moves)  # not all chosen rows are read in each step
    assert torch.equal(table.weight[~chosen], before[~chosen])
    assert not state["exp_avg"][~chosen].any() and not state["exp_avg_sq"][~chosen].any()
    assert (table.weight != before)[chosen].all()


def test_chunks_of_chosen_rows_do_not_change_the_result(monkeypatch):
    results = []
    for chunk in (2**18, 2 * DIM):
        monkeypatch.setattr("values.CHUNK", chunk)
        table, optimizer = new_table()
        backward(table, *draw(1, tokens=20))
        optimizer.step()
        results.append(table.weight.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("case", ["others", "none", "weight 0"])
def test_where_no_chosen_row_was_read_nothing_moves(case):
    """A step before gives the rows a momentum, by which they could move."""
    table, optimizer = new_table()
    backward(table, *draw(1, tokens=20))
    optimizer.step()
    before, state = copy.deepcopy((table.weight.detach(), optimizer.state_dict()["state"]))
    slots, weights, grad_out = draw(2)
    if case == "others":
        slots = slots % 2  # 0 and 1 are not chosen
    elif case == "none":
        optimizer.param_groups[0]["rows"] = CHOSEN[:0]
    else:
        weights = weights.where(~torch.isin(slots, CHOSEN), 0)
    backward(table, slots, weights, grad_out)
    optimizer.step()
    assert torch.equal(table.weight, before)
    assert_same(optimizer.state_dict()["state"], state)
    assert not table.reads


def test_other_rows_do_not_move_by_an_earlier_momentum():
    table, optimizer = new_table(chosen=None)
    everything = torch.arange(SLOTS).view(5, 2, 3), *draw(1, tokens=5)[1:]
    backward(table, *everything)
    optimizer.step()
    optimizer.param_groups[0]["rows"] = CHOSEN
    state = optimizer.state[table.weight]
    tensors = table.weight.detach(), state["exp_avg"], state["exp_avg_sq"]
    before = copy.deepcopy(tensors)
    backward(table, *everything)
    optimizer.step()
    for new, old in zip(tensors, before, strict=True):
        moved = (new != old).any(1).nonzero().flatten()
        assert old.any(1).all() and torch.equal(moved, CHOSEN.sort().values)


def test_tables_have_rows_of_their_own():
    tables = [new_table()[0] for _ in range(3)]
    rows = [torch.tensor([1, 2]), torch.tensor([5]), None]
    optimizer = LazyAdam([{"params": [table], "rows": row}
                          for table, row in zip(tables, rows, strict=True)], lr=0.1)
    before = tables[0].weight.detach().clone()
    for table in tables:
        backward(table, torch.arange(SLOTS).view(5, 2, 3), *draw(1, tokens=5)[1:])
    optimizer.step()
    moved = [(table.weight != before).any(1).nonzero().flatten().tolist() for table in tables]
    assert moved == [[1, 2], [5], list(range(SLOTS))]


def goes_on(table, optimizer, saved, weight):
    """Load the state dicts `saved` and `weight` into a new table. It must move as `table` does."""
    again, other = new_table(chosen=None)
    again.load_state_dict(weight)
    other.load_state_dict(saved)
    for each, updates in ((table, optimizer), (again, other)):
        backward(each, *draw(2))
        updates.step()
    assert torch.equal(again.weight, table.weight)
    return again


def test_a_state_dict_keeps_the_rows_and_goes_on():
    table, optimizer = new_table()
    backward(table, *draw(1))
    optimizer.step()
    saved, weight = copy.deepcopy((optimizer.state_dict(), table.state_dict()))
    assert torch.equal(saved["param_groups"][0]["rows"], CHOSEN)
    again = goes_on(table, optimizer, saved, weight)
    assert torch.equal(again.weight[:2], new_table()[0].weight[:2])


def test_a_state_dict_of_before_there_were_rows_loads_and_steps():
    table, optimizer = new_table(chosen=None)
    backward(table, *draw(1))
    optimizer.step()
    saved, weight = copy.deepcopy((optimizer.state_dict(), table.state_dict()))
    for group in saved["param_groups"]:
        assert group.pop("rows", "absent") is None
    again = goes_on(table, optimizer, saved, weight)
    assert not torch.equal(again.weight, weight["weight"])


# several ranks


def sharded(rank, world):
    table = ShardedValueTable(ValueTable(SLOTS, 2 * world))
    LazyAdam([{"params": [table], "rows": None}])
    with pytest.raises(TypeError, match="of a table that is not cut over ranks"):
        LazyAdam([{"params": [table], "rows": CHOSEN}])


def test_a_table_that_is_cut_over_ranks_is_refused(tmp_path):
    run_on_ranks(sharded, 2, tmp_path)


def part_of(step, rank):
    """Draw a rank's tokens. In step 2 the first rank reads no chosen row."""
    slots, weights, grad_out = draw(10 * step + rank, tokens=2 + 3 * rank)
    return slots % 2 if step == 2 and rank == 0 else slots, weights, grad_out


def train_replica(rank, world, expected):
    table, optimizer = new_table()
    for step in range(5):
        backward(table, *part_of(step, rank))
        optimizer.step()
        assert_near(table.weight, expected[step], 1e-12)
    others = ~torch.isin(torch.arange(SLOTS), CHOSEN)
    assert torch.equal(table.weight[others], new_table()[0].weight[others])


def test_two_ranks_train_chosen_rows_as_one_process(tmp_path):
    table, optimizer = new_table()
    expected = []
    for step in range(5):
        slots, weights, grad_out = (torch.cat(parts) for parts in zip(
            part_of(step, 0), part_of(step, 1), strict=True))
        backward(table, slots, weights, grad_out / 2)  # the mean of the ranks
        optimizer.step()
        expected.append(table.weight.detach().clone())
    run_on_ranks(train_replica, 2, tmp_path, expected)


@pytest.mark.parametrize("rows", [[1, 2], torch.ones(SLOTS, dtype=torch.bool), torch.tensor([-1]),
                                  torch.tensor([SLOTS]), torch.tensor(1), torch.tensor([1.0])])
def test_what_are_no_row_numbers(rows):
    with pytest.raises(TypeError, match=f"row numbers under {SLOTS}"):
        LazyAdam([{"params": [ValueTable(SLOTS, 4)], "rows": rows}])
