"""
Downloads from a server that fails in every way, and what is made of them.
"""
import contextlib
import hashlib
import http.server
import importlib.util
import io
import itertools
import json
import os
import random
import shutil
import threading
import time
import zipfile
from pathlib import Path

import pytest

import configs
import measure
import prepare_data
from tests.helpers import PIECES, WIKITEXT, files, prepare, texts_of, write_parquet


class Hub:
    """A server with one file, `body`, at any path. `plan` says what it does with each request in
    turn: a method's name, or a status; after the plan it serves. `seen`: (path, Range, agent)."""

    def __init__(self, body):
        self.body, self.plan, self.seen, self.headers = body, [], [], {}
        self.stalled = threading.Event()

    def answer(self, handler):
        wanted = handler.headers["Range"]
        self.seen.append((handler.path, wanted, handler.headers["User-Agent"]))
        step = self.plan.pop(0) if self.plan else "serve"
        start = int(wanted[6:-1]) if wanted and step != "without_ranges" else 0
        status, rest = (206 if start else 200), self.body[start:]
        if isinstance(step, int):
            status, start, rest = step, 0, b"no"
        elif start >= len(self.body):
            status, rest = 416, b""
        handler.send_response(status)
        for name, value in self.headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(rest)))
        if status == 206:
            first = start + 1 if step == "elsewhere" else start
            last, size = len(self.body) - 1, len(self.body)
            handler.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        elif status == 416:
            handler.send_header("Content-Range", f"bytes */{len(self.body)}")
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

        def log_message(self, *args):
            pass
    hub.pauses = []
    monkeypatch.setattr(time, "sleep", hub.pauses.append)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        serving.daemon_threads = True
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        hub.url = f"http://127.0.0.1:{serving.server_port}"
        yield hub
        hub.stalled.set()
        serving.shutdown()


def ranges(hub):
    return [wanted for _, wanted, _ in hub.seen]


HALF, REST = 3 * 2**19, 3 * 2**18  # of the hub's 3 MB, and of what is left after a half


@pytest.mark.parametrize("plan, expected", [
    ([], [None]), ([503], [None, None]), ([429, 500, 408], [None] * 4),
    (["cut"], [None, f"bytes={HALF}-"]),
    (["cut", 503, "cut"], [None] + [f"bytes={HALF}-"] * 2 + [f"bytes={HALF + REST}-"]),
    (["stall"], [None, f"bytes={HALF}-"]),
    (["cut", "without_ranges"], [None, f"bytes={HALF}-"]),
    (["cut", "elsewhere"], [None, f"bytes={HALF}-", None])],
    ids=["whole", "503", "three errors", "cut", "cut twice", "stalled", "no ranges", "wrong range"])
def test_download(workdir, hub, monkeypatch, plan, expected):
    monkeypatch.setattr(prepare_data, "TIMEOUT", 0.5)
    hub.plan = list(plan)
    sha256 = hashlib.sha256(hub.body).hexdigest()
    prepare_data.download(f"{hub.url}/a.zip", Path("data/a.zip"), len(hub.body), sha256)
    assert Path("data/a.zip").read_bytes() == hub.body and os.listdir("data") == ["a.zip"]
    assert ranges(hub) == expected and all("Mozilla" in agent for _, _, agent in hub.seen)
    assert hub.pauses == [2, 8, 30][:len(expected) - 1]


@pytest.mark.parametrize("plan, requests, message", [
    ([404], 1, "no such file"), ([401], 1, "gated"), ([403], 1, "gated"), ([503] * 4, 4, "503"),
    (["cut", "cut", "cut", "cut"], 4, "bytes came|more expected")])
def test_failed_download_keeps_only_the_part(workdir, hub, plan, requests, message):
    """What came so far has another name, and the next call goes on from there."""
    hub.plan = list(plan)
    with pytest.raises(configs.Failure, match=message) as error:
        prepare_data.download(f"{hub.url}/a.zip", Path("data/a.zip"))
    assert "\n" not in str(error.value) and len(hub.seen) == requests
    assert os.listdir("data") == (["a.zip.part"] if "cut" in plan else [])
    prepare_data.download(f"{hub.url}/a.zip", Path("data/a.zip"))
    assert ranges(hub)[-1] == (f"bytes={len(hub.body) * 15 // 16}-" if "cut" in plan else None)
    assert Path("data/a.zip").read_bytes() == hub.body and os.listdir("data") == ["a.zip"]


def test_part_that_had_come_whole(workdir, hub):
    """Killed between the last byte and the renaming."""
    Path("a.part").write_bytes(hub.body)
    prepare_data.download(f"{hub.url}/a", Path("a"))
    assert Path("a").read_bytes() == hub.body and ranges(hub) == [f"bytes={len(hub.body)}-"]
    Path("b.part").write_bytes(hub.body + b"more")  # of another file
    prepare_data.download(f"{hub.url}/b", Path("b"))
    assert Path("b").read_bytes() == hub.body


