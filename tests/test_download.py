"""
Downloads from a local server that breaks off, and from a stand-in for the hub.
"""
import contextlib
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
from lib.settings import Failure, UserError
from lib.tasks import TASKS
from prepare_data import FILES, fetch, unpack
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


@contextlib.contextmanager
def serve(handler, monkeypatch, **state):
    """Start a server of this machine. `state` becomes its attributes."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        vars(server).update(state, address=f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def server(workdir, monkeypatch):
    """Start a server in place of all others. server.seen has the path of every request."""
    get = requests.get
    with serve(Handler, monkeypatch, files={}, broken=0, seen=[]) as server:
        monkeypatch.setattr("requests.get", lambda url, **settings: get(
            server.address + urlsplit(url).path, **settings))
        yield server


class HubHandler(http.server.BaseHTTPRequestHandler):
    """Serve server.repos, {"ORG/NAME" or "datasets/ORG/NAME": {file: bytes}}, as the hub does.

    Lists, but does not have, the files of server.missing. With server.down it has nothing.
    """

    def do_GET(self):
        path = urlsplit(self.path).path.removeprefix("/api").removeprefix("/models")
        place, _, name = path[1:].partition(f"/resolve/{'0' * 40}/")
        repo = self.server.repos.get(place, {})
        body = repo.get(name)
        if repo and not name:
            body = json.dumps({"id": place, "sha": "0" * 40, "siblings": [
                {"rfilename": name, "size": len(body)} for name, body in repo.items()]}).encode()
        if self.server.down or name in self.server.missing or body is None:
            return self.send_error(404)
        self.send_response(200)
        for key, value in (("Content-Length", len(body)), ("X-Repo-Commit", "0" * 40),
                           ("ETag", hashlib.sha1(body).hexdigest())):
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET
    log_message = Handler.log_message


@pytest.fixture
def hub(workdir, monkeypatch):
    """Start a server in place of the hub; see HubHandler."""
    with serve(HubHandler, monkeypatch, repos={}, missing=set(), down=False) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
                            server.address + "/{repo_id}/resolve/{revision}/{filename}")
        yield server


def left(folder="data"):
    """List the names in a folder, but for locks and the hub's own notes."""
    return sorted(name for name in os.listdir(folder) if not name.startswith((".lock", ".cache")))


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
    path.write_bytes(BODY[:-1])
    with pytest.raises(UserError, match="^data/a.zip: its SHA-256 is not"):
        fetch("https://host/a.zip", hashlib.sha256(BODY).hexdigest(), Path("data"))


@pytest.mark.parametrize("name, broken, sha256, words", [
    ("b.zip", 0, "", "--from PATH"), ("a.zip", 2, "", "--from PATH"),
    ("a.zip", 0, "0" * 64, "SHA-256 is not 0")])
def test_a_failed_download_is_one_line_and_leaves_nothing(server, name, broken, sha256, words):
    server.files["/a.zip"], server.broken = BODY, broken
    with pytest.raises(Failure, match=f"^https://host/{name}: .*{words}.*$"):
        fetch(f"https://host/{name}", sha256, Path("data"))
    assert left() == []


SHARDS = ["model-1-of-2.safetensors", "model-2-of-2.safetensors", "model.safetensors.index.json"]
OLD = ["config.json", "pytorch_model.bin", "vocab.txt"]


@pytest.mark.parametrize("there, fetched", [
    (OLD, OLD), ([*OLD, "model.safetensors", "tokenizer.json"],
                 ["config.json", "model.safetensors", "tokenizer.json", "vocab.txt"]),
    ([*OLD, *SHARDS], ["config.json", *SHARDS, "vocab.txt"])])
def test_weights(hub, there, fetched):
    """Safetensors go before pytorch_model.bin. Other files stay there."""
    index = b'{"weight_map": {"a": "model-1-of-2.safetensors"}}'
    hub.repos["org/a.bert"] = dict.fromkeys([*there, "model.onnx", "onnx/config.json"], index)
    prepare("weights", "org/a.bert")
    assert left("data/weights/org/a.bert") == sorted([*fetched, "files.json"])
    hub.repos["org/none"] = dict.fromkeys(["config.json", "tf_model.h5"], b"1")
    with pytest.raises(UserError, match="^data/weights/org/none has no checkpoint, "):
        prepare("weights", "org/none")


