"""
The code's own order: imports run one way down, no script imports a script, files stay small.
"""
import ast
import subprocess
import sys

from tests.helpers import ROOT

CARD = {"model", "pkm", "values", "prepare_data", "pretrain", "finetune", "measure", "bench"}
SCRIPTS = {"prepare_data", "pretrain", "finetune", "measure", "bench"}
# Each line may import from itself and from the lines above it.
ORDER = ["values", "pkm", "lib.common", "model", "lib.distributed", "lib.corpus", "lib.weights",
         "lib.training", "lib.tasks", "lib.slot_usage", "lib.for_transformers"]
PACKAGES = {"torch", "numpy", "tiktoken", "tokenizers", "requests", "tqdm", "huggingface_hub",
            "matplotlib", "pyarrow", "safetensors"}
NEED_TRANSFORMERS = {f"lib.for_transformers.{name}"
                     for name in ("modeling_pkm", "folder", "trainer")}


def room(module):
    """The line of ORDER that a module is in."""
    return ".".join(module.split(".")[:2])


def imports(path):
    """Full names of the modules that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            is_module = {m for m in submodules if (ROOT / f"{m.replace('.', '/')}.py").exists()}
            found |= is_module or {node.module}
    return found


def modules():
    """{full name: path} of the project's modules, without tests."""
    paths = [*ROOT.glob("*.py"), *ROOT.glob("lib/*/*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths
            if not path.stem.startswith(("test_", "__"))}


def test_the_root_is_the_card():
    assert {path.stem for path in ROOT.glob("*.py")} - {"test_pkm"} <= CARD


def test_imports_run_one_way_down():
    graph = {name: imports(path) for name, path in modules().items()}
    for name, imported in graph.items():
        ours = imported & graph.keys()
        others = {module.split(".")[0] for module in imported - ours}
        allowed = PACKAGES | ({"transformers"} if name in NEED_TRANSFORMERS else set())
        assert others - sys.stdlib_module_names <= allowed
        if name in SCRIPTS:
            assert not ours & SCRIPTS, name
        else:
            below = ORDER[:ORDER.index(room(name)) + 1]
            assert {room(module) for module in ours} <= set(below), (name, ours)


def test_no_two_modules_import_each_other():
    graph = {name: imports(path) for name, path in modules().items()}
    done = set()

    def visit(name, path):
        assert name not in path, [*path, name]
        if name not in done:
            for module in sorted(graph[name] & graph.keys()):
                visit(module, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_files_stay_small():
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert max(lines.values()) <= 400 and lines["pkm"] <= 200 and lines["values"] <= 300
    assert max(lines[name] for name in SCRIPTS - {"bench"}) <= 300
    assert len((ROOT / "test_pkm.py").read_text().splitlines()) <= 350


def test_preparing_data_needs_neither_torch_nor_requests():
    code = "import sys, prepare_data; sys.exit('torch' in sys.modules or 'requests' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
