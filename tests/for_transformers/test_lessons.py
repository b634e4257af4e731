"""
Test memories of few rows: saved, side by side, and taken out again.
"""
import copy

import pytest
import torch

from lib.common.errors import UserError
from lib.for_transformers.adapter import find_memories, load_memory, save_memory, unload_memory
from lib.for_transformers.add_memory import add_memory
from tests.for_transformers.small_models import MEMORY, batch, logits, small_model
from tests.helpers import assert_same

files = pytest.importorskip("safetensors.torch")
SETUPS = pytest.mark.parametrize("kind, dtype", [
    ("LlamaForCausalLM", torch.float32), ("LlamaForCausalLM", torch.bfloat16),
    ("BertForMaskedLM", torch.float32), ("BertForMaskedLM", torch.bfloat16)])
A, B = {1: [3, 0, 14], 2: [5]}, {1: [1, 15], 2: [4, 6, 0]}  # rows of two lessons


def base(kind="LlamaForCausalLM", dtype=torch.float32):
    return small_model(kind).to(dtype).eval()


def with_lesson(rows, kind="LlamaForCausalLM", dtype=torch.float32, seed=0, **settings):
    """Make a model with a memory whose values are 0 but in some rows: {layer: rows}."""
    model = base(kind, dtype)
    torch.manual_seed(seed)
    tables = add_memory(model, (1, 2), values="zero", freeze=True, **{**MEMORY, **settings})
    for n, chosen in rows.items():
        torch.manual_seed(n + len(chosen))
        tables[n].weight.data[chosen] = torch.randn(len(chosen), 16)
    return model


@pytest.fixture
def lessons(tmp_path):
    """The folders of two lessons whose rows are disjoint."""
    save_memory(with_lesson(A), tmp_path / "a")
    save_memory(with_lesson(B), tmp_path / "b")
    return tmp_path / "a", tmp_path / "b"


def outputs(model):
    with torch.no_grad():
        return logits(model, *batch())


def contents(*folders):
    return {path: path.read_bytes() for folder in folders for path in folder.iterdir()}


# what is saved


@SETUPS
def test_rows_of_0_are_not_written_and_come_back(tmp_path, kind, dtype):
    model = with_lesson(A, kind, dtype)
    save_memory(model, tmp_path)
    found = files.load_file(tmp_path / "memory.safetensors")
    for n, rows in A.items():
        assert found[f"{n}.values.rows"].tolist() == sorted(rows)
        weight = find_memories(model)[n].values.weight
        assert torch.equal(found[f"{n}.values.weight"], weight[sorted(rows)])
        assert found[f"{n}.values.weight"].dtype == torch.float32
    tables = load_memory(again := base(kind, dtype), tmp_path)
    assert list(tables) == [1, 2] and tables[1] is find_memories(again)[1].values
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert torch.equal(outputs(again), outputs(model))
    assert not torch.equal(outputs(again), outputs(base(kind, dtype)))


def test_a_full_table_is_written_whole_and_an_empty_one_not_at_all(tmp_path):
    model = with_lesson({1: list(range(16))})
    save_memory(model, tmp_path)
    found = files.load_file(tmp_path / "memory.safetensors")
    assert found["1.values.weight"].shape == (16, 16) and "1.values.rows" not in found
    assert found["2.values.weight"].shape == (0, 16) and not len(found["2.values.rows"])
    load_memory(again := base(), tmp_path)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def change(name, function):
    """Make a function that changes, or with None removes, a tensor of a folder's file."""
    def damage(folder):
        tensors = files.load_file(folder / "memory.safetensors")
        new = function and function(tensors[name])
        tensors = {key: w for key, w in tensors.items() if key != name}
        files.save_file(tensors if new is None else {**tensors, name: new},
                        folder / "memory.safetensors")
    return damage


