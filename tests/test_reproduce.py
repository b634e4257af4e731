"""
Test reproduce.sh: its commands and their order, and the page that it ends with.
"""
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save

from bench import RandomBatches
from lib import training
from lib.huggingface import SETTINGS, to_huggingface
from model import LanguageModel
from pkm import LazyAdam
from pretrain import Settings, bert_config
from reproduce import card, claims, hours, page, paper
from tests.helpers import ROOT, steps_saved, tiny_bert
from tests.test_download import HubHandler, serve
from tests.test_measure import rows_of


def shell(*args, folder=ROOT, **env):
    """Run a script in a folder. Returns its exit status and what it printed."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done = subprocess.run(["sh", *args], cwd=folder, env={**os.environ, "PATH": path, **env},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize("scale, least, start", [
    ("paper", 300, ""), ("paper", 200, "bert-base-uncased"), ("pilot", 70, ""), ("demo", 70, ""),
    ("quick", 40, "")])
def test_every_command_comes_after_what_it_needs(scale, least, start):
    status, text = shell("reproduce.sh", scale, "--list", START=start)
    assert status == 0
    made, commands = set(), 0
    for line in text.splitlines():
        words = shlex.split(line, comments=False) if line.startswith(("python", "torchrun")) else []
        if line.startswith("    makes "):
            made |= {line.split()[1], os.path.dirname(line.split()[1])}
        elif words:
            read = {word.partition("=")[2] or word for word in words if "--out" not in word}
            assert {path for path in read if path.startswith("out/")} <= made | {words[-1]}
            assert all((ROOT / path).is_file() for path in read if path.startswith("configs/"))
            assert words[0] == "python" or "--max-restarts=3" in words
            commands += 1
    assert commands > least


def test_pretraining_takes_the_most_gpus_that_divide_the_batch():
    for gpus, paper_ranks, pilot_ranks in (("3", "1", []), ("0,1,2", "2", ["2"]),
                                           ("0,1,2,3,4,5,6,7", "8", ["4"])):
        for scale, ranks in ("paper", [paper_ranks]), ("pilot", pilot_ranks):
            _, text = shell("reproduce.sh", scale, "pretrain", "--list", CUDA_VISIBLE_DEVICES=gpus)
            assert sorted(set(re.findall(r"--nproc_per_node=(\d)", text))) == ranks


def test_a_mistake_is_one_line():
    for mistake in ("tabel2=", "table5=", "STEPS=1e4", "STEPS=19", "SEEDS=0,1", "TASKS=sst2 mrcp",
                    "START=no/such/folder", "START=scratch"):
        name, _, value = mistake.partition("=")
        status, text = shell("reproduce.sh", "pilot", *[name][:not value], **{name: value})
        assert status == 2 and text.count("\n") == 1 and (mistake if value else name) in text


def test_hours_of_the_paper(tmp_path, monkeypatch):
    """2,280 and 1,549 of the causal runs (results/speed.md). A slow card takes longer."""
    _, text = shell("reproduce.sh", "paper", "--list")
    assert "about 3,829.0 hours" in text and "assumed, one H100" in text
    monkeypatch.setattr(hours, "LOG", tmp_path / "log")
    log = [{"command": "bench.py train configs/base_resm.py"},
           *({"system": f"configs/{name}.py", "tokens/s": speed}
             for name, speed in (("base", 7), ("base_resm", 23900)))]
    hours.LOG.write_text(json.dumps(log))
    assert hours.estimate(text).startswith("about 38,290.0 hours")


def test_jobs_are_dealt_to_gpus_and_run_once(tmp_path):
    (tmp_path / "reproduce").symlink_to(ROOT / "reproduce")
    (tmp_path / "work.sh").write_text("echo $CUDA_VISIBLE_DEVICES >> $1.ran\n")
    (tmp_path / "list.sh").write_text("""
        set -eu
        variables="" steps="data table2"
        . reproduce/run.sh
        begin tiny "$@"
        if step data nothing "side by side"; then
            for x in a b c; do job $out/$x sh work.sh $x; done
        fi
        step table2 data "after them" && run $out/d sh work.sh d
        step end nothing
        """)
    for _ in range(2):
        assert shell("list.sh", folder=tmp_path, CUDA_VISIBLE_DEVICES="4,7")[0] == 0
        ran = {path.stem: path.read_text().split() for path in tmp_path.glob("*.ran")}
        assert ran == {"a": ["4"], "b": ["7"], "c": ["4"], "d": ["4,7"]}
    assert len((tmp_path / "out/reproduce_tiny/seconds").read_text().split()) == 4


SERVER = """  # runs commands in children, which need not import torch
import json, os, runpy, socket, sys
import finetune, matplotlib.pyplot, measure, pretrain
from tests.helpers import before_update, interrupt
server = socket.create_server("server", family=socket.AF_UNIX)
client, _ = server.accept()
while os.fork():
    client.close()
    client, _ = server.accept()
