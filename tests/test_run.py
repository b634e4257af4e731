"""
Go on with a run, refuse what does not fit it, and forget what a killed process did.
"""
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import pretrain
from lib.files import write_text
from lib.run import Run, git_commit
from lib.settings import UserError, run_main
from lib.weights import find_weights, init_from, load_model
from measure import how_trained
from tests.helpers import log, save_model, tiny_bert, train, trains_pooler

ORIGIN = {"init_checkpoint": "", "first_step": 0, "pooler_trained": False}
DATA = {"train.bin": "a" * 64, "labels": ["x", "y"]}


@pytest.fixture
def begun(workdir):
    """Begin a run. Returns it and its config."""
    run, config = Run("run"), pretrain.Settings(max_steps=5, memory_layers=(2,))
    run.open(config, Path("vocab.txt"), ORIGIN, DATA, 0)
    return run, config


def test_a_run_goes_on_under_the_same_settings(begun):
    run, config = begun
    run.check_settings(replace(config, max_steps=9, log_interval=1), DATA)
    for change, words in (({"memory_layers": (3, 4)}, ".*: add --memory_layers='\\[2\\]' to go on"),
                          ({"init_from": "out/my run"}, "init_from = '', not 'out/my run'"),
                          ({"lr": 1e-3}, "lr = 0.0001, not 0.001: add --lr=0.0001 to go on")):
        with pytest.raises(UserError, match=f"^run was trained with {words}"):
            run.check_settings(replace(config, **change), DATA)


def test_a_run_goes_on_with_the_same_data(begun):
    run, config = begun
    for data, name in (({**DATA, "train.bin": "b" * 64}, "train.bin"),
                       ({"train.bin": DATA["train.bin"]}, "labels"),
                       ({**DATA, "dev.tsv": "c"}, "dev.tsv")):
        with pytest.raises(UserError, match=f"^run was trained on other data: {name} has changed"):
            run.check_settings(config, data)


def test_what_a_killed_process_wrote_after_its_checkpoint_goes(begun):
    run, config = begun
    counts = {2: {"read": np.ones(4), "top1": np.arange(4)}}
    for step in (3, 6):
        run.log({"step": step, "loss": 1.0})
        run.write_usage(step, counts)
    with Path("run/log.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    again = Run("run")
    again.open(config, Path("vocab.txt"), run.settings(), DATA, 3)
    assert again.records() == [{"step": 3, "loss": 1.0}]
    assert list(again.usage_snapshots()) == [3]
    assert again.usage_snapshots()[3]["layer2_top1"].tolist() == [0, 1, 2, 3]
    settings = again.settings()
    assert settings["max_steps"] == 5 and settings["torch"] == torch.__version__


def test_the_newest_checkpoints_stay_by_number(tmp_path):
    """Nothing that a run did not write is read, continued or deleted."""
    mine = ("step_000009.old", "step_000004.keep", "step_9", "seed1.diverged", "seed01", "seed²",
            ".tmp_notes")
    for name in mine:
        (tmp_path / name).mkdir()
    for step in (999_999, 1_000_000, 5):
        save_model(tmp_path, tiny_bert(), step=step)
    run = Run(tmp_path)
    assert run.newest_checkpoint().name == "step_1000000" and not run.seed_runs()
    assert {path.name for path in tmp_path.iterdir()} == {
        *mine, "step_999999", "step_1000000", "config.json"}


@pytest.mark.parametrize("size", [10, 5_000, 300_000, 900_000])
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, capsys, size):
    """Say so in a line, although torch raises another error over it."""
    resource = pytest.importorskip("resource")
    model = tiny_bert(memory_layers=(2,), n_keys=200)  # a table of 1.3 MB
    save_model(tmp_path, tiny_bert(), step=5)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(SystemExit, match="1"):
            run_main(lambda: save_model(tmp_path, model, step=6))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert said == f"error: [Errno 27] File too large: '{tmp_path}/step_000006'\n"
    assert sorted(os.listdir(tmp_path)) == ["config.json", "step_000005"]


