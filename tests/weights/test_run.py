"""
The folder of a run: what a resumed run drops, and TensorBoard's curves, read by TensorBoard.
"""
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import pretrain
from lib.errors import UserError
from lib.run import Run
from lib.weights import load_weights
from tests.helpers import log, save_model, tiny_bert, train, tune


def read_curves(run):
    """{tag: [(step, value), ...]} of all event files of a folder."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = events.EventAccumulator(str(run), size_guidance={events.SCALARS: 0}).Reload()
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]}


def assert_curves_are_the_log(run):
    """Every number of the log is a point, and there is no point twice."""
    expected = {}
    for record in log(run):
        groups = {f"layer {n}": usage for n, usage in record.get("layers", {}).items()}
        groups["train" if "lr" in record else "eval"] = record
        for group, numbers in groups.items():
            for name in numbers.keys() - {"step", "layers"}:
                expected.setdefault(f"{group}/{name}", []).append((record["step"], numbers[name]))
    curves = read_curves(run)
    assert curves.keys() == expected.keys()
    for tag, points in expected.items():
        assert np.array(curves[tag]) == pytest.approx(np.array(points), rel=1e-6), tag
    return curves


def test_a_resumed_run_has_no_point_twice(place):
    """It goes on from step 5 or 0, though its log and its curves went further."""
    settings = "--tensorboard=True", "--log_interval=1", "--eval_interval=2"
    assert train(*settings) == 0
    for newest in (5, 0):
        for checkpoint in Path("out/tiny").glob("step_*"):
            shutil.rmtree(checkpoint)
        if newest:
            assert train(*settings[1:], "--max_steps=5", "--out=out/five") == 0
            shutil.copytree("out/five/step_000005", "out/tiny/step_000005")
        # without a checkpoint the log may go as far as to the first one
        assert train(*settings, "--max_steps=8", "--checkpoint_interval=100") == 0
        curves = assert_curves_are_the_log("out/tiny")
        assert [step for step, _ in curves["train/loss"]] == list(range(1, 9))
        assert {"train/tokens_per_s", "eval/perplexity", "layer 2/top1_mu"} <= curves.keys()


def test_curves_of_fine_tuning(tuned):
    assert tune("--epochs=1", "--tensorboard=True") == 0
    curves = assert_curves_are_the_log("out/tiny_own/seed0")
    assert {"train/loss", "train/examples_per_s", "eval/accuracy"} <= curves.keys()


def test_curves_without_the_package(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match="tensorboard = True needs a package: pip install "
                                        "tensorboard"):
        train("--tensorboard=True")
    assert not Path("out").exists()


def test_what_a_killed_process_wrote_after_its_checkpoint_goes(tmp_path):
    """The best epoch that the checkpoint names stays. Files of other people stay, too."""
    run, counts = Run(tmp_path / "run"), {2: {"read": np.ones(4), "top1": np.ones(4)}}
    run.folder.mkdir()
    run.open(0)
    for step in (3, 6):
        run.log({"step": step, "loss": 1.0})
        run.write_usage(step, counts)
        run.save_best(step / 2, {"weights": step})
    (run.folder / "usage/step_000009 (copy).npz").write_text("of a person")
    for name in ("", "usage/", "notes/"):
        Path(run.folder, name).mkdir(exist_ok=True)
        Path(run.folder, name, ".tmp_half").write_text("of a person")
    for name in (".tmp_step_000009", ".tmp_best_epoch_4", ".tmp_best", "best_epoch_notes",
                 "best_epoch_7"):
        (run.folder / name).mkdir()
        (run.folder / name / "model.pt").write_text("half")
    (run.folder / "best_epoch_7/thesis.txt").write_text("of a person")
    (run.folder / "usage/.tmp_step_000009.npz").write_text("half")
    with run.folder.joinpath("log.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    again = Run(run.folder)
    again.open(3, best_epoch=1.5)
    assert again.records() == [{"step": 3, "loss": 1.0}]
    left = {str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file()}
    assert left == {"log.jsonl", "usage/step_000003.npz", "best_epoch_1.5/model.pt",
                    "usage/step_000009 (copy).npz", "notes/.tmp_half", ".tmp_half",
                    "usage/.tmp_half", "best_epoch_notes/model.pt", "best_epoch_7/model.pt",
                    "best_epoch_7/thesis.txt"}


def test_only_what_a_run_wrote_is_deleted(tmp_path):
    """A checkpoint that is a link stays, and one to which somebody added a file."""
    run = Run(tmp_path / "run")
    for step in (1, 2):
        save_model(run.folder, tiny_bert(), step=step)
    (run.folder / "step_000001").rename(tmp_path / "elsewhere")
    (run.folder / "step_000001").symlink_to(tmp_path / "elsewhere")
    (run.folder / "step_000002/notes.txt").touch()
    for step in (3, 4, 5):
        save_model(run.folder, tiny_bert(), step=step)
    assert [int(path.name[5:]) for path in run.checkpoints()] == [1, 2, 4, 5]
    assert len(list((tmp_path / "elsewhere").iterdir())) == 3
    assert len(list((run.folder / "step_000002").iterdir())) == 4


def test_the_best_of_a_short_training_is_found(tmp_path):
    """One step of a hundred thousand is epoch 1e-05."""
    Run(tmp_path).save_best(1e-5, {"weights": 1})
    assert Run(tmp_path).weights_folder() == tmp_path / "best_epoch_1e-05"


def test_the_newest_checkpoints_stay_by_number(tmp_path):
    for step in (999_999, 1_000_000, 5):
        save_model(tmp_path, tiny_bert(), step=step)
    steps = [int(path.name[5:]) for path in Run(tmp_path).checkpoints()]
    assert steps == [999_999, 1_000_000]
    assert Run(tmp_path).newest_checkpoint().name == "step_1000000"


def test_how_a_checkpoint_was_trained(place):
    """The initial model's steps and its own; the evaluation that its weights had."""
    assert train("--max_steps=4", "--checkpoint_interval=2", "--eval_interval=2") == 0
    assert train("--max_steps=3", "--out=out/more", "--init_from=out/tiny", "--seed=1") == 0
    middle, end = Run("out/tiny").checkpoints()
    assert Run("out/tiny").steps_and_seed(middle) == {"steps": "2 of 4", "seed": 0}
    assert Run("out/tiny").steps_and_seed(end) == {"steps": "4", "seed": 0}
    more = Run("out/more")
    assert more.steps_and_seed(more.newest_checkpoint()) == {"steps": "4 + 3", "seed": 1}
    assert more.steps_and_seed(Path("elsewhere")) == {"steps": "?", "seed": "?"}
    assert Run("out/tiny").evaluations(middle)[-1]["step"] == 2
    assert more.evaluations(more.newest_checkpoint())[-1]["step"] == 4 + 3