argv, streams, *_ = socket.recv_fds(client, 2**16, 2)
os.dup2(streams[0], 1), os.dup2(streams[1], 2)
sys.argv = json.loads(argv)
name = sys.argv.pop(1) if sys.argv[0] == "-m" else sys.argv[0].removesuffix(".py")
places = {"wikitext103": "--from=texts", "glue": "--from=tasks"}  # in place of downloads
if name == "prepare_data" and sys.argv[1] in places:
    sys.argv.append(places[sys.argv[1]])
run, status = "out/reproduce_pilot/base_resm_init_s0", 0
killed = f"--out={run}" in sys.argv and not os.path.exists(run)
try:
    with before_update(8 if killed else 0, interrupt(9)):
        runpy.run_module(name, run_name="__main__", alter_sys=True)
except SystemExit as end:
    status = end.code or 0
client.send(str(status).encode())
"""
PYTHON = f"""#!{sys.executable} -IS
import json, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect("server")
socket.send_fds(server, [json.dumps(sys.argv[1:]).encode()], [1, 2])
sys.exit(int(server.recv(9) or 137))
"""


def test_the_pilot_from_data_to_export(place, monkeypatch, request):
    """All commands run on a tiny model from a hub. (f) is killed, and the same line goes on."""
    for name in ("reproduce.sh", "reproduce", "configs"):
        Path(name).symlink_to(ROOT / name)
    for name in ("texts", "tasks/SST-2", "bin"):
        Path(name).mkdir(parents=True)
    for split in ("train", "valid", "test"):
        shutil.copy("text.txt", f"texts/wiki.{split}.tokens")
    for split in ("train", "dev"):
        Path(f"tasks/SST-2/{split}.tsv").write_text("sentence\tlabel\n" + "cat\t0\nsaw\t1\n" * 16)
    Path("bin/python").write_text(PYTHON)
    Path("bin/python").chmod(0o755)
    model = tiny_bert(vocab_size=26, n_layer=2, max_len=128)
    config = {theirs: getattr(model.bert.config, ours) for ours, theirs in SETTINGS["bert"].items()}
    files = {"config.json": json.dumps(config).encode(), "vocab.txt": Path("tiny.txt").read_bytes(),
             "model.safetensors": save(to_huggingface(model.state_dict()))}
    variables = {
        "PATH": f"{place}/bin:{os.environ['PATH']}", "JOBS": "1", "STEPS": "20", "SEEDS": "0",
        "TASKS": "sst2", "START": "org/tiny", "PRETRAIN":
            "--memory_layers=1,2 --n_keys=8 --topk=4 --key_dim=8 --seq_len=16 --batch_size=2 "
            "--accumulation=1 --eval_interval=10 --checkpoint_interval=5 --eval_sequences=4"}
    hub = {"repos": {"org/tiny": files}, "missing": set(), "down": False}
    with serve(HubHandler, monkeypatch, **hub) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        server = subprocess.Popen([sys.executable, "-c", SERVER])
        request.addfinalizer(server.kill)
        while server.poll() is None and not Path("server").exists():
            time.sleep(0.05)
        run = Path("out/reproduce_pilot/base_resm_init_s0")
        status, text = shell("reproduce.sh", "pilot", "table2", folder=place, **variables)
        assert status == 1 and "table2 needs: sh reproduce.sh pilot pretrain" in text
        status, text = shell("reproduce.sh", "pilot", folder=place, **variables)
        assert status == 1 and "failed, see" in text and steps_saved(run) == 5
        assert steps_saved("out/reproduce_pilot/base_500k_more_long_s0") == 44  # others went on
        status, text = shell("reproduce.sh", "pilot", folder=place, **variables)
    assert status == 0 and text.endswith(": out/reproduce_pilot/tiny-resm\n")
    assert "# tiny-resm" in Path("out/reproduce_pilot/tiny-resm/README.md").read_text()
    assert "step 0:" not in Path("out/reproduce_pilot/logs/base_resm_init_s0").read_text()
    tables = tables_of(run.parent)
    assert [*tables][1:] == ["Table 2", "Figure 2", "Figure 3", "Table 3", "Table 4", "Table 6"]
    systems = [paper.B, f"{paper.B}, longer", paper.E, paper.F, "tiny"]
    assert list(tables["Table 2"]) == systems and "tiny" in tables["Table 4"]
    assert "(3.20)" in tables["Table 2"][paper.F]["perplexity, WT-103"]
    assert tables["Table 2"][paper.B]["top-1 MU (%)"] == "-"  # PRETRAIN gives it no memory
    assert claimed(tables, "a memory pays for its time")
    status, text = shell("reproduce.sh", "pilot", folder=place, **variables | {"STEPS": "40"})
    assert status == 2 and "STEPS=20" in text and text.count("\n") == 1


def different_numbers():
    """Count up in tenths. No two of the numbers are printed alike."""
    return (n / 10 for n in itertools.count(101))


def usage(numbers):
    """Make up the usage of a run."""
    return {layer: {"mu": next(numbers) / 100, "top1_mu": next(numbers) / 100,
                    "kl_u": next(numbers), "kl_w": next(numbers),
                    "accesses": 1000 * round(10 * next(numbers))} for layer in ("9", "10")}


def usage_texts(layers):
    """Print the usage of made-up layers as the page does."""
    columns = (("MU (%)", "mu", 100, ".1f"), ("top-1 MU (%)", "top1_mu", 100, ".1f"),
               ("KL_u", "kl_u", 1, ".2f"), ("KL_w", "kl_w", 1, ".2f"),
               ("accesses", "accesses", 1, ","))
    return {column: "/".join(f"{scale * layer[name]:{form}}" for layer in layers.values())
            for column, name, scale, form in columns}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make the folder of a demo, without results."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "reproduce_demo/logs").mkdir(parents=True)
    (tmp_path / "reproduce_demo/seconds").write_text("1800\n1440\n")
    (tmp_path / "reproduce_demo/variables").write_text(f"\n{' '.join(page.PARTS)}\n")
    return tmp_path / "reproduce_demo"


def write_page(folder):
    """Write the page, and read its tables."""
    page.main(folder)
    return tables_of(folder)


def tables_of(folder):
    """Read the rows of each part's table of a page: {title: {system: {column: cell}}}."""
    _, *parts = (folder / "page.md").read_text().split("\n## ")
    tables = {}
    for part in parts:
        title = part.partition(":")[0].partition("\n")[0]
        tables[title] = {row.get("system", n): row for n, row in enumerate(rows_of(part))}
    return tables


