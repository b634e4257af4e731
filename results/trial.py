"""
Run commands, each within its limit, and write a page of what became of them.

A step that fails or hangs does not end the others. The page names no user, no machine and no folder
outside this project.
"""
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lib.common.files import write_text
from lib.common.progress import duration, markdown

ROOT = Path(__file__).resolve().parents[1]
GRACE = 40  # seconds to end after SIGTERM: torchrun needs 30 for ranks that hang
HANGS = "failed: still running at its limit"
TAIL = 30  # lines of a failed step's output that the page shows


@dataclass
class Step:
    """Say what to run, for how many minutes, and what became of it."""
    title: str
    minutes: float
    command: str  # the words after `python`
    needs: str = ""  # of the machine
    note: str = ""  # for the reader of the page
    show: str = ""  # the page also shows lines of the output like this regular expression
    check: Callable = lambda: ""  # called after a success; says what is wrong
    kill_at: str = ""  # a pattern of paths: kill the command when one is there, then run it again
    result: str = "not run"
    seconds: float = 0.0
    output: str = ""


def run_steps(steps, minutes, show):
    """Run the steps that are not left out, for so many minutes in all. Calls show() after each."""
    end = time.monotonic() + 60 * minutes
    show()
    for number, step in enumerate(steps, 1):
        if step.result == "not run":
            left = end - time.monotonic()
            if left < 1:
                step.result = f"not run: the {minutes} minutes are over"
            else:
                print(f"{number}/{len(steps)} {step.title}: python {step.command}", flush=True)
                execute(step, min(60 * step.minutes, left))
            if step.result == HANGS and left < 60 * step.minutes:
                step.result = f"stopped: the {minutes} minutes are over"
            print(f"    {step.result}, {minutes_and_seconds(step.seconds)}", flush=True)
            show()


def execute(step, limit):
    """Run a step for at most `limit` seconds. Fills in its result, seconds and output."""
    begin, step.result = time.monotonic(), "interrupted"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        for kill_at in [step.kill_at, ""] if step.kill_at else [""]:
            process = subprocess.Popen([sys.executable, *shlex.split(step.command)], cwd=ROOT,
                                       env=environment, stdin=subprocess.DEVNULL, stdout=log,
                                       stderr=log, start_new_session=True)
            try:
                result = wait(process, begin + limit, kill_at)
            finally:
                stop(process)
                step.seconds = time.monotonic() - begin
                log.seek(0)
                step.output = clean(log.read())
            if result != "killed":
                break
            print("killed; the same command again:", file=log, flush=True)
    step.result = result
    if kill_at and result == "ok":
        step.result = "failed: ended before it could be killed"
    if step.result == "ok":
        try:
            wrong = step.check()
        except Exception as error:  # noqa: BLE001 - it must not end the other steps
            wrong = f"{type(error).__name__}: {error}"
        step.result = f"failed: {clean(wrong)}" if wrong else "ok"


def wait(process, deadline, kill_at):
    """Wait for a process until the deadline. Kill it when there is a path like kill_at. Returns the
    result."""
    while (status := process.poll()) is None:
        if time.monotonic() > deadline:
            return HANGS
        if kill_at and any(ROOT.glob(kill_at)):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "killed"
        time.sleep(0.1)
    return "ok" if status == 0 else f"failed: exit status {status}"


def stop(process):
    """Stop a process that is still running, and its children. A second Ctrl-C does not wait."""
    for number, seconds in (signal.SIGTERM, GRACE), (signal.SIGKILL, None):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(seconds)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                continue


def clean(text):
    """Take names of user, machine and folders out of a text, and signs of Markdown."""
    text = text.replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    text = re.sub(r"/[^\s\"']*/(?=site-packages/|lib/python)", "", text)
    for folder, word in ((sys.prefix, "PYTHON"), (sys.base_prefix, "PYTHON"),
                         (os.path.expanduser("~"), "~")):
        text = text.replace(folder, word) if len(folder) > 1 else text
    text = re.sub(r"\b(\d+\.){3}\d+\b", "ADDRESS", text)
    for name, word in ((platform.node(), "HOST"), (platform.node().split(".")[0], "HOST"),
                       (os.environ.get("USER", ""), "USER")):
        if name not in ("", "root", "localhost"):
            text = re.sub(rf"\b{re.escape(name)}\b", word, text)
    return text.replace("```", "'''").replace("](", "] (")


def write_page(path, title, about, facts, steps, shown, more=""):
    """Write the page. about: a line. facts: {name: text}. shown: a regular expression of the lines
    of an output that the page shows beside tables. more: Markdown after the table of steps."""
    counts = {word: sum(step.result.startswith(word) for step in steps)
              for word in ("ok", "failed", "interrupted", "stopped", "left out", "not run")}
    seconds = minutes_and_seconds(sum(step.seconds for step in steps))
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    unfinished = counts["interrupted"] or any(step.result == "not run" for step in steps)
    parts = [f"# {title}", about, f"{len(steps)} steps: {told}; {seconds}."]
    parts += ["**Unfinished: the trial was interrupted, or is still running.**"] * bool(unfinished)
    parts += [markdown(["", ""], facts.items()), markdown(
        ["step", "result", "min:s"],
        [[step.title, step.result, minutes_and_seconds(step.seconds)] for step in steps]), more]
    for step in steps:
        if step.seconds:
            parts += [f"## {step.title}", f"```sh\npython {step.command}\n```",
                      f"{step.result}, {minutes_and_seconds(step.seconds)}. {step.note}".strip(),
                      shown_output(step, shown)]
    write_text(path, "\n\n".join(part.strip("\n") for part in parts if part) + "\n")


def shown_output(step, shown):
    """Choose what the page shows of an output. A step that is not ok shows its last lines. Another
    one shows tables, and lines like `shown` or step.show."""
    lines = [line[:300] for line in step.output.splitlines()]
    shown = f"{shown}|{step.show}" if step.show else shown
    texts = [line for line in lines if re.search(shown, line) and not line.startswith("|")]
    if step.result != "ok":
        texts = lines[-TAIL:]
    block = "```text\n" + "\n".join(texts) + "\n```\n\n" if texts else ""
    tables = re.findall(r"(?:^\|.*\n)+", step.output if step.result == "ok" else "", re.MULTILINE)
    return block + "\n".join(tables)


def minutes_and_seconds(seconds):
    return duration(seconds)[2:]
