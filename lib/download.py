"""
Download files. A file is there only when it is whole and checked.

>>> fetch(*FILES["RTE.zip"])                          # data/downloads/RTE.zip
>>> fetch_from_hub("google-bert/bert-base-uncased", ["vocab.txt"], Path("data/weights/bert"))
>>> unpack(Path("data/downloads/RTE.zip"))            # data/downloads/RTE_<hash>/
"""
import contextlib
import hashlib
import json
import shutil
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lib.device import Progress
from lib.errors import Failure, UserError
from lib.files import atomic, discard, lock

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
https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/  MIT licence
encoder.json             196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783
vocab.bpe                1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5
"""
FILES = {}  # {file name: (URL, SHA-256)}
for name, *facts in map(str.split, FILES_BY_SERVER.strip().splitlines()):
    if name.startswith("https:"):
        server = name
    else:
        FILES[name] = (server + name, facts[0])
DOWNLOADS = Path("data/downloads")
OFFLINE = "without a network give --vocab FILE or --from PATH"


def fetch(url, sha256="", folder=DOWNLOADS):
    """Download a file to `folder`, unless it is there; return its path.

    After an error it tries once more. Failure if the file cannot be had or has another SHA-256.
    """
    path = folder / Path(url).name
    if path.exists():
        return path
    with lock(path, "downloads it"), atomic(path) as temporary:
        try:
            try:
                download(url, temporary)
            except OSError:
                download(url, temporary)
        except OSError as error:
            raise Failure(f"{url}: {error}: {OFFLINE}") from None
        received = file_sha256(temporary)
        if sha256 not in ("", received):
            raise Failure(f"{url}: expected SHA-256 {sha256[:12]}, received {received[:12]}: it "
                          "was replaced, or damaged on its way")
    return path


def download(url, path):
    """Download a file in one attempt."""
    import requests

    headers = {"User-Agent": "Mozilla/5.0"}  # wikitext.smerity.com wants a browser
    with requests.get(url, headers=headers, stream=True, timeout=30) as reply:
        reply.raise_for_status()
        total = int(reply.headers.get("Content-Length", 0))
        progress = Progress(desc=url, total=total, unit="B", unit_scale=True)
        with progress, open(path, "wb") as file:
            for chunk in reply.iter_content(2**16):
                progress.update(file.write(chunk))


def file_sha256(path):
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_from_hub(repo, patterns, folder, kind="model"):
    """Download a hub repository's files that match one of the patterns."""
    import huggingface_hub as hub

    try:
        hub.snapshot_download(repo, repo_type=kind, allow_patterns=patterns, local_dir=folder)
    except Exception as error:  # noqa: BLE001 - of the hub, of its HTTP library or of the disk
        raise Failure(f"{repo} on the hub: {str(error).splitlines()[0]}: {OFFLINE}") from None


def unpack(path):
    """Unpack a zip or tar to data/downloads/, unless that was done; return the folder.

    The folder's name has the SHA-256 of the archive, because archives of one name can differ.
    """
    folder = DOWNLOADS / f"{path.stem}_{file_sha256(path)[:12]}"
    if not folder.exists():
        print(f"{path}: unpacking", flush=True)
        inside = {} if path.suffix == ".zip" else {"filter": "data"}  # nothing outside the folder
        with lock(folder, "unpacks it"), atomic(folder) as temporary:
            shutil.unpack_archive(path, temporary, **inside)
    return folder


@contextlib.contextmanager
def new_folder(folder, force):
    """Make a folder that is there only when it is whole. With `force` it replaces an older one."""
    folder = Path(folder)
    old = folder.with_name(f".old_{folder.name}")
    with lock(folder, "prepares it"):
        with atomic(folder) as temporary:
            if folder.exists() and not force:
                raise UserError(f"{folder} exists already (--force replaces it)")
            temporary.mkdir()
            yield temporary
            if folder.exists():  # a kill must not leave half of it under its name
                discard(old)
                folder.rename(old)
        discard(old)


def gpt2_tokenizer():
    """Make GPT-2's tokenizers.Tokenizer, with RoBERTa's special tokens.

    tiktoken downloads its two files, or finds them in TIKTOKEN_CACHE_DIR.
    """
    from tiktoken.load import read_file_cached as read

    ids = json.loads(read(*FILES["encoder.json"]))
    lines = read(*FILES["vocab.bpe"]).decode().splitlines()
    merges = [tuple(line.split()) for line in lines[1:]]
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in ("<|endoftext|>", "<s>", "</s>", "<pad>", "<mask>"):  # the first has an id
        # <mask> is a word with the space before it, as in RoBERTa
        added = tokenizers.AddedToken(token, lstrip=token == "<mask>", normalized=False)
        tokenizer.add_special_tokens([added])
    return tokenizer
