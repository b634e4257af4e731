"""
The code's own order: imports run one way down, no script imports a script, files stay small.
"""
import ast
import os
import subprocess
import sys

import common
from tests.helpers import ROOT

SCRIPTS = ["pretrain", "finetune", "measure", "bench", "prepare_data", "export"]
ROOMS = ["common", "scalars", "values", "pkm", "add_memory", "ranks", "download", "text", "data", "model",
         "huggingface", "checkpoint", "training", "usage", "tasks", "predictions", "browse",
         "figures"]
OUTSIDE = "modeling_pkm"  # goes with exported weights; nothing here imports it
PACKAGES = {"torch", "numpy", "tiktoken", "tokenizers", "requests", "tqdm", "huggingface_hub",
            "matplotlib", "pyarrow", "safetensors"}
PATHS = {path.stem: path for path in ROOT.glob("*.py")
         if not path.stem.startswith("test_") and path.stem != OUTSIDE}


def test_imports_run_one_way_down():
    assert PATHS.keys() == {*ROOMS, *SCRIPTS}
    for name, path in PATHS.items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import)
                    for alias in node.names}
        imported |= {node.module.split(".")[0] for node in nodes
                     if isinstance(node, ast.ImportFrom)}
        ours = imported & PATHS.keys()
        below = ROOMS if name in SCRIPTS else ROOMS[:ROOMS.index(name)]
        assert ours <= set(below), name
        assert imported - ours - sys.stdlib_module_names <= PACKAGES, name
        assert name != "values" or not ours
        assert name not in ("pkm", "add_memory") or len(ours) == 1
        assert OUTSIDE not in imported
    sizes = [len((ROOT / f"{name}.py").read_text().splitlines()) for name in
             (OUTSIDE, "add_memory")]
    assert sum(sizes) < 150  # code that people run on trust


def test_the_core_is_read_in_an_evening():
    lines = {name: len(path.read_text().splitlines()) for name, path in PATHS.items()}
    assert sum(lines[name] for name in ("pkm", "values", "model", "data", "training", "pretrain")) <= 1500
    files = [*ROOT.glob("*.py"), *ROOT.glob("tests/*.py")]
    assert max(len(path.read_text().splitlines()) for path in files) <= 650


def test_how_threads_wait_is_set_before_torch_is_loaded():
    """In every script and in the tests; what the user has set stays."""
    for name in [*(name for name in SCRIPTS if name != "prepare_data"), "tests.conftest"]:
        code = ("import os, sys\n"
                "class Finder:\n"
                "    def find_spec(self, name, path=None, target=None):\n"
                "        if name == 'torch':\n"
                "            print(os.environ.get('GOMP_SPINCOUNT'), flush=True)\n"
                "            os._exit(0)\n"
                f"sys.meta_path.insert(0, Finder())\nimport {name}")
        clean = {key: value for key, value in os.environ.items() if key not in common.WAITING}
        for more, expected in (({}, "2000" if sys.platform == "linux" else "None"),
                               ({"OMP_WAIT_POLICY": "ACTIVE"}, "None"),
                               ({"GOMP_SPINCOUNT": "5"}, "5")):
            found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean | more,
                                   capture_output=True, text=True, check=True).stdout.strip()
            assert found == expected, name


def test_preparing_data_needs_neither_torch_nor_requests():
    code = "import sys, prepare_data; sys.exit('torch' in sys.modules or 'requests' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
