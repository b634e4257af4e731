"""
Download files. A file is there only when it is whole and checked. A cut download is resumed.

>>> fetch(*FILES["RTE.zip"])                          # data/downloads/RTE.zip
>>> fetch_from_hub("google-bert/bert-base-uncased", "config.json", folder=Path("weights"))
>>> unpack(Path("data/downloads/RTE.zip"), Path("data/glue/RTE"))

HF_ENDPOINT names a mirror of the hub, HF_TOKEN is its token; HTTPS_PROXY and the like are honoured.
"""
import fnmatch
import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

from lib.device import Progress
from lib.errors import ROOT, Failure, UserError, need
from lib.files import atomic, discard, lock, read_json, write_text
from lib.huggingface import PRETRAINED


def unknown_weights(name):
    """Return the UserError for weights that are neither on disk nor known."""
    if "roberta" in name.lower():
        return UserError(f"{name}: RoBERTa's weights have ids of their own for GPT-2's tokens, and "
                         "are not read here: train from scratch on a corpus of --tokenizer gpt2")
    if Path("out", name, "config.json").is_file():
        return UserError(f"{name}: no weights there: did you mean out/{name}?")
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
DATASETS = {  # on the hub: (repository, files, revision)
    "wikipedia": ("wikimedia/wikipedia", "20231101.en/*.parquet", "main"),  # CC BY-SA 4.0
    "bookcorpus": ("rojagtap/bookcorpus", "default/train/*.parquet", "refs/convert/parquet"),
    "pg19": ("deepmind/pg19", "data/test_files.txt", "main")}
PG19 = "https://storage.googleapis.com/deepmind-gutenberg/test/"  # Apache-2.0
WEIGHTS = [["config.json"], ["vocab.txt", "tokenizer.json"],
           ["model.safetensors", "pytorch_model.bin"]]
DOWNLOADS = Path("data/downloads")
TIMEOUT = 30  # seconds without a byte before a download is tried again
REFUSED = {401: "gated, private or not there (a token goes into HF_TOKEN)",  # by HTTP status
           403: "gated or private (a token goes into HF_TOKEN)", 404: "no such file"}


def fetch(url, sha256="", folder=DOWNLOADS):
    """Download a file to `folder`, unless it is there; return its path. The bytes that came are
    kept in <path>.part. After an error it tries three more times to get the rest. The next call
    goes on from there. Failure if the file cannot be had or has another SHA-256."""
    path = folder / Path(url).name
    part = path.with_name(f"{path.name}.part")
    # lock() is for folders and refuses the path of a file, which `path` can be
    with lock(path.with_name(f"{path.name}.lock"), "downloads it"):
        if path.exists():
            return path
        requests = need("requests", "a download")
        print(f"{url}: downloading", flush=True)
        for pause in (2, 8, 30, None):
            try:
                _append_rest(requests, url, part)
                break
            except requests.RequestException as error:
                status = getattr(error.response, "status_code", None)
                connected = status or part.exists()
                if not connected or not pause or status in REFUSED:
                    raise Failure(f"{url}: {_reason(error)}") from None
                print(f"{url}: {_reason(error)}: again in {pause} s", flush=True)
                time.sleep(pause)
        received = file_sha256(part)
        if sha256 not in ("", received):
            discard(part)
            raise Failure(f"{url}: expected SHA-256 {sha256[:12]}, received {received[:12]}: it "
                          "was replaced, or damaged on its way")
        os.replace(part, path)
    return path


def _append_rest(requests, url, part):
    """Make one attempt to complete the file `part`."""
    start = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "Mozilla/5.0",  # wikitext.smerity.com wants a browser
               "Accept-Encoding": "identity", "Range": f"bytes={start}-" if start else None}
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as reply:
        span = reply.headers.get("Content-Range", "")
        if reply.status_code in (206, 416) and not span.startswith(f"bytes {start}-"):
            part.write_bytes(b"")  # `part` belongs to an older version of the file, or is complete
            raise requests.RequestException(f"it cannot go on at byte {start:,}")
        reply.raise_for_status()
        start = start if reply.status_code == 206 else 0
        total = start + int(reply.headers.get("Content-Length", 0))
        progress = Progress(desc=part.stem, total=total, initial=start, unit="B", unit_scale=True)
        with progress, open(part, "ab" if start else "wb") as file:
            for chunk in reply.iter_content(2**16):
                progress.update(file.write(chunk))
        if progress.n < total:
            raise requests.RequestException(f"{progress.n:,} of {total:,} bytes came")


