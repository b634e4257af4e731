"""
Files from the network: whole or absent, checked, and resumed where they were cut.

>>> fetch([FILES["RTE.zip"]])                       # data/downloads/RTE.zip
>>> fetch(hub_files("google-bert/bert-base-uncased", "config.json"))
>>> unpack(Path("data/downloads/RTE.zip"), Path("data/glue/RTE"))

HF_ENDPOINT names a mirror of the hub, HF_TOKEN is its token; HTTPS_PROXY and the like are honoured.
"""
import fnmatch
import hashlib
import importlib.util
import json
import os
import re
import shutil
import tarfile
import time
import zipfile
from pathlib import Path

from lib.common.errors import ROOT, Failure, UserError, need
from lib.common.files import atomic, discard, lock, write_text
from lib.common.progress import Progress

PRETRAINED = {  # weights that prepare_data.py fetches from the hub, all Apache-2.0
    "bert-base-uncased": "google-bert/bert-base-uncased",
    "bert-large-uncased": "google-bert/bert-large-uncased",
    "distilbert-base-uncased": "distilbert/distilbert-base-uncased"}


def unknown_weights(name):
    """The UserError for weights that are neither on disk nor known."""
    if "roberta" in name.lower():
        return UserError(f"{name}: RoBERTa's weights have ids of their own for GPT-2's tokens, and "
                         "are not read here: train from scratch on a corpus of --tokenizer gpt2")
    recipe = ROOT / "configs" / f"{Path(name).name}.py"
    makes = f"python pretrain.py configs/{recipe.name} makes them, " if recipe.is_file() else ""
    return UserError(f"{name}: no weights there: expected a run, a checkpoint or a folder in "
                     f"Hugging Face layout; {makes}python prepare_data.py weights NAME fetches "
                     f"{', '.join(PRETRAINED)} or ORG/NAME of the hub")


FILES_BY_SERVER = """
https://wikitext.smerity.com/  CC BY-SA 3.0
wikitext-2-v1.zip        92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c
wikitext-2-raw-v1.zip    ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11
wikitext-103-v1.zip      242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590
wikitext-103-raw-v1.zip  91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794
https://storage.googleapis.com/huggingface-nlp/datasets/bookcorpus/  no licence stated
bookcorpus.tar.bz2       03a29333b2b35e98a375b6ad7d2f1651835655cd348fb89c864136bce69a964c
https://rajpurkar.github.io/SQuAD-explorer/dataset/  CC BY-SA 4.0
train-v1.1.json          3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955
dev-v1.1.json            95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9
https://dl.fbaipublicfiles.com/glue/data/  licences are the tasks' authors': gluebenchmark.com
CoLA.zip                 f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff
SST-2.zip                d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa
STS-B.zip                e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85
QQP-clean.zip            40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0
MNLI.zip                 e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633
QNLIv2.zip               e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5
RTE.zip                  6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee
mrpc_dev_ids.tsv         971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7
https://dl.fbaipublicfiles.com/senteval/senteval_data/
msr_paraphrase_train.txt 60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89
msr_paraphrase_test.txt  a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784
"""
FILES = {}  # {file name: (URL, SHA-256)}
for name, *facts in map(str.split, FILES_BY_SERVER.strip().splitlines()):
    if name.startswith("https:"):
        server = name
    else:
        FILES[name] = (server + name, facts[0])
HUB = "https://huggingface.co"
MIRRORS = {  # the same bytes
    "wikitext-2-raw-v1.zip": f"{HUB}/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",
    "wikitext-103-raw-v1.zip":
        f"{HUB}/datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip"}
