"""
Make the working directories that tests share once, and copy them for each test.
"""
import hashlib
import itertools
import os
import random
import shutil
import signal
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from tests.helpers import PIECES, ROOT, SHARED, TINY, prepare, train, write_tasks
from tests.on_ranks import SERVER

torch.set_num_threads(1)  # at these sizes threads mostly wait for each other
os.environ["OMP_NUM_THREADS"] = "1"  # and in the processes that a test starts
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # a card is tried if it is named
os.environ["PYTHONPATH"] = str(ROOT)


def pytest_collection_finish(session):
    """Start the server of on_ranks.py, which imports what the tests that use it import.

    Its imports take seconds, beside the first tests.
    """
    modules = {getattr(item, "module", None) for item in session.items}
    users = sorted(module.__name__ for module in modules if hasattr(module, "start"))
    if users:
        SERVER.set_forkserver_preload(users)
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """Make a folder with tiny.py, data/tiny, and data/other of another vocabulary."""
    folder, rng = tmp_path_factory.mktemp("prepared"), random.Random(0)
    kinds = [words.split(" ") for words in ("the a one no", "old red wet big shy",
                                            "cat dog owl elk fox", "saw met hid bit fed")]
    order = [0, 1, 2, 3, 0, 1, 2]
    text = "\n\n".join("\n".join(" ".join(rng.choice(kinds[k]) for k in order) + " ."
                                 for _ in range(8)) for _ in range(60))
    (folder / "text.txt").write_text(text)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *itertools.chain(*kinds)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, vocab in (("tiny", words), ("other", [*words[:-1], "more"])):
            Path(f"{name}.txt").write_text("\n".join(vocab) + "\n")
            prepare("text", name, "text.txt", "--vocab", f"{name}.txt", "--val_every", "10")
    (folder / "tiny.py").write_text("".join(f"{k} = {v!r}\n" for k, v in TINY.items()))
    return folder


@pytest.fixture
def place(prepared, tmp_path, monkeypatch):
    """Work in a copy of `prepared`, and put signal handlers back."""
    caught = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
    handlers = {number: signal.getsignal(number) for number in caught}
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


SAMPLE = "The cat sat.\nThe mats\n\nA cat.\n\nThe mat. [SEP]\n\nsat sat\n"


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """Work in an empty folder with a vocab.txt of PIECES and a text of four documents."""
    monkeypatch.chdir(tmp_path)
    Path("vocab.txt").write_text("\n".join(PIECES) + "\n")
    Path("sample.txt").write_text(SAMPLE)
    return tmp_path


@pytest.fixture
def gpt2_files(monkeypatch, tmp_path):
    """Put GPT-2's two files where tiktoken looks: under the SHA-1 of their addresses."""
    if not (SHARED / "gpt2-bpe").is_dir():
        pytest.skip("no GPT-2 vocabulary on this machine")
    pytest.importorskip("tiktoken")
    (tmp_path / "cache").mkdir()
    for name in ("encoder.json", "vocab.bpe"):
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        shutil.copy(SHARED / "gpt2-bpe" / name,
                    tmp_path / "cache" / hashlib.sha1(url.encode()).hexdigest())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    return SHARED / "gpt2-bpe"


@pytest.fixture
def tuned(place):
    """Pretrain a tiny model with memory, and write a task of one's own and tune.py."""
    assert train("--max_steps=4", "--eval_interval=100") == 0
    write_tasks()
    Path("tune.py").write_text("task = 'own'\ninit_from = 'out/tiny'\nmax_len = 32\nepochs = 3\n"
                               "batch_size = 8\nlr = 5e-3\nvalue_lr = 1e-2\nlog_interval = 5\n"
                               "checkpoint_interval = 5\ndevice = 'cpu'\n")
    return place