DAMAGED = {
    "dtype": change("1.values.rows", lambda rows: rows.int()),
    "float": change("1.values.rows", lambda rows: rows.float()),
    "too large": change("1.values.rows", lambda rows: rows + 2),
    "negative": change("1.values.rows", lambda rows: rows - 1),
    "fewer": change("1.values.rows", lambda rows: rows[:2].clone()),
    "two columns": change("1.values.rows", lambda rows: rows[:, None].repeat(1, 2)),
    "a number": change("1.values.rows", lambda rows: rows[0].clone()),
    "one row twice": change("1.values.rows", lambda rows: rows.clamp(min=3)),
    "other width": change("1.values.weight", lambda w: w[:, :8].clone()),
    "no values": change("1.values.weight", None),
    "no rows": change("1.values.rows", None),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_rows_are_refused_and_change_nothing(lessons, case):
    DAMAGED[case](lessons[0])
    words = "expected .16, 16" if case == "no rows" else "safetensors: 1.values.weight: its rows"
    for model in (base(), with_lesson(B)):
        before = copy.deepcopy(model.state_dict())
        for call in (load_memory, unload_memory)[:1 + bool(find_memories(model))]:
            with pytest.raises(UserError, match=words):
                call(model, lessons[0])
            assert_same(dict(model.state_dict()), dict(before))


def test_rows_of_a_layer_without_memory_are_refused(lessons):
    file = lessons[0] / "memory.safetensors"
    tensors = files.load_file(file)
    files.save_file({**tensors, "3.values.rows": torch.arange(2),
                     "3.values.weight": torch.ones(2, 16)}, file)
    with pytest.raises(UserError, match="3.values.weight: its rows are damaged"):
        load_memory(base(), lessons[0])


# side by side


@SETUPS
def test_two_lessons_in_any_order(lessons, kind, dtype, tmp_path):
    """Loaded both ways they are the same, and taken out both ways nothing of them is left."""
    for folder, rows in zip(lessons, (A, B), strict=True):
        save_memory(with_lesson(rows, kind), folder)  # in float32
    plain, kept = outputs(base(kind, dtype)), contents(*lessons)
    alone, states = [], []
    for folder in lessons:
        load_memory(model := base(kind, dtype), folder)
        alone.append(outputs(model))
    for order in (lessons, lessons[::-1]):
        model = base(kind, dtype)
        for folder in order:
            tables = load_memory(model, folder)
        assert list(tables) == [1, 2] and tables[2] is find_memories(model)[2].values
        states.append(model.state_dict())
        both = outputs(model)
        assert all(not torch.equal(both, other) for other in (plain, *alone))
    assert_same(dict(states[0]), dict(states[1]))
    taught = {n: set(table.weight.any(1).nonzero().flatten().tolist())
              for n, table in tables.items()}
    assert taught == {n: set(A[n] + B[n]) for n in (1, 2)}
    for first, second, left in ((0, 1, 1), (1, 0, 0)):
        model = base(kind, dtype)
        for folder in lessons:
            load_memory(model, folder)
        unload_memory(model, lessons[first])
        assert torch.equal(outputs(model), alone[left])
        unload_memory(model, lessons[second])
        assert torch.equal(outputs(model), plain)
        assert not any(memory.values.weight.any() for memory in find_memories(model).values())
        load_memory(model, lessons[first])  # its rows are free again
        assert torch.equal(outputs(model), alone[first])
    assert contents(*lessons) == kept


def refused(model, call, folder, words):
    before, y = copy.deepcopy(model.state_dict()), outputs(model)
    with pytest.raises(UserError, match=words):
        call(model, folder)
    assert_same(dict(model.state_dict()), dict(before))
    assert torch.equal(outputs(model), y)


def test_what_is_not_loaded_or_was_trained_is_not_taken_out(lessons):
    a, b = lessons
    refused(base(), unload_memory, a, "LlamaForCausalLM has no memory: nothing of")
    load_memory(model := base(), a)
    refused(model, unload_memory, b, f"{b}: the model does not have its value rows")
    load_memory(model, b)
    find_memories(model)[2].values.weight.data[4, 3] += 1e-3  # of b
    refused(model, unload_memory, b, f"{b}: the model does not have its value rows: .*trained")
    unload_memory(model, a)
    refused(model, unload_memory, a, f"{a}: the model does not have its value rows")
    refused(model, unload_memory, b.parent / "c", "c has no memory.json")


def test_rows_in_use_are_refused(lessons, tmp_path):
    a, _ = lessons
    load_memory(model := base(), a)
    refused(model, load_memory, a, f"{a}: 4 of its value rows are in use")
    save_memory(with_lesson({1: [2, 7], 2: [8, 5]}), tmp_path / "c")  # shares row 5
    refused(model, load_memory, tmp_path / "c", "c: 1 of its value rows are in use.*--beside")
    unload_memory(model, a)
    load_memory(model, tmp_path / "c")


def layers_1(folder):
    model = base()
    torch.manual_seed(0)
    add_memory(model, (1,), values="zero", freeze=True, **MEMORY)
    find_memories(model)[1].values.weight.data[2] = 1
    save_memory(model, folder)


OTHERS = {
    "queries": lambda folder: save_memory(with_lesson(B, seed=1), folder),
    "sizes": lambda folder: save_memory(with_lesson(B, topk=2), folder),
    "heads": lambda folder: save_memory(with_lesson(B, heads=4, key_dim=2), folder),
    "batch norm": lambda folder: save_memory(with_batch_norm(), folder),
    "layers": layers_1,
}


def with_batch_norm():
    model = base()
    add_memory(model, (1, 2), values="zero", **MEMORY)
    return model.requires_grad_(False)


@pytest.mark.parametrize("case", OTHERS)
def test_other_queries_are_refused(lessons, tmp_path, case):
    OTHERS[case](tmp_path / "c")
    load_memory(model := base(), lessons[0])
    for call in (load_memory, unload_memory):
        refused(model, call, tmp_path / "c", "other layers, sizes, queries or sub-keys")


@pytest.mark.parametrize("name", ["keys", "query.weight", "query.bias"])
def test_one_other_number_in_keys_or_queries_is_refused(lessons, name):
    change(f"2.{name}", lambda w: w.flatten().index_add(
        0, torch.tensor([1]), torch.tensor([1e-3])).view(w.shape))(lessons[1])
    load_memory(model := base(), lessons[0])
    refused(model, load_memory, lessons[1], "other layers, sizes, queries or sub-keys")


def test_a_lesson_of_another_model_is_refused(lessons):
    model = base("Qwen3ForCausalLM")
    with pytest.raises(UserError, match="memory of another model"):
        load_memory(model, lessons[0])
    assert not find_memories(model)


def test_two_loaded_lessons_are_saved_as_one(lessons, tmp_path):
    model = base()
    for folder in lessons:
        load_memory(model, folder)
    model.requires_grad_(False)
    save_memory(model, tmp_path / "both")
    found = files.load_file(tmp_path / "both" / "memory.safetensors")
    assert found["1.values.rows"].tolist() == sorted(A[1] + B[1])
    load_memory(again := base(), tmp_path / "both")
    assert torch.equal(outputs(again), outputs(model))
    unload_memory(again, lessons[0])
    load_memory(alone := base(), lessons[1])
    assert torch.equal(outputs(again), outputs(alone))


def test_a_memory_without_values_is_replaced(lessons, tmp_path):
    save_memory(with_lesson(A, seed=1), tmp_path / "other")  # other queries and sub-keys
    load_memory(model := base(), lessons[0])
    unload_memory(model, lessons[0])
    tables = load_memory(model, tmp_path / "other")
    assert_same(dict(model.state_dict()), dict(with_lesson(A, seed=1).state_dict()))
    assert tables[2] is find_memories(model)[2].values
