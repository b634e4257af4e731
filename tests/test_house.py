"""
The code's own order: imports run one way down, and reading data takes no torch.
"""
import ast
import subprocess
import sys

from tests.helpers import ROOT

SCRIPTS = {"pretrain", "finetune", "bench"}
BELOW = {"configs": set(), "pkm": set(), "prepare_data": {"configs"},
         "tasks": {"prepare_data", "configs"}, "model": {"pkm", "prepare_data", "configs"},
         "measure": {"model", "tasks", "prepare_data", "configs"}}
PACKAGES = {"torch", "numpy", "tiktoken", "tokenizers", "requests", "matplotlib", "pyarrow",
            "safetensors"}


def test_imports_run_one_way_down():
    paths = {path.stem: path for path in ROOT.glob("*.py") if not path.stem.startswith("test_")}
    paths["configs"] = ROOT / "configs" / "__init__.py"
    assert paths.keys() >= BELOW.keys() | {"pretrain"}
    for name, path in paths.items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import)
                    for alias in node.names}
        imported |= {node.module.split(".")[0] for node in nodes
                     if isinstance(node, ast.ImportFrom)}
        own = imported & paths.keys()
        assert own <= BELOW.get(name, paths.keys() - SCRIPTS), (name, own)
        assert imported - own - sys.stdlib_module_names <= PACKAGES, name


def test_preparing_data_needs_no_torch():
    code = "import sys, prepare_data; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_reading_does_not_import_torch(workdir):
    code = "import sys, prepare_data; sys.exit('torch' in sys.modules or 'requests' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