def claimed(tables, sentence):
    """Return the sides of a claim, as they are printed."""
    [row] = [row for row in tables["Does the paper hold here?"].values()
             if row["the paper says"].startswith(sentence)]
    return row["to be lower"], row["to be higher"]


def write(folder, name, content):
    (folder / f"{name}.json").write_text(json.dumps(content))


def bench(folder, name, results):
    """Write a log of bench.py."""
    facts = {"machine": "M", "torch": "T", "dtype": "float32", "results": results}
    (folder / "logs" / name).write_text(f"| a table |\n{json.dumps(facts)}\n")


def test_language_models_on_the_page(folder):
    """Medians over seeds, usage of the longest text, the last snapshot, start and end."""
    numbers, runs, made = different_numbers(), [], {}
    for run in ("demo", "demo_s1", "demo_s2", "demo_more", "demo_pkm", "demo_resm_init"):
        results = {}
        for text, tokens in ("short", 3), ("docs", 9), ("middle", 5):
            layers = usage(numbers) if "pkm" in run or "resm" in run else {}
            results[text] = {"perplexity": next(numbers) * (100 if run == "demo_s1" else 1),
                             "predicted_tokens": tokens, "layers": layers}
        runs.append({"run": f"out/reproduce_demo/{run}", "results": results})
        made[run] = results
    write(folder, "table2", {"note": "", "runs": runs})

    slots = [{"run": f"out/{run}", "layer": layer, "slots": {
        "never": next(numbers), "999": next(numbers), "2000": next(numbers) / 100}}
        for run in ("demo_pkm", "demo_resm_init") for layer in (9, 10)]
    write(folder, "figure2_seeds", slots)
    curves = {run: [{"perplexity": next(numbers)} for _ in range(3)]
              for run in ("out/demo_pkm_init", "out/demo_resm_init", "out/demo_resm_init_ffn")}
    write(folder, "figure3_seeds", curves)
    tables = write_page(folder)

    rows = tables["Table 2"]
    perplexity = {run: made[run]["docs"]["perplexity"] for run in made}
    assert rows[paper.A]["perplexity, docs"] == f"{perplexity['demo_s2']:.2f}"  # in the middle
    assert rows[paper.A]["perplexity, WT-2"] == "(3.49)" and rows[paper.A]["seeds"] == "3"
    for run, system in ("demo_pkm", paper.C), ("demo_resm_init", paper.F):
        theirs = paper.TABLES["table2"][system]
        for column, text in usage_texts(made[run]["docs"]["layers"]).items():
            if column in theirs:
                digits = 1 if "MU" in column else 2
                text += f" ({'/'.join(f'{x:.{digits}f}' for x in theirs[column])})"
            assert rows[system][column] == text
    assert rows[paper.D]["MU (%)"] == "-"
    assert claimed(tables, "500k steps more gain little") == (
        f"{perplexity['demo_resm_init'] / perplexity['demo_more']:.4g} (0.8741)",
        f"{perplexity['demo_more'] / perplexity['demo']:.4g} (0.9515)")
    c9, c10, f9, f10 = (f"{100 * record['slots']['2000']:.1f}" for record in slots)
    for system, cell in (paper.C, f"{c9}/{c10}"), (paper.F, f"{f9}/{f10}"):
        assert tables["Figure 2"][system]["in use at the end (%)"] == cell
    assert claimed(tables, "with Init and ResM more slots") == (min(c9, c10), min(f9, f10))
    for (start, _, end), system in zip(curves.values(), (paper.E, paper.F, "ResM'")):
        row = tables["Figure 3"][system]
        assert row["perplexity, start"] == f"{start['perplexity']:.2f}"
        assert row["perplexity, end"] == f"{end['perplexity']:.2f}"
    e, f, _ = (curve[0]["perplexity"] for curve in curves.values())
    assert claimed(tables, "PKM starts far worse") == (f"{f:.4g}", f"{e:.4g}")
    assert tables["Table 3"]["SQuAD 1.1"]["max_len"] == "384 (384)"
    assert (folder / "page.md").read_text().count("2 commands, 0.9 hours") == 1
    assert "sh reproduce.sh demo table4" in (folder / "page.md").read_text()


