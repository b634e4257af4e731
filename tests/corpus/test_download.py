"""
Downloads from a server that fails in every way; corpora, tasks and weights from it.
"""
import contextlib
import hashlib
import http.server
import io
import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import pytest

from lib.corpus import Corpus, masked_heldout
from lib.download import FILES, fetch, fetch_from_hub, unpack
from lib.errors import Failure, UserError
from prepare_data import GLUE_ARCHIVES, SQUAD_FILES
from tests.helpers import (
    PIECES,
    ROOT,
    WIKITEXT,
    files,
    prepare,
    squad_file,
    texts_of,
    write_parquet,
)

COMMIT = "c0ffee".ljust(40, "0")  # of every repository


class Hub:
    """A server of files. It has `body` at every path except those in `bodies`.

    plan: what it does with each GET in turn, a way to fail or a status; after the plan it serves.
    seen: (path, Range, agent, token) of every GET. repos: {"models/owner/name": {path: bytes}},
    which it lists and serves as Hugging Face's hub does.
    """

    def __init__(self, body):
        self.body, self.plan, self.seen, self.bodies, self.repos = body, [], [], {}, {}
        self.stalled = threading.Event()

    def add(self, repo, files):
        """Put a repository there."""
        self.repos[repo] = [{"rfilename": name} for name in files]
        for name, body in files.items():
            self.bodies[f"/{repo.removeprefix('models/')}/resolve/{COMMIT}/{name}"] = body

    def list(self, handler):
        """Reply to /api/models/owner/name/revision/main."""
        repo = handler.path.removeprefix("/api/").partition("/revision/")[0]
        status = self.plan.pop(0) if self.plan else 200 if repo in self.repos else 404
        reply = json.dumps({"id": repo, "sha": COMMIT, "siblings": self.repos.get(repo)}).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(reply)))
        handler.end_headers()
        handler.wfile.write(reply)

    def head(self, handler):
        """Reply to HEAD: what the hub tells about a file."""
        body = self.bodies[handler.path]
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        handler.send_header("X-Repo-Commit", COMMIT)
        handler.end_headers()

    def answer(self, handler):
        if handler.path == "/api/agent-harnesses":  # huggingface_hub asks this once a process
            return handler.send_error(404)
        wanted = handler.headers["Range"]
        self.seen.append((handler.path, wanted, handler.headers["User-Agent"],
                          handler.headers["Authorization"]))
        if handler.path.startswith("/api/"):
            return self.list(handler)
        body = self.bodies.get(handler.path, self.body)
        step = self.plan.pop(0) if self.plan else "serve"
        start = int(wanted[6:-1]) if wanted and step != "without_ranges" else 0
        status, rest = (206 if start else 200), body[start:]
        if isinstance(step, int):
            status, start, rest = step, 0, b"no"
        elif start >= len(body):
            status, rest = 416, b""
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(rest)))
        if status == 206:
            first = start + 1 if step == "elsewhere" else start
            last, size = len(body) - 1, len(body)
            handler.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        elif status == 416:
            handler.send_header("Content-Range", f"bytes */{len(body)}")
        handler.end_headers()
        handler.wfile.write(rest[:len(rest) // 2] if step in ("cut", "stall") else rest)
        if step == "stall":
            handler.wfile.flush()
            self.stalled.wait(5)


@pytest.fixture
def hub(monkeypatch):
    hub = Hub(random.Random(0).randbytes(3 * 2**20))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):  # the client went away
                hub.answer(self)

        def do_HEAD(self):
            hub.head(self)

        def log_message(self, *args):
            pass
    hub.pauses = []
    monkeypatch.setattr(time, "sleep", hub.pauses.append)
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        serving.daemon_threads = True
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        hub.url = f"http://127.0.0.1:{serving.server_port}"
        yield hub
        hub.stalled.set()
        serving.shutdown()


def ranges(hub):
    return [wanted for _, wanted, *_ in hub.seen]


def paths(hub):
    return [path.partition("?")[0] for path, *_ in hub.seen]


HALF, REST = 3 * 2**19, 3 * 2**18  # of the hub's 3 MB, and of what is left after a half


@pytest.mark.parametrize("plan, expected", [
    ([], [None]), ([503], [None, None]), ([429, 500, 408], [None] * 4),
    (["cut"], [None, f"bytes={HALF}-"]),
    (["cut", 503, "cut"], [None] + [f"bytes={HALF}-"] * 2 + [f"bytes={HALF + REST}-"]),
    (["stall"], [None, f"bytes={HALF}-"]),
    (["cut", "without_ranges"], [None, f"bytes={HALF}-"]),
    (["cut", "elsewhere"], [None, f"bytes={HALF}-", None])],
    ids=["whole", "503", "three errors", "cut", "cut twice", "stalled", "no ranges", "wrong range"])
def test_download(workdir, hub, monkeypatch, capsys, plan, expected):
    monkeypatch.setattr("lib.download.TIMEOUT", 0.5)
    hub.plan = list(plan)
    sha256 = hashlib.sha256(hub.body).hexdigest()
    assert fetch(f"{hub.url}/a.zip", sha256, Path("data")) == Path("data/a.zip")
    assert Path("data/a.zip").read_bytes() == hub.body and os.listdir("data") == ["a.zip"]
    assert ranges(hub) == expected
    assert all("Mozilla" in agent and token is None for _, _, agent, token in hub.seen)
    assert hub.pauses == [2, 8, 30][:len(expected) - 1]
    assert f"{hub.url}/a.zip: downloading\n" in capsys.readouterr().out


@pytest.mark.parametrize("plan, requests, message", [
    ([404], 1, "no such file"), ([401], 1, "gated"), ([403], 1, "gated"), ([503] * 4, 4, "503"),
    (["cut", "cut", "cut", "cut"], 4, "bytes came|more expected")])
def test_failed_download_keeps_only_the_part(workdir, hub, plan, requests, message):
    """The bytes that came are kept under another name. The next call goes on from there."""
    hub.plan = list(plan)
    with pytest.raises(Failure, match=message) as error:
        fetch(f"{hub.url}/a.zip", folder=Path("data"))
    assert "\n" not in str(error.value) and len(hub.seen) == requests
    assert [str(path) for path in Path("data").glob("*")] == ["data/a.zip.part"] * ("cut" in plan)
    fetch(f"{hub.url}/a.zip", folder=Path("data"))
    assert ranges(hub)[-1] == (f"bytes={len(hub.body) * 15 // 16}-" if "cut" in plan else None)
    assert Path("data/a.zip").read_bytes() == hub.body and os.listdir("data") == ["a.zip"]


def test_part_that_had_come_whole(workdir, hub):
    """Killed between the last byte and the renaming."""
    Path("a.part").write_bytes(hub.body)
    fetch(f"{hub.url}/a", folder=Path())
    assert Path("a").read_bytes() == hub.body
    Path("b.part").write_bytes(hub.body + b"more")  # of another file
    fetch(f"{hub.url}/b", folder=Path())
    assert Path("b").read_bytes() == hub.body


def test_other_bytes_than_expected(workdir, hub):
    with pytest.raises(Failure, match="expected"):
        fetch(f"{hub.url}/a", "0" * 64, Path("data"))
    assert not Path("data").exists()


def test_short_body_is_noticed_without_urllib3(workdir, hub, monkeypatch):
    """Older versions of urllib3 do not compare the body with Content-Length."""
    requests = pytest.importorskip("requests")
    monkeypatch.setattr(requests.Response, "iter_content", lambda self, size: [b"half"])
    hub.plan = ["without_ranges"] * 4
    with pytest.raises(Failure, match="4 of 3,145,728 bytes"):
        fetch(f"{hub.url}/a", folder=Path("data"))
    assert os.listdir("data") == ["a.part"]


def test_proxy_is_honoured(workdir, hub, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", hub.url)
    monkeypatch.setenv("http_proxy", hub.url)
    fetch("http://nowhere.invalid/b", folder=Path())
    assert paths(hub) == ["http://nowhere.invalid/b"] and Path("b").read_bytes() == hub.body


@pytest.fixture
def mirror(hub, monkeypatch):
    """The hub at the place of huggingface.co: HF_ENDPOINT is read when the library is imported."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
    return hub


def test_files_of_the_hub(workdir, mirror):
    """They come from the commit that was listed, with the token; a cut download goes on."""
    large = random.Random(1).randbytes(2**20)
    mirror.add("models/a/b", {"x/1.bin": large, "x/2.txt": b"no", "3.bin": b"no"})
    mirror.plan = [200, "cut"]
    assert fetch_from_hub("a/b", "y/*", "x/*.bin", folder=Path("x")) == ["x/1.bin"]
    assert Path("x/x/1.bin").read_bytes() == large
    assert ranges(mirror) == [None, None, f"bytes={2**19}-"]
    file = f"/a/b/resolve/{COMMIT}/x/1.bin"
    assert paths(mirror) == ["/api/models/a/b/revision/main", file, file]
    assert all(token == "Bearer secret" for *_, token in mirror.seen)
    mirror.seen.clear()
    assert fetch_from_hub("a/b", "x/*.bin", folder=Path("x")) == ["x/1.bin"]  # it is there
    assert paths(mirror) == ["/api/models/a/b/revision/main"]

    mirror.plan = [200] + ["cut"] * 30
    with pytest.raises(Failure, match=r"a/b/x/\*.bin on the hub: .*without a network") as error:
        fetch_from_hub("a/b", "x/*.bin", folder=Path("y"))
    assert "\n" not in str(error.value) and not list(Path("y").rglob("1.bin"))


def test_the_environment_names_a_mirror_of_the_hub(workdir, hub):
    hub.add("models/org/new", {"config.json": b"{}", "vocab.txt": b"4", "model.safetensors": b"5",
                               "pytorch_model.bin": b"5"})
    command = [sys.executable, ROOT / "prepare_data.py", "weights", "org/new"]
    done = subprocess.run(command, env={**os.environ, "HF_ENDPOINT": hub.url}, check=False)
    assert done.returncode == 0 and Path("data/weights/org/new/vocab.txt").read_bytes() == b"4"
    assert all(token == "Bearer secret" for *_, token in hub.seen)


@pytest.mark.parametrize("plan, pattern, message", [
    ([401], "x", "gated, private or not there"), ([403], "x", "gated or private"),
    ([404], "x", "no such file"), ([], "y", "no such file"), ([500], "x", ".* replied 500")])
def test_the_hub_refuses(workdir, mirror, plan, pattern, message):
    mirror.add("models/a/b", {"x": b"x"})
    mirror.plan = plan
    with pytest.raises(Failure, match=f"^a/b/{pattern} on the hub: {message}") as error:
        fetch_from_hub("a/b", pattern, folder=Path("x"))
    assert "\n" not in str(error.value) and len(mirror.seen) == 1 and not mirror.pauses
    assert not Path("x").exists()


def test_no_network(workdir, mirror, monkeypatch):
    """One line that names the way out, at once."""
    nobody = "http://127.0.0.1:9"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nobody)
    for call in (lambda: fetch_from_hub("a/b", "x", folder=Path("x")),
                 lambda: prepare("text", "a", "sample.txt", "--vocab", "bert-base-uncased"),
                 lambda: fetch(f"{nobody}/a.zip", folder=Path())):
        with pytest.raises(Failure, match="onnect.*without a network give --vocab") as error:
            call()
        assert "\n" not in str(error.value)
    assert not mirror.pauses and sorted(os.listdir()) == ["sample.txt", "vocab.txt"]


def test_sources_are_complete():
    """Every file has a checksum of the right form, every task and corpus its files."""
    for url, sha256 in FILES.values():
        assert url.startswith("https://") and len(bytes.fromhex(sha256)) == 32
    assert len(FILES) == 17
    names = {*itertools.chain(*GLUE_ARCHIVES.values()), *SQUAD_FILES, "bookcorpus.tar.bz2",
             *(f"wikitext-{kind}-v1.zip" for kind in ("2", "2-raw", "103", "103-raw"))}
    assert names == FILES.keys() and len(GLUE_ARCHIVES) == 8


def zipped(files):
    """The bytes of a zip of {name: text}."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return file.getvalue()


def test_wikitext_is_downloaded_once(workdir, hub, monkeypatch):
    hub.body = zipped({f"wikitext-2/wiki.{name}.tokens": WIKITEXT
                       for name in ("train", "valid", "test")})
    url = f"{hub.url}/wikitext-2-v1.zip"
    monkeypatch.setitem(FILES, "wikitext-2-v1.zip", (url, ""))
    prepare("wikitext2", "--vocab", "vocab.txt")
    prepare("wikitext2", "--vocab", "vocab.txt", "--force")
    corpus = Corpus("wikitext2")
    assert len(hub.seen) == 1 and corpus.meta["source"] == url
    assert sorted(os.listdir("data")) == ["downloads", "wikitext2"]


def test_corpora_are_downloaded(workdir, mirror, monkeypatch):
    """Wikipedia's files, the copy of BookCorpus's tar, which is gone, and PG-19's books."""
    write_parquet("a.parquet", ["cat", "sat", "mat", "the mat"])
    parquet = Path("a.parquet").read_bytes()
    mirror.add("datasets/wikimedia/wikipedia", {
        "20231101.en/train-0.parquet": parquet, "20231101.en/train-1.parquet": parquet,
        "20231101.fr/train-0.parquet": b"other"})
    prepare("wikipedia", "--vocab", "vocab.txt")
    corpus = Corpus("wikipedia")
    assert corpus.meta["documents"] == {"train": 2, "val": 1, "test": 1}
    assert corpus.meta["duplicates"] == 4
    folder = "/datasets/wikimedia/wikipedia"
    assert paths(mirror) == [f"/api{folder}/revision/main", *(
        f"{folder}/resolve/{COMMIT}/20231101.en/train-{n}.parquet" for n in range(2))]
    mirror.seen.clear()
    prepare("wikipedia", "--vocab", "vocab.txt", "--force")  # all of it is there
    assert not mirror.seen
    Path("data/downloads/wikipedia/20231101.en/train-1.parquet").unlink()
    prepare("wikipedia", "--vocab", "vocab.txt", "--force")
    assert [path[-15:] for path in paths(mirror)] == ["a/revision/main", "train-1.parquet"]

    monkeypatch.setattr("lib.text.SENTENCES", 1)
    name = "bookcorpus.tar.bz2"
    monkeypatch.setitem(FILES, name, (f"{mirror.url}/{name}", ""))
    mirror.add("datasets/rojagtap/bookcorpus", {"default/train/0000.parquet": parquet})
    mirror.plan = [404]
    mirror.seen.clear()
    prepare("bookcorpus", "--vocab", "vocab.txt")
    corpus = Corpus("bookcorpus")
    assert texts_of(corpus, "train") == ["cat", "sat"] and texts_of(corpus, "test") == ["the mat"]
    assert paths(mirror)[1].endswith("/bookcorpus/revision/refs%2Fconvert%2Fparquet")

    mirror.add("datasets/deepmind/pg19", {
        "data/test_files.txt": b"test/7.txt\ntest/8.txt\n"})
    mirror.bodies |= {"/7.txt": b"cat\n\nsat\n", "/8.txt": b"mat\n"}
    monkeypatch.setattr("lib.download.PG19", f"{mirror.url}/")
    prepare("pg19", "--vocab", "vocab.txt")
    pg19 = Corpus("pg19")
    assert texts_of(pg19, "test") == ["cat sat", "mat"] and len(pg19.split("train")) == 0
    assert len(masked_heldout(pg19, "test", 4, 2, 8)) == 1
    with pytest.raises(UserError, match="too few"):
        masked_heldout(pg19, "val", 4, 2, 8)


def test_glue_and_squad(workdir, hub, monkeypatch, capsys):
    """Downloaded, or from a folder as downloads or as these unpack to: the same official files."""
    hub.body = zipped({"SST-2/": "", "SST-2/train.tsv": "a\t1\n", "SST-2/dev.tsv": "b\t0\n",
                       "SST-2/original/raw.txt": "c", "__MACOSX/SST-2/._train.tsv": "d"})
    monkeypatch.setitem(FILES, "SST-2.zip", (f"{hub.url}/SST-2.zip", ""))
    expected = {"train.tsv": b"a\t1\n", "dev.tsv": b"b\t0\n", "original/raw.txt": b"c"}

    def found(folder):
        return {str(Path(name).relative_to(folder)): body
                for name, body in files(folder).items() if body is not False}

    prepare("glue", "SST-2")
    assert found("data/glue/SST-2") == expected and os.listdir("data/glue") == ["SST-2"]
    assert "exists already" not in capsys.readouterr().out
    prepare("glue", "SST-2")
    assert "exists already" in capsys.readouterr().out
    for place in ("data/downloads", "data/downloads/SST-2.zip"):
        prepare("glue", "SST-2", "--from", place, "--force")
        assert found("data/glue/SST-2") == expected
    del expected["original/raw.txt"]
    for place in ("data/glue/SST-2", "data/glue"):
        shutil.copytree("data/glue", "copy/data/glue", dirs_exist_ok=True)
        prepare("glue", "SST-2", "--from", f"copy/{place}", "--force")
        assert found("data/glue/SST-2") == expected
    assert len(hub.seen) == 1

    names = ["msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "mrpc_dev_ids.tsv"]
    for name in names:
        Path(name).write_text(name)
    prepare("glue", "MRPC", "--from", ".")
    assert found("data/glue/MRPC") == {name: name.encode() for name in names}
    squad_file(Path("squad.json"))
    hub.body = Path("squad.json").read_bytes()
    for name in SQUAD_FILES:
        monkeypatch.setitem(FILES, name, (f"{hub.url}/{name}", ""))
    prepare("squad")
    assert found("data/squad") == {"train-v1.1.json": hub.body, "dev-v1.1.json": hub.body}

    Path("bad.zip").write_bytes(Path("data/downloads/SST-2.zip").read_bytes()[:-30])
    Path("out.zip").write_bytes(zipped({"a/../../../../train.tsv": "escaped"}))
    for args, words in ((["glue", "SST2"], "SST-2"), (["glue", "RTE", "--from", "."], "RTE.zip"),
                        (["glue", "RTE", "--from", "sample.txt"], "no RTE.zip or train.tsv in it"),
                        (["text", "", "sample.txt"], "a corpus's name is a folder's name"),
                        (["glue", "RTE", "--from", "bad.zip"], "bad.zip: not unpacked"),
                        (["glue", "RTE", "--from", "out.zip"], "out.zip: damaged .no train.tsv"),
                        (["glue", "RTE", "QNLI", "--from", "data/downloads/SST-2.zip"], "give one"),
                        (["glue", "RTE", "QNLI", "--from", "data/glue/SST-2"], "give one"),
                        (["squad", "--force", "--from", "data/glue"], "train-v1.1")):
        with pytest.raises(UserError, match=words):
            prepare(*args)
    assert sorted(os.listdir("data/glue")) == ["MRPC", "SST-2"]


def test_unpacked_archives_stay_inside(workdir):
    """Whatever their files are called. A damaged archive leaves nothing."""
    Path("a.zip").write_bytes(zipped({"a/1.txt": "1", "b/2.txt": "2", "../out.txt": "escaped",
                                      f"{Path.cwd()}/out.txt": "escaped"}))
    unpack(Path("a.zip"), Path("data/a"))
    assert sorted(os.listdir("data/a")) == ["a", "b"] and os.listdir("data") == ["a"]
    with tarfile.open("b.tar.bz2", "w:bz2") as archive:
        archive.add("sample.txt", "books/sample.txt")
    unpack(Path("b.tar.bz2"), Path("data/b"))
    assert os.listdir("data/b") == ["books"]
    with tarfile.open("c.tar.bz2", "w:bz2") as archive:
        archive.add("sample.txt", "../../out.txt")
    Path("d.tar.bz2").write_bytes(Path("b.tar.bz2").read_bytes()[:60])
    Path("e.zip").write_bytes(b"PK")
    Path("f.zip").write_bytes(zipped({".": "odd"}))
    for name in ("c.tar.bz2", "d.tar.bz2", "e.zip", "f.zip"):
        with pytest.raises(UserError, match=f"{name}: not unpacked"):
            unpack(Path(name), Path("data/c"))
    assert sorted(os.listdir("data")) == ["a", "b"] and not list(Path().rglob("out.txt"))


def test_a_full_disk_leaves_no_folder(workdir):
    """A file that cannot grow further stands for it."""
    Path("g.zip").write_bytes(zipped({"a": "1", "b": "2" * 10**5}))
    with tarfile.open("h.tar.bz2", "w:bz2") as archive:
        shutil.copy("g.zip", "large.txt")
        archive.add("large.txt")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**4, before[1]))
    try:
        for name in ("g.zip", "h.tar.bz2"):
            with pytest.raises(UserError, match=f"{name}: not unpacked .*File too large") as error:
                unpack(Path(name), Path("data/c"))
            assert "\n" not in str(error.value) and not os.listdir("data")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_weights_of_any_name_of_the_hub(workdir, mirror):
    """Each file in the form that the repository has; another kind of model is refused early."""
    bert, cross = json.dumps({"model_type": "bert"}).encode(), b'{"model_type": "roberta"}'
    mirror.add("models/some-org/tiny.bert", {
        "config.json": bert, "vocab.txt": b"words", "pytorch_model.bin": b"2",
        "1_Pooling/config.json": b"3"})
    mirror.add("models/org/new", {"config.json": b"{}", "tokenizer.json": b"4",
                                  "model.safetensors": b"5", "pytorch_model.bin": b"5"})
    mirror.add("models/org/cross", {"config.json": cross, "model.safetensors": b""})
    prepare("weights", "some-org/tiny.bert", "org/new")
    folder = Path("data/weights/some-org/tiny.bert")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == {
        "config.json": bert, "vocab.txt": b"words", "pytorch_model.bin": b"2"}
    assert Path("data/weights/org/new/tokenizer.json").read_bytes() == b"4"
    for name, message in (("org/cross", "'roberta': expected bert"), ("../org/new", "no weights"),
                          ("org/new/more", "no weights"), ("roberta-base", "RoBERTa's weights"),
                          ("bert", "bert-base-uncased")):
        with pytest.raises(UserError, match=message):
            prepare("weights", name)
    assert not Path("data/weights/org/cross").exists()
    assert not any(f"cross/resolve/{COMMIT}/model" in path for path in paths(mirror))
    with pytest.raises(Failure, match="gone/config.json on the hub: "):
        prepare("weights", "org/gone")


def test_weights_are_downloaded_once(workdir, mirror):
    names = ["config.json", "vocab.txt", "model.safetensors"]
    mirror.add("models/google-bert/bert-base-uncased", {
        "config.json": b"{}", "vocab.txt": b"words", "model.safetensors": b"1",
        "pytorch_model.bin": b"2", "tf_model.h5": b"3"})
    prepare("weights", "bert-base-uncased")
    prepare("weights", "bert-base-uncased")
    repo, folder = "/google-bert/bert-base-uncased", Path("data/weights/bert-base-uncased")
    assert paths(mirror) == [path for name in names for path in (
        f"/api/models{repo}/revision/main", f"{repo}/resolve/{COMMIT}/{name}")]
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == sorted(names)
    mirror.seen.clear()
    (folder / "vocab.txt").write_bytes(Path("vocab.txt").read_bytes())
    Path("text").mkdir()
    for number in range(3):
        Path(f"text/{number}.txt").write_text(f"{'cat ' * number}sat")
    prepare("pg19", "--from", "text")  # BERT's vocabulary, which is there
    assert Corpus("pg19").vocab_size == len(PIECES) and not mirror.seen