@pytest.mark.parametrize("size, sha256, tag", [
    (0, "0" * 64, None), (5, "", None), (0, "", "1" * 64)], ids=["SHA-256", "size", "the hub's"])
def test_other_bytes_than_expected(workdir, hub, size, sha256, tag):
    hub.headers = {"X-Linked-Etag": f'"{tag}"'} if tag else {}
    with pytest.raises(configs.Failure, match="expected"):
        prepare_data.download(f"{hub.url}/a", Path("data/a"), size, sha256)
    assert os.listdir("data") == []


def test_short_body_is_noticed_without_urllib3(workdir, hub, monkeypatch):
    """Older versions of urllib3 do not compare the body with Content-Length."""
    requests = pytest.importorskip("requests")
    monkeypatch.setattr(requests.Response, "iter_content", lambda self, size: [b"half"])
    hub.plan = ["without_ranges"] * 4
    with pytest.raises(configs.Failure, match="4 of 3,145,728 bytes"):
        prepare_data.download(f"{hub.url}/a", Path("data/a"))
    assert os.listdir("data") == ["a.part"]


def test_endpoint_and_proxy_are_honoured(workdir, hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}/mirror/")
    prepare_data.download(f"{prepare_data.HUB}/x/resolve/main/a", Path("a"))
    monkeypatch.delenv("HF_ENDPOINT")
    monkeypatch.setenv("HTTP_PROXY", hub.url)
    monkeypatch.setenv("http_proxy", hub.url)
    prepare_data.download("http://nowhere.invalid/b", Path("b"))
    assert [path for path, _, _ in hub.seen] == ["/mirror/x/resolve/main/a",
                                                 "http://nowhere.invalid/b"]
    assert Path("a").read_bytes() == Path("b").read_bytes() == hub.body


def test_sources_are_complete():
    """Every file has a size and a checksum of the right form, but for those of the hub, which
    tells them, and every corpus of the command line has its sources."""
    sources = [files for _, files in prepare_data.SOURCES.values()]
    for url, size, sha256 in itertools.chain(*prepare_data.GLUE.values(), *sources):
        assert url.startswith("https://") and (
            url.startswith(prepare_data.HUB) or size > 0 and len(bytes.fromhex(sha256)) == 32)
    assert {"wikipedia", "bookcorpus", "pg19"} <= prepare_data.SOURCES.keys()
    assert [url[-29:] for url, _, _ in prepare_data.SOURCES["wikipedia"][1]][::40] == [
        f"/train-{n:05}-of-00041.parquet" for n in (0, 40)]


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
    monkeypatch.setitem(prepare_data.SOURCES, "wikitext2", ("", [(url, 0, "")]))
    prepare("wikitext2", "--vocab", "vocab.txt")
    prepare("wikitext2", "--vocab", "vocab.txt", "--force")
    corpus = prepare_data.Corpus("wikitext2")
    assert len(hub.seen) == 1 and corpus.meta["source"] == url
    monkeypatch.setitem(prepare_data.MIRRORS, f"{hub.url}/a.zip", f"{hub.url}/mirror/a.zip")
    hub.plan = [404]
    path, = prepare_data.fetch([(f"{hub.url}/a.zip", 0, "")])
    assert path.read_bytes() == hub.body and hub.seen[-1][0] == "/mirror/a.zip"
    assert sorted(os.listdir("data")) == ["downloads", "wikitext2"]


def test_corpora_are_downloaded(workdir, hub, monkeypatch):
    """Wikipedia's shards, BookCorpus's tar and, where that is gone, its copy, PG-19's books."""
    write_parquet("a.parquet", ["cat", "sat", "mat", "the mat"])
    hub.body = Path("a.parquet").read_bytes()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setitem(prepare_data.SOURCES, "wikipedia", ("", [
        (f"{prepare_data.HUB}/train-{n}.parquet", 0, "") for n in range(2)]))
    prepare("wikipedia", "--vocab", "vocab.txt")
    corpus = prepare_data.Corpus("wikipedia")
    assert corpus.meta["documents"] == {"train": 2, "val": 1, "test": 1}
    assert corpus.meta["duplicates"] == 4
    assert [path for path, *_ in hub.seen] == ["/train-0.parquet", "/train-1.parquet"]

    monkeypatch.setattr(prepare_data, "SENTENCES", 1)
    monkeypatch.setitem(prepare_data.SOURCES, "bookcorpus", ("", [(f"{hub.url}/b.tar.bz2", 0, "")]))
    bodies = {"/b.tar.bz2": b"", prepare_data.BOOKCORPUS_COPY.removeprefix(prepare_data.HUB):
              json.dumps([f"{prepare_data.HUB}/0.parquet"]).encode(), "/0.parquet": hub.body,
              "/list/test_files.txt": b"test/7.txt\ntest/8.txt\n", "/7.txt": b"cat\n\nsat\n",
              "/8.txt": b"mat\n"}
    answer = hub.answer
    def choose(handler):
        hub.body = bodies[handler.path]
        hub.plan = [404] if handler.path == "/b.tar.bz2" else []
        answer(handler)
    hub.answer = choose
    prepare("bookcorpus", "--vocab", "vocab.txt")
    corpus = prepare_data.Corpus("bookcorpus")
    assert texts_of(corpus, "train") == ["cat", "sat"] and texts_of(corpus, "test") == ["the mat"]

    monkeypatch.setitem(prepare_data.SOURCES, "pg19", (
        "", [(f"{hub.url}/list/test_files.txt", 0, "")]))
    monkeypatch.setattr(prepare_data, "PG19", f"{hub.url}/")
    prepare("pg19", "--vocab", "vocab.txt")
    pg19 = prepare_data.Corpus("pg19")
    assert texts_of(pg19, "test") == ["cat sat", "mat"] and len(pg19.split("train")) == 0
    assert len(measure.heldout(pg19, "test", 4, 2, 8)) == 1
    with pytest.raises(configs.UserError, match="too few"):
        measure.heldout(pg19, "val", 4, 2, 8)