def test_the_weights_that_a_folder_stands_for(tmp_path):
    """Find a seed's best epoch, else its newest checkpoint. A run needs a seed that is done."""
    run = Run(tmp_path)
    assert run.seed_runs() == []
    for seed in (10, 2):
        save_model(tmp_path / f"seed{seed}", tiny_bert(), step=4)
    assert [seed.folder.name for seed in run.seed_runs()] == ["seed2", "seed10"]
    seed, vocab = Run(tmp_path / "seed2"), tmp_path / "seed2/vocab.txt"
    assert find_weights(seed.folder) == (tmp_path / "seed2/step_000004", vocab)
    with pytest.raises(UserError, match="no seed is done.*seed2"):
        find_weights(tmp_path)
    for epoch in (1, 2):
        seed.save_best({"epoch": epoch})
    seed.write_results({"metric": "f1", "eval_f1": 0.5})
    best = tmp_path / "seed2/best"
    assert find_weights(tmp_path) == find_weights(seed.folder) == find_weights(best)
    assert find_weights(best) == (best, vocab)
    assert torch.load(best / "model.pt") == {"epoch": 2} and os.listdir(best) == ["model.pt"]


@pytest.mark.parametrize("text", ['{"layout": 1, "seed": 0}', '{"model_type": "bert"}'])
def test_a_run_of_another_layout_is_refused(tmp_path, text):
    """Name what was found. A folder of Hugging Face has no layout at all."""
    write_text(tmp_path / "config.json", text)
    with pytest.raises(UserError, match=r"config.json has layout (1|None), expected \d"):
        Run(tmp_path).settings()


def test_how_a_checkpoint_was_trained(place):
    """Tell the initial model's steps and its own.

    A run that was stopped after 2 of its steps keeps all that it knows of its start.
    """
    assert train("--max_steps=4", "--checkpoint_interval=2", "--eval_interval=2") == 0
    trains_pooler("out/tiny")
    for steps in (2, 3):
        assert train(f"--max_steps={steps}", "--out=out/more", "--init_from=out/tiny",
                     "--seed=1") == 0
    run, more, middle = Run("out/tiny"), Run("out/more"), Path("out/tiny/step_000002")
    torch.save({"step": 2, "elapsed": 90.2, "seconds": 4.4}, middle / "state.pt")
    assert how_trained(middle) == {"steps": "2", "own_steps": 2, "seed": 0, "seconds": 95}
    assert how_trained(run.newest_checkpoint())["steps"] == "4"
    assert how_trained(more.newest_checkpoint()) | {"seconds": 0} == {
        "steps": "4 + 3", "own_steps": 3, "seed": 1, "seconds": 0}
    assert set(how_trained(Path("elsewhere")).values()) == {"?"}
    assert more.evaluations()[-1]["step"] == 4 + 3
    origin = init_from(load_model("out/more"), "out/more")
    assert origin["first_step"] == 4 + 3 and origin["pooler_trained"]


def read_curves(run):
    """Read all event files of a folder. Returns {tag: [(step, value), ...]}."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = events.EventAccumulator(str(run), size_guidance={events.SCALARS: 0}).Reload()
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]}


def test_curves_are_the_log(place):
    """Draw every number of the log as a point, and none twice in a resumed run."""
    settings = "--tensorboard=True", "--log_interval=1", "--eval_interval=2", "--keep_checkpoints=9"
    assert train(*settings) == 0
    shutil.rmtree("out/tiny/step_000010")
    shutil.rmtree("out/tiny/step_000012")
    assert train(*settings) == 0
    expected = {}
    for record in log("out/tiny"):
        groups = {f"layer {n}": usage for n, usage in record.get("layers", {}).items()}
        groups["train" if "lr" in record else "eval"] = record
        for group, numbers in groups.items():
            for name in numbers.keys() - {"kind", "step", "layers"}:
                expected.setdefault(f"{group}/{name}", []).append((record["step"], numbers[name]))
    curves = read_curves("out/tiny")
    assert curves.keys() == expected.keys() >= {"train/tokens_per_s", "layer 2/top1_mu"}
    for tag, points in expected.items():
        assert np.array(curves[tag]) == pytest.approx(np.array(points), rel=1e-6), tag


def test_the_commit_is_this_checkouts(tmp_path, monkeypatch):
    """Tell it with changes, and that it is unknown without git."""
    if not shutil.which("git"):
        pytest.skip("no git on this machine")

    def git(*args):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "first")
    assert git_commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("two")
    assert git_commit(tmp_path) == git("rev-parse", "HEAD") + "-dirty"
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_commit(tmp_path) == "unknown"