BERT_VOCAB = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"  # SHA-256
GLUE = {task: [f"{task}.zip"] for task in ("CoLA", "SST-2", "STS-B", "MNLI", "RTE")} | {
    "QQP": ["QQP-clean.zip"], "QNLI": ["QNLIv2.zip"],
    "MRPC": ["msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "mrpc_dev_ids.tsv"]}
SQUAD = ["train-v1.1.json", "dev-v1.1.json"]
DATASETS = {  # on the hub: (repository, files, revision)
    "wikipedia": ("wikimedia/wikipedia", "20231101.en/*.parquet", "main"),  # CC BY-SA 4.0
    "bookcorpus_copy": ("rojagtap/bookcorpus", "default/train/*.parquet", "refs/convert/parquet"),
    "pg19": ("deepmind/pg19", "data/test_files.txt", "main")}
PG19 = "https://storage.googleapis.com/deepmind-gutenberg/test/"  # Apache-2.0
DOWNLOADS = Path("data/downloads")
TIMEOUT = 30  # seconds without a byte before a download is tried again
NO_NETWORK = "no connection: without a network give --vocab FILE or --from PATH"


def fetch(sources, folder=DOWNLOADS):
    """The local files of [(URL, checksum)], downloaded to `folder` where it has none yet."""
    paths = [folder / Path(url).name for url, _ in sources]
    for path, (url, checksum) in zip(paths, sources):
        with lock(path, "downloads it", wait=True):
            try:
                if not path.exists():
                    download(url, path, checksum)
            except Failure as error:
                if path.name not in MIRRORS:
                    raise
                print(f"{error}; trying {MIRRORS[path.name]}", flush=True)
                download(MIRRORS[path.name], path, checksum)
    return paths


def hub_files(repo, *patterns, kind="model", revision="main"):
    """[(URL, checksum)] of the files of a repository on the hub whose path matches the first of
    `patterns` that any does: the SHA-256, or for small files, of which the hub has none, git's
    SHA-1. Failure if the hub has no such file or cannot be reached; it is asked once."""
    hub = need("huggingface_hub", "a download from the hub")
    where = f"{repo}/{' or '.join(patterns)} on the hub"
    try:
        info = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT", HUB).rstrip("/")).repo_info(
            repo, repo_type=kind, revision=revision, files_metadata=True, timeout=TIMEOUT)
    except hub.errors.HfHubHTTPError as error:
        raise Failure(f"{where}: {_reason(error)}") from None
    except Exception as error:  # noqa: BLE001 - errors of httpx or of requests, by hub's version
        raise Failure(f"{where}: {NO_NETWORK} ({error})") from None
    checksums = {file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id or ""
                 for file in info.siblings}
    names = next(filter(None, (fnmatch.filter(checksums, each) for each in patterns)), [])
    if not names:
        raise Failure(f"{where}: no such file")
    return [(hub.hf_hub_url(repo, name, repo_type=kind, revision=info.sha, endpoint=HUB),
             checksums[name]) for name in names]


def _reason(error):
    """What an error of a request means for a download."""
    status = getattr(error.response, "status_code", None)
    return {None: error, 401: "gated, private or not there (a token goes into HF_TOKEN)",
            403: "gated or private (a token goes into HF_TOKEN)",
            404: "no such file"}.get(status, f"the server replied {status}")


def download(url, path, checksum=""):
    """Fetch `url` to the file `path`, which is whole or absent, in up to four attempts.

    What came so far is in <path>.part: the next attempt, or the next call, goes on from there if
    the server can. (huggingface_hub's download would begin anew and check no SHA-256.) Failure
    when it cannot be had, or is not what `checksum` says: a SHA-256, or of 40 digits git's SHA-1.
    """
    requests = need("requests", "a download")
    # wikitext.smerity.com wants a browser
    headers = {"User-Agent": "Mozilla/5.0", "Accept-Encoding": "identity"}
    if url.startswith(HUB):
        headers |= need("huggingface_hub.utils", "a download from the hub").build_hf_headers()
        url = url.replace(HUB, os.environ.get("HF_ENDPOINT", HUB).rstrip("/"))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    for attempt, pause in enumerate((2, 8, 30, 0)):
        try:
            _receive(requests, url, part, headers)
            break
        except requests.RequestException as error:
            if attempt == 0 and "Failed to " in str(error):  # resolve the name, or connect
                raise Failure(f"{url}: {NO_NETWORK}") from None
            status = getattr(error.response, "status_code", 500)
            if not pause or 400 <= status < 500 and status not in (408, 429):
                raise Failure(f"{url}: {_reason(error)}") from None
            print(f"{url}: {_reason(error)}: again in {pause} s", flush=True)
            time.sleep(pause)
    kind, new = "SHA-256", hashlib.sha256
    if len(checksum) == 40:  # git hashes a file with its size before it
        kind, new = "SHA-1", lambda: hashlib.sha1(b"blob %d\0" % part.stat().st_size)
    with open(part, "rb+") as file:
        received = hashlib.file_digest(file, new).hexdigest()
        os.fsync(file.fileno())
    if checksum not in ("", received):
        discard(part)
        raise Failure(f"{url}: expected {kind} {checksum[:12]}, received {received[:12]}: it was "
                      "replaced, or damaged on its way")
    os.replace(part, path)


def _receive(requests, url, part, headers):
    """One attempt to complete the file `part`."""
    start = part.stat().st_size if part.exists() else 0
    if start:
        headers = headers | {"Range": f"bytes={start}-"}
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as reply:
        span = reply.headers.get("Content-Range", "")
        if reply.status_code == 416 and span == f"bytes */{start}":
            return  # all of it had come
        if reply.status_code in (206, 416) and not span.startswith(f"bytes {start}-"):
            discard(part)  # it is not the beginning of what is there now
            raise requests.RequestException(f"it cannot go on at byte {start:,}")
        reply.raise_for_status()
        start = start if reply.status_code == 206 else 0
        length = int(reply.headers.get("Content-Length", 0))
        total = start + length if length else None
        print(f"{url}: {f'{length:,} bytes' if length else 'of unknown size'}"
              f"{f', {start:,} are there' if start else ''}", flush=True)
        progress = Progress(desc=part.stem, total=total, initial=start, unit="B", unit_scale=True)
        with progress, open(part, "ab" if start else "wb") as file:
            for chunk in reply.iter_content(2**16):
                file.write(chunk)
                progress.update(len(chunk))
        if total not in (None, progress.n):
            raise requests.RequestException(f"{progress.n:,} of {total:,} bytes came")


def fetch_corpus(name):
    """The folder with the files of wikipedia, pg19's test split or bookcorpus; of the last the tar,
    unless that is gone and its copy on the hub is taken."""
    if name == "bookcorpus":
        try:
            return fetch([FILES["bookcorpus.tar.bz2"]])[0]
        except Failure as error:
            print(f"{error}; trying the copy on the hub", flush=True)
            name = "bookcorpus_copy"
    folder, (repo, pattern, revision) = DOWNLOADS / name, DATASETS[name]
    listing = folder / "files.json"  # with it, a complete folder needs no network
    files = json.loads(listing.read_text()) if listing.exists() else [""]
    if not all((folder / file).is_file() for file in files):
        sources = hub_files(repo, pattern, kind="dataset", revision=revision)
        write_text(listing, json.dumps([Path(url).name for url, _ in sources]))
        fetch(sources, folder)
    if name == "pg19":
        books = folder / "test_files.txt"
        ids = re.findall(r"test/(\d+)\.txt", books.read_text(errors="replace"))
        if not ids:
            raise damaged(books, "no list of books")
        folder = fetch([(f"{PG19}{book}.txt", "") for book in ids], folder / "test")[0].parent
    return folder


def unpack_once(path):
    """Unpack an archive to a folder of data/downloads/ that is named after its content, unless that
    is there. Returns the folder."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = DOWNLOADS / f"{path.name.split('.')[0]}_{digest[:12]}"
    with lock(folder, "unpacks it", wait=True):
        return folder if folder.exists() else unpack(path, folder)


def unpack(path, folder):
    """Unpack a zip or tar to the new `folder` and return it; without the one folder that all may be
    in (QQP-clean.zip: QQP/). Nothing is written outside. UserError, and nothing stays, if it is
    damaged, empty or larger than what the disk has free."""
    print(f"{path}: unpacking", flush=True)
    with atomic(folder) as temporary:
        free = shutil.disk_usage(temporary.parent).free

        def take(size):
            nonlocal free
            free -= size
            if free < 0:
                raise OSError("it is larger than what the disk has free")

        def member(info, to):
            take(info.size)
            return tarfile.data_filter(info, to)  # nothing outside

        try:
            if path.suffix == ".zip":  # zipfile writes nothing outside, nor more than it lists
                with zipfile.ZipFile(path) as archive:
                    take(sum(info.file_size for info in archive.infolist()))
                shutil.unpack_archive(path, temporary)
            else:
                shutil.unpack_archive(path, temporary, filter=member)
        except Exception as error:  # noqa: BLE001 - each kind of archive has its own errors
            raise UserError(f"{path}: not unpacked ({error}): if it is damaged, remove it to "
                            "download it again") from None
        discard(temporary / "__MACOSX")
        inside = list(temporary.glob("*"))
        if not inside:
            raise damaged(path, "no file in it")
        if len(inside) == 1 and inside[0].is_dir():
            top = inside[0].rename(temporary / ".top")  # a file in it may have the same name
            for file in list(top.iterdir()):
                file.rename(temporary / file.name)
            top.rmdir()
    return folder


def damaged(path, why):
    return UserError(f"{path}: damaged ({why}): remove it to download it again")


def replace_folder(folder, new):
    """Rename `new` to `folder` and discard an older one. Killed between the two renames, it leaves
    both, and the same command ends it."""
    old = folder.with_name(f".old_{folder.name}")
    if folder.exists():
        discard(old)
        os.replace(folder, old)
    os.replace(new, folder)
    discard(old)


def check_kind(name, folder):
    """Before its weights are fetched: UserError, and no folder, for a model of another kind."""
    kind = json.loads((folder / "config.json").read_text()).get("model_type", "bert")
    if kind not in ("bert", "distilbert", "pkm-bert"):
        discard(folder)
        raise UserError(f"{name}: model_type = {kind!r}: expected bert or distilbert")


def fetch_weights(name, path=None, only=None):
    """Weights of BERT's shape: data/weights/<name>/ with config.json, vocab.txt (or tokenizer.json)
    and model.safetensors (or pytorch_model.bin); `only`: one of these files. name: one of
    PRETRAINED, or ORG/NAME of the hub. Returns the folder. UserError for an unknown name or another
    kind of model, or if the folder `path` lacks a file."""
    if name not in PRETRAINED and not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        raise unknown_weights(name)
    folder, formats = Path("data/weights", name), ["model.safetensors", "pytorch_model.bin"]
    if not importlib.util.find_spec("safetensors"):
        formats.reverse()
    vocab = ["vocab.txt", "tokenizer.json"]
    for choices in [[only]] if only else [["config.json"], vocab, formats]:
        if any((folder / choice).exists() for choice in choices):
            continue
        if path is None:
            url, sha256 = hub_files(PRETRAINED.get(name, name), *choices)[0]
            known = name in PRETRAINED and choices[0] == "vocab.txt"
            fetch([(url, BERT_VOCAB if known else sha256)], folder)
            if choices == ["config.json"]:
                check_kind(name, folder)
        elif files := [path / choice for choice in choices if (path / choice).is_file()]:
            with atomic(folder / files[0].name) as temporary:
                shutil.copyfile(files[0], temporary)
        else:
            raise UserError(f"{path}: no {' or '.join(choices)} in it")
    return folder


def fetch_task(folder, names, path=None, force=False, check=None):
    """data/glue/TASK/ or data/squad/ with the official files, as the official archive unpacks.
    path: that archive, a folder with the downloads or with what they unpack to, or one that has
    such a folder named TASK. check: is called with each file first, and may raise a UserError."""
    if folder.exists() and not force:
        print(f"{folder} exists already (--force replaces it)")
        return
    zipped = names[0].endswith(".zip")
    if path and (path / folder.name).is_dir():
        path /= folder.name
    if path is None:
        files = fetch([FILES[name] for name in names])
    elif zipped and path.suffix == ".zip" and path.is_file():
        files = [path]
    elif all((path / name).is_file() for name in names):
        files = [path / name for name in names]
    elif zipped and (path / "train.tsv").is_file():
        files = [file for file in path.iterdir() if file.is_file()]
    else:
        raise UserError(f"{path}: no {', '.join(names)}{' or train.tsv' * zipped} in it")
    for file in files if check else ():
        check(file)
    new = folder.with_name(f".new_{folder.name}")
    discard(new)
    if len(files) == 1 and files[0].suffix == ".zip":
        unpack(files[0], new)
    else:
        with atomic(new) as temporary:
            temporary.mkdir()
            for file in files:
                shutil.copyfile(file, temporary / file.name)
    replace_folder(folder, new)
    print(f"{folder}: {', '.join(sorted(p.name for p in folder.iterdir() if p.is_file()))}")