def fine_tuned(numbers, run, task, update=True):
    """Make up records of measure.py glue for three pretrained models, the last in the middle."""
    count = 2 if task in ("squad", "mnli") else 1
    low, middle, high = ([next(numbers) for _ in range(count)] for _ in range(3))
    high = [number * 10 for number in high]
    return [{"run": f"{run}_s{seed}_{task}", "initial": f"out/{run}_s{seed}", "update": update,
             "task": task, "scores": scores, "seeds": {seed: [0] * count}}
            for seed, scores in (("3", low), ("4", high), ("5", middle))]


def middle(records, scores=2):
    return "/".join(f"{score:.1f}" for score in records[2]["scores"][:scores])


def test_fine_tuned_models_on_the_page(folder):
    """Medians over seeds, Y and N, train and dev, first and second memory."""
    numbers = different_numbers()
    table4 = [fine_tuned(numbers, run, "docs_task") for run in
              ("demo", "demo_pkm", "demo_resm_init", "demo_large")]
    table5 = [fine_tuned(numbers, f"demo_{run}", task, update)
              for run, task, update in itertools.product(
                  ("pkm", "resm", "pkm_init", "resm_init"), ("mnli", "sst2"), (True, False))]
    table7 = [fine_tuned(numbers, run, task)
              for run in ("demo_distil", "demo_distil_resm_init", "demo")
              for task in ("squad", "mnli")]
    for name, records in ("table4", table4), ("table5", table5), ("table7", table7):
        write(folder, name, list(itertools.chain(*records)))
    perplexity = next(numbers)
    write(folder, "table7_text", {"runs": [{"run": "out/demo_distil", "results": {
        "docs": {"perplexity": perplexity, "predicted_tokens": 1, "layers": {}}}}]})
    table6 = [{"run": f"out/demo_{run}_docs_task", "task": "docs_task", "split": split,
               "layers": usage(numbers)}
              for run in ("pkm", "resm_init") for split in ("dev", "train")]
    write(folder, "table6", table6)
    figure4 = [{"run": f"out/demo_{run}_docs_task", "when": when, "layer": layer,
                "kl": next(numbers), "shared": next(numbers), "iou": next(numbers)}
               for run in ("pkm", "resm_init") for layer in (9, 10) for when in ("after", "before")]
    write(folder, "figure4_seeds", figure4)
    tables = write_page(folder)

    for records, system in zip(table4, (paper.A, paper.C, paper.F, paper.H)):
        row = tables["Table 4"][system]
        assert row["which package"] == middle(records) and row["seeds"] == "3"
        assert row["Avg"] == f"({paper.TABLES['table4'][system]['Avg']})"
    a, c, f, h = (np.mean([record["scores"] for record in records]) for records in table4)
    assert claimed(tables, "plain PKM is worse") == (f"{c:.4g} (85.5)", f"{a:.4g} (86.25)")
    assert claimed(tables, "base with ResM compares to large") == (
        f"{h - f:.4g} (0.05)", f"{f - a:.4g} (1.883)")  # (a) stands for (g)
    for records in table5:
        system, _ = paper.system_of(records[0]["initial"])
        row = tables["Table 5"][f"{system}, {'Y' if records[0]['update'] else 'N'}"]
        cell = row[paper.TASKS[records[0]["task"]]]
        assert cell.startswith(f"{middle(records, 1)} (")  # MNLI: matched alone
    for record, split in zip(table6, (", dev", "", ", dev", "")):
        system = paper.C if "demo_pkm" in record["run"] else paper.F
        row = tables["Table 6"][f"{system}, which package{split}"]
        for column, text in usage_texts(record["layers"]).items():
            assert row[column] == text
    assert claimed(tables, "Init and ResM raise top-1 MU") == tuple(
        f"{100 * min(layer['top1_mu'] for layer in table6[n]['layers'].values()):.4g}"
        for n in (1, 3))  # of train
    assert tables["Table 6"][f"{paper.F}, CoLA"]["KL_w"] == "(4.15/4.06)"
    assert tables["Table 6"][f"{paper.F}, CoLA"]["KL_u"] == "(?)"
    row = tables["Table 7"]["DistilBERT +Init +ResM"]
    assert row["SQuAD 1.1"].split(" ")[0] == middle(table7[2])
    assert row["MNLI"].split(" ")[0] == middle(table7[3], 1)
    assert tables["Table 7"]["DistilBERT*"]["perplexity, docs"] == f"{perplexity:.2f}"
    for when, records in ("after", figure4[::2]), ("before", figure4[1::2]):
        for column, key in ("KL", "kl"), ("shared", "shared"), ("IOU", "iou"):
            c9, c10, f9, f10 = (f"{record[key]:.3f}" for record in records)
            for system, cell in (paper.C, f"{c9}/{c10}"), (paper.F, f"{f9}/{f10}"):
                assert tables["Figure 4"][system][f"{column}, {when}"] == cell
    c9, c10, f9, f10 = (record["kl"] for record in figure4[::2])
    ratio = max(c9 / f9, c10 / f10)
    assert claimed(tables, "(f) tells classes apart better") == (f"{ratio:.4g}", "1")


