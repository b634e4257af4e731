"""
The code's own order: imports run one way down, no script imports a script, files stay small.
"""
import ast
import subprocess
import sys

from tests.helpers import ROOT

SCRIPTS = ["pretrain", "finetune", "measure", "bench", "prepare_data", "export"]
ROOMS = ["common", "scalars", "pkm", "download", "text", "data", "model", "huggingface",
         "checkpoint", "training", "usage", "tasks", "browse", "figures"]
PACKAGES = {"torch", "numpy", "tiktoken", "tokenizers", "requests", "tqdm", "huggingface_hub",
            "matplotlib", "pyarrow", "safetensors"}
PATHS = {path.stem: path for path in ROOT.glob("*.py") if not path.stem.startswith("test_")}


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
        assert not (name == "pkm" and ours)


def test_the_core_is_read_in_an_evening():
    lines = {name: len(path.read_text().splitlines()) for name, path in PATHS.items()}
    assert sum(lines[name] for name in ("pkm", "model", "data", "training", "pretrain")) <= 1428
    assert max(lines.values()) <= 650


def test_preparing_data_needs_neither_torch_nor_requests():
    code = "import sys, prepare_data; sys.exit('torch' in sys.modules or 'requests' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
