"""
results/gpu.py and results/trial.py: steps that fail, hang, are killed or left out, and their page.
"""
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
import pretrain
from lib.common.errors import run_main
from lib.common.settings import load_settings
from results import gpu, trial
from results.trial import Step
from tests.helpers import ROOT

TABLE = "| a | b |\n| - | - |\n| 1 | 2 |\n"


def python(code):
    return "-c " + shlex.quote(code)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder in place of the project's."""
    for module in (trial, gpu):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(trial, "GRACE", 0.2)
    return tmp_path


@pytest.fixture
def run_trial(folder, monkeypatch):
    """Run gpu.main() with other steps. Returns its exit status and the page."""
    def run(*steps, device="cuda"):
        machine = {"device": device, "has": {"CUDA"},
                   "facts": {"card": "NVIDIA A100-SXM4-80GB", "cores": 2}}
        monkeypatch.setattr(gpu, "describe_machine", lambda: machine)
        monkeypatch.setattr(gpu, "ProcessPoolExecutor", ThreadPoolExecutor)
        monkeypatch.setattr(gpu, "plan", lambda: list(steps))
        monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
        monkeypatch.setattr("sys.argv", ["gpu.py", "--out", str(folder / "pages")])
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
        with pytest.raises(SystemExit) as end:
            run_main(gpu.main)
        return end.value.code, (folder / "pages/gpu_nvidia_a100_sxm4_80gb.md").read_text()
    return run


def sections(page):
    """{title: text} of a page's sections."""
    return dict(re.findall(r"^## (.*)\n\n((?:(?!^## ).*\n)*)", page, re.MULTILINE))


def test_steps_fail_and_hang_and_the_others_go_on(run_trial, folder):
    sleeper = ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
               "import pathlib, os; pathlib.Path('pid').write_text(str(os.getpid()))\n"
               "time.sleep(60)")
    status, page = run_trial(
        Step("good", 1, python(f"print({TABLE!r} + 'noise\\nstep 9: perplexity 3.5')"),
             note="Look."),
        Step("bad", 1, python(f"print({TABLE!r}); [print('line', n) for n in range(50)]; exit(3)")),
        Step("slow", 3 / 60, python(sleeper)),
        Step("wrong", 1, python("pass"), check=lambda: "loss goes from 1 to 2"),
        Step("broken", 1, python("pass"), check=lambda: {}["key"]),
        Step("absent", 1, python("pass"), needs="2 cards"),
        Step("last", 1, python("print('done')")))
    assert status == 4
    assert "\n7 steps: 2 ok, 4 failed, 1 left out; 00:0" in page and "nfinished" not in page
    rows = dict(re.findall(r"^\| (\w+) +\| (.*?) +\| \d\d:\d\d +\|$", page, re.MULTILINE))
    assert rows == {"good": "ok", "bad": "failed: exit status 3", "last": "ok",
                    "slow": "failed: still running at its limit",
                    "absent": "left out: needs 2 cards",
                    "wrong": "failed: loss goes from 1 to 2", "broken": "failed: KeyError: 'key'"}
    parts = sections(page)
    assert parts.keys() == rows.keys() - {"absent"}
    assert parts["good"].endswith(f" Look.\n\n```text\nstep 9: perplexity 3.5\n```\n\n{TABLE}\n")
    assert [f"line {n}" for n in range(20, 50)] == parts["bad"].splitlines()[-32:-2]
    assert f"\n{TABLE}" not in parts["bad"] and "line 19" not in parts["bad"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)


@pytest.mark.parametrize("stopped", [True, False])
def test_an_unfinished_trial_leaves_a_page_that_says_so(run_trial, folder, monkeypatch, stopped):
    """A Ctrl-C in the second step. Or a look at the page while that step runs."""
    seen, wait = [], trial.wait

    def interrupted(process, *more):
        if more[0] - time.monotonic() > 100:
            seen.append((process, next((folder / "pages").glob("*")).read_text()))
            raise KeyboardInterrupt
        return wait(process, *more)

    monkeypatch.setattr(trial, "wait", interrupted)
    status, page = run_trial(Step("first", 1, python("pass")),
                             Step("second", 2, python("import time; time.sleep(60)")),
                             Step("third", 1, python("pass")))
    process, earlier = seen[0]
    assert status == 130 and process.poll() == -signal.SIGTERM
    told = "1 ok, 1 interrupted, 1 not run" if stopped else "1 ok, 2 not run"
    assert f"3 steps: {told}; " in (page if stopped else earlier)
    assert "**Unfinished: " in (page if stopped else earlier)


def test_the_trial_has_a_limit(folder):
    sleep = python("import time; time.sleep(60)")
    steps = [Step("long", 1, sleep), Step("late", 1, sleep)]
    trial.run_steps(steps, 1.5 / 60, lambda: None)
    assert [step.result for step in steps] == ["stopped: the 0.025 minutes are over",
                                               "not run: the 0.025 minutes are over"]


@pytest.mark.parametrize("killed", [True, False])
def test_a_killed_command_runs_again(folder, killed):
    code = ("import pathlib, time\nstep = pathlib.Path('out/step_1')\n"
            "print('starts', step.exists())\n"
            f"if {killed} and not step.exists(): step.mkdir(parents=True); time.sleep(60)")
    step = Step("resume", 1, python(code), kill_at="out/step_*")
    trial.execute(step, 30)
    assert step.result == ("ok" if killed else "failed: ended before it could be killed")
    again = "killed; the same command again:\nstarts True\n"
    assert step.output == "starts False\n" + again * killed