def test_the_average_of_table_4(folder):
    """Of the medians of six numbers: MNLI has two, SQuAD does not count."""
    numbers = different_numbers()
    squad, *five = (fine_tuned(numbers, "demo", task)
                    for task in ("squad", "mnli", "qqp", "qnli", "sst2", "cola"))
    six = [score for three in five for score in three[2]["scores"]]
    for records in ([squad, *five], five):
        write(folder, "table4", list(itertools.chain(*records)))
        row = write_page(folder)["Table 4"][paper.A]
        assert row["Avg"] == f"{sum(six) / 6:.1f} (83.8)"
        assert row["MNLI"] == f"{middle(five[0])} (84.3/84.5)"


def test_runs_at_the_papers_size_are_its_systems():
    runs = ["base", "base_500k_more", "base_pkm", "base_resm", "base_pkm_init", "base_resm_init",
            "bert-base-uncased", "bert-large-uncased"]
    assert [paper.system_of(f"out/{run}")[0][1] for run in runs] == list("abcdefgh")
    small = ["distilbert-base-uncased", "distil_resm_init", "causal_12", "causal_24",
             "causal_12_pkm", "causal_12_memory"]
    assert [paper.system_of(run)[0] for run in small] == [
        "DistilBERT*", "DistilBERT +Init +ResM", "n layers", "2n layers", "n layers, PKM",
        "n layers, ResM"]