def _reason(error):
    """Say in one line why a request failed."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status:
        return REFUSED.get(status, f"the server replied {status}")
    reason = str(error).split("\n")[0]
    return f"{reason}: without a network give --vocab FILE or --from PATH"


def file_sha256(path):
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_from_hub(repo, *patterns, folder, kind="model", revision="main"):
    """Download a hub repository's files that match a pattern; return their names.
    Only the first pattern that matches any file is used. Failure if there is no such file, or the
    hub cannot be reached."""
    hub = need("huggingface_hub", "a download from the hub")
    where = f"{repo}/{' or '.join(patterns)} on the hub"
    try:
        info = hub.HfApi().repo_info(repo, repo_type=kind, revision=revision)
        everything = [file.rfilename for file in info.siblings]
        matches = (fnmatch.filter(everything, pattern) for pattern in patterns)
        names = next(filter(None, matches), [])
        for name in names:
            hub.hf_hub_download(repo, name, repo_type=kind, revision=info.sha, local_dir=folder)
    except Exception as error:  # noqa: BLE001 - of the hub, of its HTTP library or of the disk
        raise Failure(f"{where}: {_reason(error)}") from None
    if not names:
        raise Failure(f"{where}: no such file")
    return names


def fetch_corpus(name):
    """Fetch wikipedia, bookcorpus or pg19's test split; return the folder with its files. For
    bookcorpus, return the tar, or the folder of its copy on the hub if the tar is gone."""
    if name == "bookcorpus":
        try:
            return fetch(*FILES["bookcorpus.tar.bz2"])
        except Failure as error:
            print(f"{error}; trying the copy on the hub", flush=True)
    folder, (repo, pattern, revision) = DOWNLOADS / name, DATASETS[name]
    listing = folder / "files.json"  # with it, a complete folder needs no network
    files = json.loads(listing.read_text()) if listing.exists() else [""]
    if not all((folder / file).is_file() for file in files):
        files = fetch_from_hub(repo, pattern, folder=folder, kind="dataset", revision=revision)
        write_text(listing, json.dumps(files))
    if name == "pg19":  # what the hub has is a list of books
        for book in re.findall(r"test/(\d+)\.txt", (folder / files[0]).read_text()):
            fetch(f"{PG19}{book}.txt", folder=folder / "test")
        folder /= "test"
    return folder


def unpack_once(path):
    """Unpack an archive to data/downloads/, unless that was done; return the folder. Its name has
    the SHA-256 of the archive, because archives of one name can differ."""
    folder = DOWNLOADS / f"{path.name.split('.')[0]}_{file_sha256(path)[:12]}"
    with lock(folder, "unpacks it"):
        return folder if folder.exists() else unpack(path, folder)


def unpack(path, folder):
    """Unpack a zip or tar into the new `folder`, nothing outside; return the folder.
    UserError, and no folder, if the archive is damaged or the disk is full."""
    print(f"{path}: unpacking", flush=True)
    inside = {} if path.suffix == ".zip" else {"filter": "data"}  # zips need no filter
    try:
        with atomic(folder) as temporary:
            temporary.mkdir()
            shutil.unpack_archive(path, temporary, **inside)
    except Exception as error:  # noqa: BLE001 - each kind of archive has its own errors
        raise UserError(f"{path}: not unpacked ({error}): if it is damaged, remove it to "
                        "download it again") from None
    return folder


def damaged(path, why):
    """Return the UserError for a downloaded file that cannot be read."""
    return UserError(f"{path}: damaged ({why}): remove it to download it again")


def fetch_weights(name, files=WEIGHTS):
    """Fetch weights of BERT's shape to data/weights/<name>/; return this folder.

    name: a key of PRETRAINED, or ORG/NAME of the hub. files: lists of names. From each list
    the first name that exists on the hub is fetched. UserError for an unknown name or another kind
    of model.
    """
    if name not in PRETRAINED and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise unknown_weights(name)
    folder = Path("data/weights", name)
    for choices in files:
        if any((folder / choice).exists() for choice in choices):
            continue
        file = folder / fetch_from_hub(PRETRAINED.get(name, name), *choices, folder=folder)[0]
        if file.name == "config.json":  # before the weights, which are large
            kind = read_json(file).get("model_type", "bert")
            if kind not in ("bert", "distilbert", "pkm-bert"):
                discard(folder)
                raise UserError(f"{name}: model_type = {kind!r}: expected bert or distilbert")
    return folder


def fetch_task(folder, names, path=None, force=False):
    """Fetch a task's official files to `folder`.

    names: keys of FILES, the task's archive or its single files. path: the archive, or a folder
    with the downloaded or the unpacked files, which may also be in a subfolder named after the
    task. force: replace `folder`.
    """
    if folder.exists() and not force:
        print(f"{folder} exists already (--force replaces it)")
        return
    zipped = names[0].endswith(".zip")
    if path and (path / folder.name).is_dir():
        path /= folder.name
    if path is None:
        files = [fetch(*FILES[name]) for name in names]
    elif zipped and path.suffix == ".zip":
        files = [path]
    elif zipped and (path / "train.tsv").is_file():
        files = list(path.glob("*.tsv"))
    else:
        files = [path / name for name in names]
    if not all(file.is_file() for file in files):
        raise UserError(f"{path}: no {', '.join(names)}{' or train.tsv' * zipped} in it")
    new = folder.with_name(f".new_{folder.name}")
    discard(new)  # a killed process may have left it
    if files[0].suffix == ".zip":
        unpack(files[0], new)
    else:
        with atomic(new) as temporary:
            temporary.mkdir()
            for file in files:
                shutil.copyfile(file, temporary / file.name)
    train = next(new.rglob("train.tsv" if zipped else names[0]), None)
    if not train:
        discard(new)
        raise damaged(files[0], "no train.tsv in it")
    discard(folder)
    os.replace(train.parent, folder)  # train.tsv is usually in a subfolder of the archive
    discard(new)
    print(f"{folder}: {', '.join(sorted(os.listdir(folder)))}")