def test_no_page_tells_who_and_where(monkeypatch):
    monkeypatch.setattr(trial.platform, "node", lambda: "box7.lab.org")
    monkeypatch.setenv("USER", "alice")
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr(trial.sys, "prefix", "/opt/envs/mine")
    text = (f'File "{ROOT}/pkm.py", line 3\n'
            'File "/data/alice/v/lib/python3.11/site-packages/torch/x.py"\n'
            "/opt/envs/mine/bin/python in /home/alice/x, by alice on box7 (box7.lab.org) "
            "10.0.0.7:29500\n"
            "torch 2.13.0, driver 570.86.15, malice; ```names[0](x)")
    assert trial.clean(text) == (
        'File "pkm.py", line 3\nFile "site-packages/torch/x.py"\n'
        "PYTHON/bin/python in ~/x, by USER on HOST (HOST) ADDRESS:29500\n"
        "torch 2.13.0, driver 570.86.15, malice; '''names[0] (x)")


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("has", [set(), {"CUDA", "float64", "transformers", "2 cards", "bfloat16"}])
def test_every_command_is_one_that_the_scripts_take(monkeypatch, small, has):
    monkeypatch.chdir(ROOT)
    steps = gpu.plan()
    for step in steps:
        gpu.adapt(step, {"has": has}, small)
        words = shlex.split(step.command.removeprefix(gpu.TORCHRUN))
        if words[0] == "pretrain.py":
            config = load_settings(pretrain.Config, words[1:])
            assert config.max_steps == 20 or not small
            pretrain.check_config(config)
        elif words[0] == "bench.py":
            args = bench.parse(words[1:])
            assert args.rounds == 2 if small else args.rounds in (1, 7)
            trains = words[1] not in ("layer", "inference")
            assert args.dtype == ("auto" if trains and "bfloat16" in has else "float32")
            if "slots" in step.title:
                assert args.slots == ([32, 64] if small else [])
        else:
            assert words[0] == "-m" or (ROOT / words[0]).exists()
    assert len({step.title for step in steps}) == len(steps) == 21
    left_out = {step.needs for step in steps if step.result != "not run"}
    assert left_out == (set() if has else {"CUDA", "float64", "transformers", "2 cards"})
    assert all(number in (ROOT / "README.md").read_text() for number in gpu.README)


@pytest.mark.parametrize("major, cards", [(7, 1), (9, 2)])
def test_a_card_is_described(monkeypatch, tmp_path, major, cards):
    """With stand-ins for the card and for nvidia-smi."""
    card = SimpleNamespace(name="NVIDIA T4", major=major, minor=5, total_memory=15 * 2**30)
    monkeypatch.setattr(gpu, "choose_device", lambda: (torch.device("cuda"), None, ""))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 570.86.15\necho 570.86.15\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    machine = gpu.describe_machine()
    assert machine["device"] == "cuda" and machine["has"] >= {"CUDA", "float64"}
    assert ("bfloat16" in machine["has"], "2 cards" in machine["has"]) == (major == 9, cards == 2)
    facts = machine["facts"]
    assert [facts[key] for key in ("card", "cards", "memory", "compute capability", "driver")] == [
        "NVIDIA T4", cards, "15.0 GiB", f"{major}.5", "570.86.15"]
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    assert gpu.describe_machine()["facts"]["driver"] == "unknown"


def test_what_the_runs_have_learned(folder):
    for name, losses, perplexity, scale in (
            ("base", [3, 2, 1], 9.0, None), ("cpu", [1, 1], 10, None),
            ("resumed", [1, 1], 10.4, None), ("float16", [1, 2.5], 10.6, 2.0**14),
            ("float32", [], 9.0, None), ("ranks", [2, 1], 9.0, 0.0)):
        run = folder / gpu.RUNS / name
        (run / "step_000002").mkdir(parents=True)
        (run / "step_000002/model.pt").touch()
        records = [{"step": n, "loss": loss, "lr": 1, "tokens_per_s": 1000 * n}
                   for n, loss in enumerate(losses)]
        records += [{"step": n, "perplexity": p, "accuracy": 0, "masked_tokens": 9, "layers": {}}
                    for n, p in ((0, 1), (2, perplexity))]
        (run / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (run / "config.json").write_text(json.dumps({"device": "cuda", "dtype": "x", "ranks": 1}))
        torch.save({"step": 2, "scaler": {} if scale is None else {"scale": scale}},
                   run / "step_000002/state.pt")
    assert gpu.loss_falls("base") == gpu.is_near_the_cpu("resumed") == ""
    assert gpu.loss_falls("float16") == "loss goes from 1.000 to 2.500"
    assert gpu.is_near_the_cpu("float16") == "perplexity is 10.60, on the CPU 10.00"
    lines = gpu.table_of_runs().splitlines()
    rows = [re.split(r" *\| *", line) for line in lines if "cuda" in line]
    assert [row[1] for row in rows] == ["base", "float16", "cpu", "resumed", "ranks"]
    assert rows[0][5:-1] == ["2", "1,000", "3.000", "1.000", "9.00", "-"]
    assert [row[-2] for row in rows] == ["-", "2", "-", "-", "165"]


def test_without_a_card_only_the_small_trial_runs(run_trial, capsys):
    with pytest.raises(FileNotFoundError):
        run_trial(device="cpu")
    assert capsys.readouterr().err == ("error: torch finds no CUDA card; --small tries all steps "
                                       "without one\n")


def test_the_shell_file_starts_it(tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["sh", ROOT / "results/gpu.sh", "--help"], cwd=tmp_path, text=True,
                          capture_output=True, check=True, env={**os.environ, "PATH": path})
    assert "--small" in done.stdout and "--out FOLDER" in done.stdout
