"""
Downloads from a local server that fails in every way, and from one that plays the hub.
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

import pytest

import lib.download
import prepare_data
from lib.corpus import Corpus
from lib.download import FILES, fetch, fetch_from_hub, unpack
from lib.errors import Failure, UserError
from lib.tasks import GLUE, SQUAD
from tests.helpers import prepare, texts_of, write_parquet

COMMIT = "c0ffee".ljust(40, "0")  # of every repository


class Server:
    """Files by path, and repositories that it lists and serves as Hugging Face's hub does.

    plan: what it does with each GET in turn, "cut" or a status; after the plan it serves.
    seen: (path, agent, token) of every GET.
    """

    def __init__(self):
        self.files, self.repos, self.plan, self.seen = {}, {}, [], []

    def add(self, repo, files):
        """Put a repository there: "models/owner/name", {path: bytes}."""
        self.repos[repo] = json.dumps({"id": repo, "sha": COMMIT}).encode()
        tree = [{"type": "file", "path": name, "size": len(body), "oid": name}
                for name, body in files.items()]
        self.repos[f"{repo}/tree/{COMMIT}"] = json.dumps(tree).encode()
        for name, body in files.items():
            self.files[f"/{repo.removeprefix('models/')}/resolve/{COMMIT}/{name}"] = body

    def answer(self, request):
        path = request.path.partition("?")[0]
        if path == "/api/agent-harnesses":  # huggingface_hub asks this once a process
            return request.send_error(404)
        repo = path.removeprefix("/api/").partition("/revision/")[0]
        body = self.files.get(path, self.repos.get(repo))
        step = "serve"
        if request.command == "GET":
            headers = request.headers
            self.seen.append((path, headers["User-Agent"], headers["Authorization"]))
            step = self.plan.pop(0) if self.plan else "serve"
        if body is None or isinstance(step, int):
            return request.send_error(404 if body is None else step)
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body[:len(body) // 2] if step == "cut" else body)


@pytest.fixture
def server(workdir, monkeypatch):
    """A server at the place of huggingface.co: HF_ENDPOINT is read when the library is imported."""
    server = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):  # the client went away
                server.answer(self)
        do_HEAD = do_GET

        def log_message(self, *args):
            pass
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(lib.download, "PAUSE", 0)
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        serving.daemon_threads = True
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        server.url = f"http://127.0.0.1:{serving.server_port}"
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                            template.replace("https://huggingface.co", server.url))
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        yield server
        serving.shutdown()


def paths(server):
    return [path for path, *_ in server.seen]


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
    assert all("Mozilla" in agent and token is None for _, agent, token in server.seen)


@pytest.mark.parametrize("plan, sha256, message", [
    ([404, 404], "", "404"), ([503, "cut"], "", "without a network give --vocab FILE or --from"),
    (["cut", 500], "", "500"), ([], "0" * 64, "expected SHA-256 000000000000, received")])
def test_a_failed_download_is_one_line_and_leaves_nothing(server, plan, sha256, message):
    server.files["/a.zip"], server.plan = BODY, list(plan)
    with pytest.raises(Failure, match=f"^{server.url}/a.zip: .*{message}") as error:
        fetch(f"{server.url}/a.zip", sha256, Path("data"))
    assert "\n" not in str(error.value) and len(server.seen) == max(1, len(plan))
    assert left() == []


def test_no_network(server, monkeypatch):
    """One line that names the way out."""
    nobody = "http://127.0.0.1:9"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nobody)
    for call in (lambda: fetch_from_hub("a/b", ["x"], Path("x")),
                 lambda: prepare("text", "a", "sample.txt", "--vocab", "bert-base-uncased"),
                 lambda: fetch(f"{nobody}/a.zip", folder=Path())):
        with pytest.raises(Failure, match="onnect.*without a network give --vocab") as error:
            call()
        assert "\n" not in str(error.value)
    assert left(".") == ["sample.txt", "vocab.txt"]


def test_files_of_the_hub(server):
    """They come from the commit that was listed, with the token."""
    server.add("models/a/b", {"x/1.bin": BODY, "x/2.txt": b"no", "3.bin": b"3"})
    fetch_from_hub("a/b", ["x/*.bin", "3.bin"], Path("x"))
    assert Path("x/x/1.bin").read_bytes() == BODY and not Path("x/x/2.txt").exists()
    assert {path for path in paths(server) if "resolve" in path} == {
        f"/a/b/resolve/{COMMIT}/{name}" for name in ("x/1.bin", "3.bin")}
    assert all(token == "Bearer secret" for *_, token in server.seen)
    with pytest.raises(Failure, match="^a/gone on the hub: .*404") as error:
        fetch_from_hub("a/gone", ["x"], Path("y"))
    assert "\n" not in str(error.value)


def test_weights(server):
    """Of any name of the hub; safetensors go before pytorch_model.bin."""
    server.add("models/org/new", {"config.json": b"{}", "tokenizer.json": b"4",
                                  "model.safetensors": b"5", "pytorch_model.bin": b"6"})
    server.add("models/org/old.bert", {"config.json": b"{}", "vocab.txt": b"words",
                                       "pytorch_model.bin": b"6", "1_Pooling/config.json": b"3"})
    prepare("weights", "org/new", "org/old.bert")
    found = {path.name for path in Path("data/weights/org/new").iterdir() if path.is_file()}
    assert found == {"config.json", "tokenizer.json", "model.safetensors"}
    found = {path.name for path in Path("data/weights/org/old.bert").iterdir() if path.is_file()}
    assert found == {"config.json", "vocab.txt", "pytorch_model.bin"}


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


def test_corpora_of_the_paper(server, monkeypatch):
    """Wikipedia's files, and PG-19's books, which a list names."""
    write_parquet("a.parquet", ["cat", "sat", "mat", "the mat"])
    parquet = Path("a.parquet").read_bytes()
    server.add("datasets/wikimedia/wikipedia", {
        "20231101.en/train-0.parquet": parquet, "20231101.en/train-1.parquet": parquet,
        "20231101.fr/train-0.parquet": b"other"})
    prepare("wikipedia", "--vocab", "vocab.txt")
    corpus = Corpus("wikipedia")
    assert corpus.meta["documents"] == {"train": 2, "val": 1, "test": 1}
    assert corpus.meta["duplicates"] == 4
    server.add("datasets/deepmind/pg19", {"data/test_files.txt": b"test/7.txt\ntest/8.txt\n"})
    server.files |= {"/7.txt": b"cat\n\nsat\n", "/8.txt": b"mat\n"}
    monkeypatch.setattr(prepare_data, "PG19", f"{server.url}/")
    prepare("pg19", "--vocab", "vocab.txt")
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
    prepare("glue", "SST-2", "--from", "mine", "--force")
    assert found("data/glue/SST-2") == expected and len(server.seen) == 1


def test_tasks_of_single_files(server, monkeypatch):
    """MRPC's and SQuAD's, downloaded or from the folder that has them."""
    mrpc = next(task for task in GLUE if task.name == "mrpc")
    for task, args in ((mrpc, ["glue", "MRPC"]), (SQUAD, ["squad"])):
        Path(task.name).mkdir()
        for name in task.archives:
            Path(task.name, name).write_text(name)
            server.files[f"/{name}"] = name.encode()
            monkeypatch.setitem(FILES, name, (f"{server.url}/{name}", ""))
        expected = {name: name.encode() for name in task.archives}
        prepare(*args, "--from", task.name)
        assert found(task.folder) == expected and not server.seen
        prepare(*args, "--force")
        assert found(task.folder) == expected
        assert paths(server) == [f"/{name}" for name in task.archives]
        server.seen.clear()