def test_glue_and_squad(workdir, hub, monkeypatch, capsys):
    """Downloaded, or from a folder as downloads or as these unpack to: the same official files."""
    hub.body = zipped({"SST-2/": "", "SST-2/train.tsv": "a\t1\n", "SST-2/dev.tsv": "b\t0\n",
                       "SST-2/original/raw.txt": "c", "__MACOSX/SST-2/._train.tsv": "d"})
    monkeypatch.setitem(prepare_data.GLUE, "SST-2", [(f"{hub.url}/SST-2.zip", 0, "")])
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
    hub.body = b"{}"
    monkeypatch.setitem(prepare_data.SOURCES, "squad", (
        "", [(f"{hub.url}/{split}-v1.1.json", 2, "") for split in ("train", "dev")]))
    prepare("squad")
    assert found("data/squad") == {"train-v1.1.json": b"{}", "dev-v1.1.json": b"{}"}

    Path("bad.zip").write_bytes(Path("data/downloads/SST-2.zip").read_bytes()[:-30])
    Path("out.zip").write_bytes(zipped({"a/../../../../train.tsv": "escaped"}))
    for args, words in ((["glue", "SST2"], "SST-2"), (["glue", "RTE", "--from", "."], "RTE.zip"),
                        (["glue", "RTE", "--from", "bad.zip"], "bad.zip: damaged"),
                        (["glue", "RTE", "--from", "out.zip"], "outside"),
                        (["glue", "RTE", "QNLI", "--from", "data/downloads/SST-2.zip"], "RTE.zip"),
                        (["glue", "RTE", "QNLI", "--from", "data/glue/SST-2"], "RTE.zip"),
                        (["squad", "--force", "--from", "data/glue"], "train-v1.1")):
        with pytest.raises(configs.UserError, match=words):
            prepare(*args)
    assert sorted(os.listdir("data/glue")) == ["MRPC", "SST-2"]


def test_weights_are_downloaded_once(workdir, hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(prepare_data, "BERT_VOCAB", "")
    prepare("text", "a", "sample.txt", "--vocab", "vocab.txt")
    prepare("weights", "bert-base-uncased")
    prepare("weights", "bert-base-uncased")
    folder = "/google-bert/bert-base-uncased/resolve/main/"
    safe = importlib.util.find_spec("safetensors")
    names = ["config.json", "vocab.txt", "model.safetensors" if safe else "pytorch_model.bin"]
    assert [path for path, *_ in hub.seen] == [folder + name for name in names]
    assert sorted(os.listdir("data/weights/bert-base-uncased")) == sorted(names)
    Path("local").mkdir()
    for name in ("config.json", "vocab.txt", "pytorch_model.bin"):
        Path("local", name).write_text(name)
    prepare("weights", "distilbert-base-uncased", "--from", "local")
    assert sorted(os.listdir("data/weights/distilbert-base-uncased")) == sorted(os.listdir("local"))
    Path("local/config.json").unlink()
    for args, message in ((["roberta-base"], "RoBERTa's weights"), (["bert"], "bert-base-uncased"),
                          (["bert-large-uncased", "--from", "local"], "no config.json")):
        with pytest.raises(configs.UserError, match=message):
            prepare("weights", *args)
    hub.plan = [401]
    with pytest.raises(configs.Failure, match="gated"):
        prepare("weights", "bert-large-uncased")
    hub.seen.clear()
    Path("data/weights/bert-base-uncased/vocab.txt").write_bytes(Path("vocab.txt").read_bytes())
    Path("text").mkdir()
    for number in range(3):
        Path(f"text/{number}.txt").write_text(f"{'cat ' * number}sat")
    prepare("pg19", "--from", "text")  # BERT's vocabulary, which is there
    assert prepare_data.Corpus("pg19").vocab_size == len(PIECES) and not hub.seen