def test_a_damaged_log_is_named_with_its_line(place):
    assert train("--max_steps=2", "--log_interval=1") == 0
    file = Path("out/tiny/log.jsonl")
    file.write_text(file.read_text() + "[1]\n")
    with pytest.raises(UserError, match=f"{file}:6: not a record: remove the line"):
        train("--max_steps=3")
    assert json.loads(Path("out/tiny/config.json").read_text())["max_steps"] == 2
    file.unlink()
    with pytest.raises(UserError, match="log.jsonl: not readable"):
        Run("out/tiny").evaluations()


def test_the_best_epoch_is_the_last_that_was_written(tmp_path):
    """A run that is fine-tuned still has a folder for each best epoch so far, by number."""
    for epoch in (2, 10):
        Run(tmp_path).save_best(epoch, {"weights": {}})
        assert Run(tmp_path).weights_folder() == tmp_path / f"best_epoch_{epoch}"


def test_a_run_keeps_the_tokenizer_of_its_corpus(place):
    """A byte-level BPE has a tokenizer.json beside its vocab.txt."""
    for out, expected in (("out/wordpiece", False), ("out/bytes", True)):
        assert train("--max_steps=1", f"--out={out}") == 0
        assert Path(out, "vocab.txt").read_bytes() == Path("tiny.txt").read_bytes()
        assert Path(out, "tokenizer.json").exists() == expected
        Path("data/tiny/tokenizer.json").write_text("{}")


def test_seeds_are_in_order_of_their_numbers(tmp_path):
    for seed in (10, 2, 0):
        (tmp_path / f"seed{seed}").mkdir()
        (tmp_path / f"seed{seed}/config.json").write_text(json.dumps({"task": "rte"}))
    assert [run.folder.name for run in Run(tmp_path).seeds()] == ["seed0", "seed2", "seed10"]