@pytest.mark.parametrize("command, folder, file", [
    (["weights", "bert-base-uncased"], "data/weights/bert-base-uncased", "model.safetensors"),
    (["wikipedia", "--force", "--vocab", "vocab.txt"], "data/downloads/wikipedia",
     "20231101.en/1.parquet"),
    (["text", "sample", "sample.txt", "--vocab", "bert-base-uncased", "--force"],
     "data/downloads/bert-base-uncased", "vocab.txt")])
def test_half_a_download_is_continued_or_refused(hub, command, folder, file):
    """Break off at a file, go on later, lose the network, and lose a part of the file."""
    write_parquet("0.parquet", ["cat", "sat"])
    write_parquet("1.parquet", ["mat", "the mat"])
    files = {name: Path("vocab.txt").read_bytes()
             for name in ("config.json", "vocab.txt", "model.safetensors")}
    hub.repos["google-bert/bert-base-uncased"] = files
    hub.repos["datasets/wikimedia/wikipedia"] = {
        f"20231101.en/{n}.parquet": Path(f"{n}.parquet").read_bytes() for n in range(2)}
    hub.missing = {file}
    for hub.down in (False, True):
        with pytest.raises(Failure, match="on the hub: .*--from PATH"):
            prepare(*command)
        assert not Path(folder).exists()
    hub.down, hub.missing = False, set()
    prepare(*command)
    hub.down = True
    prepare(*command)
    os.truncate(Path(folder, file), 9)
    with pytest.raises(UserError, match=f": not whole: move {folder} away"):
        prepare(*command)
    for name in (file, "files.json"):  # without the second it is another command's
        Path(folder, name).unlink()
        with pytest.raises((FileNotFoundError, UserError), match=f"{folder}/{name}"):
            prepare(*command)


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
    hub.repos["datasets/wikimedia/wikipedia"] = {
        "20231101.en/0.parquet": parquet, "20231101.en/1.parquet": parquet,
        "20231101.fr/0.parquet": b"other"}
    hub.repos["google-bert/bert-base-uncased"] = {"vocab.txt": Path("vocab.txt").read_bytes()}
    prepare("wikipedia")
    corpus = Corpus("wikipedia")
    assert corpus.meta["documents"] == {"train": 2, "val": 1, "test": 1}
    assert corpus.meta["duplicates"] == 4
    hub.repos["datasets/deepmind/pg19"] = {"data/test_files.txt": b"test/7.txt\ntest/8.txt\n"}
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


def test_a_task_from_a_zip(server, monkeypatch):
    """A downloaded one must be the official one. The *.tsv are taken, of a folder, too."""
    files = {"SST-2/": "", "SST-2/train.tsv": "a\t1\n", "SST-2/dev.tsv": "b\t0\n",
             "SST-2/original/raw.txt": "c", "__MACOSX/SST-2/._train.tsv": "d"}
    server.files["/glue/data/SST-2.zip"] = zipped(files)
    with pytest.raises(Failure, match="SST-2.zip"):
        prepare("glue", "SST-2")
    assert left("data/glue") == []
    monkeypatch.setitem(FILES, "SST-2.zip", (FILES["SST-2.zip"][0], ""))
    prepare("glue", "SST-2")
    expected = {"train.tsv": b"a\t1\n", "dev.tsv": b"b\t0\n"}
    assert found("data/glue/SST-2") == expected
    assert left("data/glue") == ["SST-2"]
    shutil.copytree("data/glue", "mine")
    prepare("glue", "--from", "mine", "SST-2", "--force")
    assert found("data/glue/SST-2") == expected


@pytest.mark.parametrize("name, command", [("mrpc", ["glue", "MRPC"]), ("squad", ["squad"])])
def test_a_task_of_single_files(workdir, monkeypatch, name, command):
    """The files are in data/downloads/, or in a folder of one's own."""
    task = TASKS[name]
    expected = {file: file.encode() for file in task.archives}
    for file in expected:
        monkeypatch.setitem(FILES, file, (FILES[file][0], ""))
    for folder in ("data/downloads", "mine/MRPC"):
        Path(folder).mkdir(parents=True)
        for file, content in expected.items():
            Path(folder, file).write_bytes(content)
    prepare(*command)
    assert found(task.folder) == expected
    prepare(*command, "--from", "mine" if name == "mrpc" else "mine/MRPC", "--force")
    assert found(task.folder) == expected
