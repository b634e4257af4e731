"""
Downloads from a local server that breaks off, and from a stand-in for the hub.
"""
import fnmatch
import hashlib
import http.server
import io
import json
import os
import random
import shutil
import tarfile
import threading
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests

from lib.corpus import Corpus
from lib.settings import Failure
from lib.tasks import TASKS
from prepare_data import fetch, fetch_from_hub, unpack
from tests.helpers import prepare, texts_of, write_parquet


class Handler(http.server.BaseHTTPRequestHandler):
    """Serve server.files, {path: bytes}. The first server.broken replies end halfway."""

    def do_GET(self):
        server = self.server
        server.seen.append(self.path)
        assert "Mozilla" in self.headers["User-Agent"]
        if self.path not in server.files:
            return self.send_error(404)
        body = server.files[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:len(body) // 2] if len(server.seen) <= server.broken else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(workdir, monkeypatch):
    """Start a server in place of all others. server.seen has the path of every request."""
    get = requests.get
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("requests.get", lambda url, **settings: get(
        f"http://127.0.0.1:{server.server_port}{urlsplit(url).path}", **settings))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files, server.broken, server.seen = {}, 0, []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def hub(workdir, monkeypatch):
    """Put repositories in place of the hub's: {(kind, repo): {name: bytes}}."""
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
    """List the names in a folder, but for locks."""
    return sorted(name for name in os.listdir(folder) if not name.startswith(".lock"))


BODY = random.Random(0).randbytes(2**18)


def test_a_download_is_whole_and_checked(server):
    """It is tried once more, and later it is there."""
    server.files["/a.zip"], server.broken = BODY, 1
    for _ in range(2):
        path = fetch("https://host/a.zip", hashlib.sha256(BODY).hexdigest(), Path("data"))
    assert path == Path("data/a.zip")
    assert path.read_bytes() == BODY
    assert left() == ["a.zip"]
    assert len(server.seen) == 2


@pytest.mark.parametrize("name, broken, sha256, words", [
    ("b.zip", 0, "", "--from PATH"), ("a.zip", 2, "", "--from PATH"),
    ("a.zip", 0, "0" * 64, "SHA-256 is not 0")])
def test_a_failed_download_is_one_line_and_leaves_nothing(server, name, broken, sha256, words):
    server.files["/a.zip"], server.broken = BODY, broken
    with pytest.raises(Failure, match=f"^https://host/{name}: .*{words}.*$"):
        fetch(f"https://host/{name}", sha256, Path("data"))
    assert left() == []


def test_no_hub(workdir, monkeypatch):
    """One line that names the way out."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Failure, match="^a/b on the hub: .*--vocab FILE.*$"):
        fetch_from_hub("a/b", ["x"], Path("x"))
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
    """Make the bytes of a zip of {name: text}."""
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
    assert len(left("data/downloads")) == 2
    assert not list(Path().rglob("out.txt"))


def test_corpora_of_the_paper(server, hub):
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
    server.files = {"/deepmind-gutenberg/test/7.txt": b"cat\n\nsat\n",
                    "/deepmind-gutenberg/test/8.txt": b"mat\n"}
    prepare("pg19")
    pg19 = Corpus("pg19")
    assert texts_of(pg19, "test") == ["cat sat", "mat"]
    assert pg19.meta["tokens"]["train"] == 0
    assert pg19.meta["unigram_perplexity"] is None


def found(folder):
    files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    assert json.loads(files.pop("meta.json")).keys() == {"source"}
    return files


def test_a_task_from_a_zip(server):
    """A downloaded one must be the official one. Of it and of a folder the *.tsv are taken."""
    files = {"SST-2/": "", "SST-2/train.tsv": "a\t1\n", "SST-2/dev.tsv": "b\t0\n",
             "SST-2/original/raw.txt": "c", "__MACOSX/SST-2/._train.tsv": "d"}
    server.files["/glue/data/SST-2.zip"] = zipped(files)
    with pytest.raises(Failure, match="SST-2.zip"):
        prepare("glue", "SST-2")
    assert left("data/glue") == []
    Path("data/downloads/SST-2.zip").write_bytes(zipped(files))  # as if it had been
    prepare("glue", "SST-2")
    expected = {"train.tsv": b"a\t1\n", "dev.tsv": b"b\t0\n"}
    assert found("data/glue/SST-2") == expected
    assert left("data/glue") == ["SST-2"]
    shutil.copytree("data/glue", "mine")
    prepare("glue", "--from", "mine", "SST-2", "--force")
    assert found("data/glue/SST-2") == expected


@pytest.mark.parametrize("name, command", [("mrpc", ["glue", "MRPC"]), ("squad", ["squad"])])
def test_a_task_of_single_files(workdir, name, command):
    """The files are in data/downloads/, or in a folder of one's own."""
    task = TASKS[name]
    expected = {file: file.encode() for file in task.archives}
    for folder in ("data/downloads", "mine/MRPC"):
        Path(folder).mkdir(parents=True)
        for file, content in expected.items():
            Path(folder, file).write_bytes(content)
    prepare(*command)
    assert found(task.folder) == expected
    prepare(*command, "--from", "mine" if name == "mrpc" else "mine/MRPC", "--force")
    assert found(task.folder) == expected
