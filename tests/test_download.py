"""
Downloads from a local server that fails in every way, and from a stand-in for the hub.
"""
import fnmatch
import hashlib
import http.server
import io
import os
import random
import shutil
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

import prepare_data
from lib.corpus import Corpus
from lib.download import FILES, fetch, fetch_from_hub, unpack
from lib.errors import Failure, UserError
from lib.tasks import GLUE, SQUAD
from tests.helpers import prepare, texts_of, write_parquet


class Handler(http.server.BaseHTTPRequestHandler):
    """Serve server.files, {path: bytes}, after server.plan: what to do with each GET in turn.

    A plan has statuses and "cut". server.seen has the path of every GET.
    """

    def do_GET(self):
        server = self.server
        server.seen.append(self.path)
        step = server.plan.pop(0) if server.plan else 200
        assert "Mozilla" in self.headers["User-Agent"]
        if step not in ("cut", 200):
            return self.send_error(step)
        body = server.files[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:len(body) // 2] if step == "cut" else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(workdir, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files, server.plan, server.seen = {}, [], []
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def hub(workdir, monkeypatch):
    """Repositories in place of the hub's: {(kind, repo): {name: bytes}}."""
    repos = {}

    def snapshot_download(repo_id, *, repo_type, allow_patterns, local_dir):
        for name, body in repos[repo_type, repo_id].items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                path = Path(local_dir, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(body)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return repos


def left(folder="data"):
    """The names in a folder, but for locks."""
    return sorted(name for name in os.listdir(folder) if not name.startswith(".lock"))


BODY = random.Random(0).randbytes(2**18)


@pytest.mark.parametrize("plan", [[], [503], ["cut"]])
def test_a_download_is_whole_and_tried_once_more(server, plan):
    server.files["/a.zip"], server.plan = BODY, list(plan)
    sha256 = hashlib.sha256(BODY).hexdigest()
    for _ in range(2):  # the second time it is there
        path = fetch(f"{server.url}/a.zip", sha256, Path("data"))
    assert path == Path("data/a.zip") and path.read_bytes() == BODY and left() == ["a.zip"]
    assert len(server.seen) == 1 + len(plan)


@pytest.mark.parametrize("plan, sha256, message", [
    ([503, 404], "", "404.*without a network give"), ([404, "cut"], "", "IncompleteRead"),
    ([], "0" * 64, "expected SHA-256 000000000000, received")])
def test_a_failed_download_is_one_line_and_leaves_nothing(server, plan, sha256, message):
    server.files["/a.zip"], server.plan = BODY, list(plan)
    with pytest.raises(Failure, match=f"^{server.url}/a.zip: .*{message}") as error:
        fetch(f"{server.url}/a.zip", sha256, Path("data"))
    assert "\n" not in str(error.value) and len(server.seen) == max(1, len(plan))
    assert left() == []


def test_no_network(workdir, monkeypatch):
    """One line that names the way out."""
    nobody = "http://127.0.0.1:9"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nobody)
    for call in (lambda: fetch_from_hub("a/b", ["x"], Path("x")),
                 lambda: fetch(f"{nobody}/a.zip", folder=Path())):
        with pytest.raises(Failure, match="onnect.*without a network give --vocab") as error:
            call()
        assert "\n" not in str(error.value)
    assert left(".") == ["sample.txt", "vocab.txt"]


def test_weights(hub):
    """Of any name of the hub; safetensors go before pytorch_model.bin."""
    files = dict.fromkeys(("config.json", "vocab.txt", "pytorch_model.bin", "README.md"), b"1")
    hub["model", "google-bert/bert-base-uncased"] = files | {"model.safetensors": b"2"}
    hub["model", "org/old.bert"] = files
    prepare("weights", "bert-base-uncased", "org/old.bert")
    for name, file in (("bert-base-uncased", "model.safetensors"),
                       ("org/old.bert", "pytorch_model.bin")):
        assert left(f"data/weights/{name}") == ["config.json", file, "vocab.txt"]


def zipped(files):
    """The bytes of a zip of {name: text}."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return file.getvalue()


def test_archives_are_unpacked_once_and_stay_inside(workdir):
    """Two of one name, and one whose files would go elsewhere."""
    for name, text in (("a", "1"), ("b", "2")):
        Path(name).mkdir()
        Path(name, "x.zip").write_bytes(zipped({"in/1.txt": text, "../out.txt": "escaped"}))
    first, second = (unpack(Path(name, "x.zip")) for name in "ab")
    assert first == unpack(Path("a/x.zip")) != second
    assert [Path(folder, "in/1.txt").read_text() for folder in (first, second)] == ["1", "2"]
    with tarfile.open("c.tar.bz2", "w:bz2") as archive:
        archive.add("sample.txt", "../../out.txt")
    with pytest.raises(tarfile.OutsideDestinationError):
        unpack(Path("c.tar.bz2"))
    assert len(left("data/downloads")) == 2 and not list(Path().rglob("out.txt"))


def test_corpora_of_the_paper(server, hub, monkeypatch):
    """Wikipedia's files, and PG-19's books, which a list names."""
    write_parquet("a.parquet", ["cat", "sat", "mat", "the mat"])
    parquet = Path("a.parquet").read_bytes()
    hub["dataset", "wikimedia/wikipedia"] = {
        "20231101.en/0.parquet": parquet, "20231101.en/1.parquet": parquet,
        "20231101.fr/0.parquet": b"other"}
    hub["model", "google-bert/bert-base-uncased"] = {"vocab.txt": Path("vocab.txt").read_bytes()}
    prepare("wikipedia")
    corpus = Corpus("wikipedia")
    assert corpus.meta["documents"] == {"train": 2, "val": 1, "test": 1}
    assert corpus.meta["duplicates"] == 4
    hub["dataset", "deepmind/pg19"] = {"data/test_files.txt": b"test/7.txt\ntest/8.txt\n"}
    server.files = {"/test/7.txt": b"cat\n\nsat\n", "/test/8.txt": b"mat\n"}
    monkeypatch.setattr(prepare_data, "PG19", f"{server.url}/")
    prepare("pg19")
    pg19 = Corpus("pg19")
    assert texts_of(pg19, "test") == ["cat sat", "mat"]
    assert pg19.meta["tokens"]["train"] == 0 and pg19.meta["unigram_perplexity"] is None


def found(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_glue(server, monkeypatch):
    """Downloaded, or from a folder with the unpacked files: the official ones."""
    server.files["/SST-2.zip"] = zipped({
        "SST-2/": "", "SST-2/train.tsv": "a\t1\n", "SST-2/dev.tsv": "b\t0\n",
        "SST-2/original/raw.txt": "c", "__MACOSX/SST-2/._train.tsv": "d"})
    monkeypatch.setitem(FILES, "SST-2.zip", (f"{server.url}/SST-2.zip", ""))
    expected = {"train.tsv": b"a\t1\n", "dev.tsv": b"b\t0\n"}
    prepare("glue", "SST-2")
    assert found("data/glue/SST-2") == expected and left("data/glue") == ["SST-2"]
    with pytest.raises(UserError, match="data/glue/SST-2 exists already"):
        prepare("glue", "SST-2")
    shutil.copytree("data/glue", "mine")
    prepare("glue", "--from", "mine", "SST-2", "--force")
    assert found("data/glue/SST-2") == expected
    with pytest.raises(UserError, match="mine/RTE: no .*tsv"):
        prepare("glue", "--from", "mine", "RTE")


def test_tasks_of_single_files(server, monkeypatch):
    """MRPC's and SQuAD's, downloaded or from a folder."""
    mrpc = next(task for task in GLUE if task.name == "mrpc")
    for task, args in ((mrpc, ["glue", "MRPC"]), (SQUAD, ["squad"])):
        for name in task.archives:
            server.files[f"/{name}"] = name.encode()
            monkeypatch.setitem(FILES, name, (f"{server.url}/{name}", ""))
        prepare(*args)
        expected = {name: name.encode() for name in task.archives}
        assert found(task.folder) == expected
        prepare(*args, "--from", "data/glue" if task is mrpc else "data/downloads", "--force")
        assert found(task.folder) == expected