def test_times_on_the_page(folder):
    """Medians of the rounds. A size, a length and a model have their own places."""
    numbers = different_numbers()

    def record(system, length, **more):
        low, high, middle = next(numbers) / 1e3, next(numbers), next(numbers) / 1e3
        return {"what": f"inference, 1 x {length}", "system": system, "compiled": False,
                "seconds": [high, low, middle], "parameters": next(numbers) * 1e6, **more}

    table1 = [record(system, length, mlm_parameters=next(numbers) * 1e6,
                     **{"batches/s": next(numbers), "relative_batches/s": next(numbers)})
              for length in (128, 512) for system in ("base", "base +ResM", "large")]
    bench(folder, "table1", table1)
    configs = "causal", "causal_8", "causal_pkm", "causal_memory"
    times = [record(f"configs/demo_{config}.py", 128, compiled=True) for config in configs]
    bench(folder, "causal_time", times)
    texts = {config: next(numbers) for config in configs}
    write(folder, "causal", {"runs": [{"run": f"out/demo_{config}", "results": {"docs":
        {"perplexity": texts[config], "predicted_tokens": 1, "layers": {}}}}
        for config in configs]})
    slots = [record(f"{keys} keys, {n}^2 slots", 128, multiplications=round(1e4 * next(numbers)))
             for n in (1024, 128) for keys in ("product", "flat")]
    bench(folder, "slots", slots)
    tables = write_page(folder)

    small, *_, large = table1  # of 128 tokens, of 512
    for found in small, large:
        row, what = tables["Table 1"][found["system"]], found["what"]
        assert row[f"ms, {what}"] == f"{1000 * found['seconds'][2]:.4g}"
        assert row[f"batches/s, {what}"] == f"{1 / found['seconds'][2]:.3g}"
        assert row[f"relative, {what}"] == f"{found['relative_batches/s']:.2f}"
    assert row["parameters (M)"] == f"{large['mlm_parameters'] / 1e6:.4g} (340)"
    assert "seeds" not in row  # rounds are none
    resm, large = (np.mean(1 / np.array(found["seconds"])) for found in table1[4:])
    assert claimed(tables, "base +ResM is much faster") == (
        f"{large:.4g} (43.1)", f"{resm:.4g} (59.3)")
    row = tables["Lample et al., layers"]["n layers, ResM"]
    assert row["ms, inference, 1 x 128, compiled"] == f"{1000 * times[3]['seconds'][2]:.4g}"
    assert row["perplexity, docs"] == f"{texts['causal_memory']:.2f}"
    rounds = zip(times[2]["seconds"], times[1]["seconds"])
    assert claimed(tables, "and is twice as fast")[0] == (
        f"{np.mean([pkm / deep for pkm, deep in rounds]):.4g} (0.5)")
    assert claimed(tables, "a memory in n layers") == (
        f"{texts['causal_pkm']:.4g}", f"{texts['causal_8']:.4g}")
    row = tables["Lample et al., keys"]["flat keys, 128^2 slots"]
    assert row["multiplications of a search"] == f"{slots[3]['multiplications']:,}"


