"""
README and the pages under docs/ and results/: links, paths, commands, programs, published logs.
"""
import importlib
import os
import re
import shlex
import subprocess
import sys
import tarfile

import pytest

import finetune
import pretrain
from lib.common.settings import load_settings
from tests.helpers import ROOT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("results/*.md"))]
CONFIGS = {"pretrain.py": pretrain.Config, "finetune.py": finetune.Config}


def page_id(path):
    return f"{path.parent.name}/{path.name}"


def block(page, language):
    """The page's longest block of code in a language."""
    blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return max(blocks, key=len)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(text):
    """The lines of the shell blocks, each a list of words, with continued lines joined. A block
    that begins with #! is a script, not commands."""
    blocks = re.findall(r"```sh\n(?!#!)(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def test_readme_is_short_and_names_the_torch_that_is_required():
    text, required = ((ROOT / name).read_text() for name in ("README.md", "requirements.txt"))
    assert len(text.split()) <= 1300
    assert f"pip install {required.split()[0]} --index-url" in text


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    links = r"\]\(([^)\s]+)\)|src(?:set)?=\"([^\"]+)\""
    for link in map("".join, re.findall(links, page.read_text())):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_files_exist(page):
    names = re.findall(r"`((?:\w+/)*\w+\.(?:py|sh))`", page.read_text())
    folders = (ROOT, ROOT / "configs", ROOT / "docs", ROOT / "results")
    for name in names:
        assert any((folder / name).exists() for folder in folders), name


def test_readmes_estimate_is_what_the_guides_program_prints(capsys):
    exec(block("docs/before_you_start.md", "python"), {})  # noqa: S102
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 3 and set(rows) <= set((ROOT / "README.md").read_text().splitlines())


@pytest.mark.parametrize("stopped", [True, False])
def test_the_slurm_file_queues_a_stopped_job_again(tmp_path, stopped):
    """Stand-ins for SLURM's commands start two ranks, which end at SIGTERM or by themselves."""
    script = block("docs/cluster.md", "sh")
    assert script.startswith("#!/bin/bash\n") and len(script.splitlines()) <= 30
    bin_folder = tmp_path / ".venv/bin"
    bin_folder.mkdir(parents=True)
    rank = "sleep 60 & trap 'kill $!; echo saved >>ranks; exit' TERM\n" if stopped else ""
    rank += "echo $MASTER_ADDR:$MASTER_PORT $RANK $LOCAL_RANK $WORLD_SIZE $* >>ranks\n"
    rank += "kill -USR1 $SCRIPT; wait" if stopped else "exit 1"
    for name, body in {
            "train.sbatch": script, "activate": "", "python": rank,
            "scontrol": "[ $1 = show ] && printf 'node1\nnode2\n' || echo $* >>queue",
            "srun": "shift; export SCRIPT=$PPID; echo $$ >srun.pid\n"
                    "trap 'kill -TERM $ranks; wait' TERM\n"  # here scancel signals only srun
                    "SLURM_PROCID=0 SLURM_LOCALID=0 \"$@\" & ranks=$!; wait",
            "scancel": "[ \"$*\" = '--signal=TERM 42' ] || exit 1; kill -TERM $(cat srun.pid)",
            }.items():
        path = bin_folder / name
        path.write_text(body if body.startswith("#!") else f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    env = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "42",
           "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "8",
           "SLURM_JOB_NODELIST": "node[1-2]"}
    subprocess.run(["bash", bin_folder / "train.sbatch", "CONFIG.py", "--lr=1 2"], env=env,
                   cwd=tmp_path, check=False, timeout=30)
    assert (tmp_path / "ranks").read_text().splitlines() == [
        "node1:29500 0 0 1 -u pretrain.py CONFIG.py --lr=1 2", *["saved"] * stopped]
    queue = tmp_path / "queue"
    assert queue.exists() == stopped and (not stopped or queue.read_text() == "requeue 42\n")


def test_readme_names_every_room():
    rooms = {path.parent.name for path in ROOT.glob("lib/*/__init__.py")}
    section = (ROOT / "README.md").read_text().partition("The rooms of `lib/`")[2]
    assert set(re.findall(r"^- `(\w+)`:", section, re.MULTILINE)) == rooms


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_have_valid_settings(page, capsys, monkeypatch):
    """Checks pretrain.py and finetune.py, without what the reader fills in (words in capitals)."""
    monkeypatch.chdir(ROOT)
    for words in commands(page.read_text()):
        for script in CONFIGS.keys() & set(words):
            arguments = words[words.index(script) + 1:]
            end = next((n for n, word in enumerate(arguments) if word in ("&&", "done")),
                       len(arguments))
            fixed = [word for word in arguments[:end]
                     if not re.search(r"\$|=[A-Z]+$|^[A-Z]+$|;", word)]
            load_settings(CONFIGS[script], fixed)


def test_the_studys_configs_exist():
    script = ROOT / "results" / "study.sh"
    subprocess.run(["sh", "-n", script], check=True)
    names = re.findall(r"configs/[\w/]+\.py", script.read_text())
    assert names and all((ROOT / name).is_file() for name in names)


def test_what_is_published_gives_the_studys_verdicts():
    """Numbers of table2.md are rounded, so claims 1 to 4 and 6 agree in words, nearly in digits."""
    def read(text):
        lines = re.findall(r"(?m)^(\d\. .*|flat: .*): ([+-][\d.e-]+) \(.*\): (\w+)$", text)
        return {claim: (float(mean), word) for claim, mean, word in lines}

    output = subprocess.run([sys.executable, ROOT / "results/verdicts.py"], cwd="/",
                            capture_output=True, text=True, check=True).stdout
    published = (ROOT / "results/study/verdicts.txt").read_text()
    ours, theirs = read(output), read(published)
    assert len(ours) == 15 and theirs.keys() - ours.keys() == {"7. stale slots, (c) - (f), points"}
    for claim, (mean, word) in ours.items():
        assert abs(mean - theirs[claim][0]) < 0.05 and word == theirs[claim][1], claim
    assert len(set(output.splitlines()) & set(published.splitlines())) > 40  # from the logs
    assert "(Left out: claim 7" in output


@pytest.mark.parametrize("page, least", [("changes", 20), ("minilm", 4)])
def test_published_logs_give_the_table_of_a_page(page, least, monkeypatch, capsys):
    def cells(text):
        rows = [[cell.strip() for cell in line[1:-1].split("|")]
                for line in text.splitlines() if line.startswith("|")]
        rules = {n for n, row in enumerate(rows) if set("".join(row)) == {"-"}}
        return [row for n, row in enumerate(rows) if not rules & {n, n + 1}]  # without headers

    monkeypatch.syspath_prepend(ROOT / "results")
    for name in ("draw", "draw_costs"):
        monkeypatch.setattr(importlib.import_module("changes_verdicts"), name, lambda *_: None)
    importlib.import_module(f"{page}_verdicts").main()
    rows = cells(capsys.readouterr().out)
    assert len(rows) > least and rows == cells((ROOT / f"results/{page}.md").read_text())


def test_the_logs_of_causal_models_end_at_their_last_step(tmp_path):
    with tarfile.open(ROOT / "results/causal/logs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    logs = list(tmp_path.glob("causal_logs/*/log.jsonl"))
    assert len(logs) == 12
    assert all('"step": 1500' in log.read_text().splitlines()[-1] for log in logs)