def test_weights_of_another_model_are_refused():
    """Neither a memory that a model has not is dropped, nor one that it has left random."""
    memory, plain = tiny_bert(memory_layers=(2,)), tiny_bert()
    for model, other, has in ((plain, memory, "an unknown"), (memory, plain, "no")):
        with pytest.raises(UserError, match=f"it has {has} bert.layers.1.memory"):
            load_weights(model, other.state_dict(), "other")
    loaded = load_weights(memory, plain.state_dict(), "other", partial=True)
    assert loaded == set(plain.state_dict())


def test_a_run_goes_on_under_the_same_settings(place, capsys):
    run, config = Run("run"), pretrain.Config(max_steps=5)
    run.begin(config, Path("tiny.txt"), {"init_checkpoint": "", "first_step": 0,
                                         "pooler_trained": False}, {})
    run.check_settings(config, {})
    assert not capsys.readouterr().out
    run.check_settings(pretrain.Config(max_steps=9, log_interval=1), {})
    assert capsys.readouterr().out == (
        "log_interval was 10, is now 1\nmax_steps was 5, is now 9; the learning rate now reaches 0 "
        "at the new max_steps (it rises again first)\n")
    with pytest.raises(UserError, match=r"run was trained with memory_layers = \[\], not \[2\]"):
        run.check_settings(pretrain.Config(max_steps=5, memory_layers=(2,)), {})


def test_a_run_knows_what_its_numbers_depend_on(place, capsys, monkeypatch):
    """Another machine is one line; other data are refused."""
    facts, data = {"threads": 1, "torch": "2.13.0", "commit": "a" * 40}, {"train": "b" * 64}
    monkeypatch.setattr("lib.run.process_facts", lambda: facts)
    run, config = Run("run"), pretrain.Config()
    run.begin(config, Path("tiny.txt"), {"first_step": 0}, {**data, "labels": ["x", "y"]})
    assert run.settings().items() >= {**facts, "ranks": 1}.items()
    run.check_settings(config, {**data, "labels": ["x", "y"]})
    assert not capsys.readouterr().out
    facts |= {"threads": 2, "commit": "c" * 40 + "-dirty"}
    run.check_settings(config, {**data, "labels": ["x", "y"]})
    assert capsys.readouterr().out == (
        "changed since the last start: threads 1 -> 2, commit aaaaaaaaaaaa -> cccccccccccc-dirty; "
        "results may differ from those of an uninterrupted run\n")
    saved = run.settings()
    older = {key: saved[key] for key in saved.keys() - {"data", "ranks", *facts}}
    (run.folder / "config.json").write_text(json.dumps(older))  # of a version that kept no facts
    run.check_settings(config, data)
    assert not capsys.readouterr().out
    (run.folder / "config.json").write_text(json.dumps(saved))
    for other, words in [({**data, "labels": ["x", "z"]}, r"labels was \['x', 'y'\], is now"),
                         ({"train": "d" * 64, "labels": ["x", "y"]},
                          "train was bbbbbbbbbbbb, is now dddddddddddd: put the old data back, or"),
                         (data, "is now None")]:
        with pytest.raises(UserError, match=f"^run was trained on other data: .*{words}"):
            run.check_settings(config, other)


@pytest.mark.parametrize("key, value", [("max_steps", "12"), ("max_steps", None), ("seed", 1.5),
                                        ("init_checkpoint", None), ("memory_layers", 2),
                                        ("data", []), ("first_step", True)])
def test_a_config_that_lies_is_named(tmp_path, key, value):
    (tmp_path / "config.json").write_text(json.dumps({"seed": 1, key: value}))
    with pytest.raises(UserError, match=f"config.json: {key} = .*: expected "):
        Run(tmp_path).settings()


def test_a_score_that_is_no_number_is_null(tmp_path):
    run = Run(tmp_path)
    run.write_results({"eval_pearson": float("nan"), "epoch": 1.0})
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_pearson"] is None
    assert np.isnan(run.results()["eval_pearson"]) and run.results()["epoch"] == 1.0
    run.open(0)
    run.log({"step": 1, "pearson": float("nan")})
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1, "pearson": null}\n'
    assert np.isnan(run.records()[0]["pearson"])