def test_claims_hold_on_the_papers_numbers_and_exchanged_they_do_not():
    known = 0
    for claim in claims.CLAIMS:
        theirs = claims.paper_sides(claim)
        if theirs:
            lower, higher = theirs
            for pair, holds in ((theirs, "yes"), ((higher, lower), "**no**"),
                                ((lower, lower), "undecided")):
                assert claims.verdict([pair, pair], claim.ratio)[0] == holds, claim.sentence
            assert claims.verdict([theirs], claim.ratio)[0] == "one seed"
            known += 1
    assert (known, len(claims.CLAIMS)) == (19, 25)
    worse = [claims.number(paper.TABLES["table2"], paper.E, column)
             for column in ("top-1 MU (%)", "KL_u")]
    assert worse == [95.7, 0.69]  # of the layers


def test_students_interval_decides(folder):
    """By a table of Student's t: 4.303 / sqrt(3) = 2.484 for three numbers one apart."""
    for low, holds in (2, "yes"), (1, "undecided"), (-3, "undecided"), (-4, "**no**"):
        pairs = [(10, 10 + low + more) for more in (0, 1, 2)]
        assert claims.verdict(pairs, ratio=False) == (
            holds, f"{-low - 1} [{-low - 1 - 2.4843:.4g}, {-low - 1 + 2.4843:.4g}]")
    pairs = [(np.e**-n, 1) for n in (2, 3, 4)]
    _, interval = claims.verdict(pairs, ratio=True)
    assert interval == f"{np.e**-3:.4g} [{np.e**-5.4843:.4g}, {np.e**-0.5157:.4g}]"
    rows = [["", "", "", holds] for holds in ("yes", "not here: why", "yes", "**no**")]
    assert claims.totals(rows) == "2 yes, 1 **no**, 1 not here"


@pytest.mark.parametrize("fault", ["none", "dtype", "scale", "skipped"])
def test_a_card_that_computes_otherwise_is_seen(fault, monkeypatch):
    settings = Settings(n_layer=1, n_head=2, d_model=16, d_ff=32, memory_layers=(1,), n_keys=16,
                        topk=4, key_dim=8, dropout=0.0, seq_len=16, batch_size=4, accumulation=1,
                        warmup_steps=1, device="cpu", dtype="float32", compile="off")
    model = LanguageModel(bert_config(settings, 50))
    batches = RandomBatches(50, settings)
    net, optimizers, _ = training.prepare(model, settings)
    for number in range(2):
        training.step(number, net, batches, optimizers, settings)
    update = LazyAdam.step

    def trial(**changed):
        with monkeypatch.context() as patch:
            if "device" in changed and fault == "dtype":
                changed["dtype"] = "bfloat16"
            if "device" in changed and fault == "scale":
                patch.setattr(LazyAdam, "step", lambda sparse, grad_scale: update(sparse))
            if "device" in changed and fault == "skipped":
                patch.setattr(LazyAdam, "step", lambda sparse, grad_scale: None)
            return card.one_step(2, model, optimizers, batches, settings, **changed)

    dtypes = ["float16"] if fault == "scale" else ["float32"]  # float32 has no scale
    [line], failed = card.judge(list(card.compare("tiny", trial, "cpu", dtypes, ["off"])))
    cells = dict(zip(card.NUMBERS, line[3:], strict=True))
    assert ("no" in cells["change of values"]) == (fault != "none")
    assert ("no" in cells["gradients"]) == (fault == "dtype")
    assert bool(failed) == (fault != "none")


def test_a_seed_of_nan_decides_nothing():
    [claim] = (claim for claim in claims.CLAIMS if claim.table == "figure4")
    tables = [{paper.C: {"KL, after": [kl, 1]}, paper.F: {"KL, after": [2, 4]}}
              for kl in (np.nan, 1)]
    assert claims.sides(claim, tables) == [(0.5, 1)]
