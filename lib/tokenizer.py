"""
Save and load vocabularies and their tokenizers.

A vocabulary is a list of tokens, by id. It is BERT's (WordPiece) or GPT-2's (byte-level BPE).

>>> load_tokenizer("data/docs").encode("a [MASK]")     # [MASK] in a text is the token
>>> text_tokenizer("data/docs").encode("a [SEP]")      # [SEP] in a text is text
>>> full_tokenizer("data/docs").encode("a", "b")       # [CLS] a [SEP] b [SEP]
"""
import hashlib
from collections import namedtuple
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from lib.files import write_text
from lib.ranks import Progress
from lib.settings import UserError

Specials = namedtuple("Specials", "pad unk cls sep mask")  # the special tokens, or their ids
SPECIALS = Specials("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# byte-level BPE knows every text; its <|endoftext|> stands where [UNK] does
GPT2_SPECIALS = Specials("<pad>", "<|endoftext|>", "<s>", "</s>", "<mask>")


def special_tokens(vocab):
    """Return the Specials of a vocabulary: BERT's or GPT-2's tokens."""
    return GPT2_SPECIALS if GPT2_SPECIALS.mask in vocab else SPECIALS


def special_ids(tokenizer):
    """Return the ids of a tokenizer's special tokens, as Specials."""
    return Specials(*map(tokenizer.token_to_id, special_tokens(tokenizer.get_vocab())))


def read_vocab(path):
    """Read a vocab.txt, or the one in a folder: a list of tokens, by id.

    A folder with only a tokenizer.json, as transformers 5 saves it, is read too.
    """
    path = Path(path)
    file = path / "vocab.txt" if path.is_dir() else path
    saved = file.with_name("tokenizer.json")
    if saved.exists() and not file.exists():
        tokens = tokens_by_id(tokenizers.Tokenizer.from_file(str(saved)))
    elif not file.exists():
        raise UserError(f"{file}: no such file")
    else:
        tokens = file.read_text(encoding="utf-8").rstrip("\n").split("\n")
    missing = set(special_tokens(tokens)).difference(tokens)
    if missing:
        raise UserError(f"{file}: not a vocabulary: no {', '.join(sorted(missing))} in it")
    return tokens


def tokens_by_id(tokenizer):
    """Return the tokens of a tokenizer, in the order of their ids."""
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.get)


def write_vocab(folder, tokenizer):
    """Write vocab.txt to a folder and, for byte-level BPE, tokenizer.json."""
    vocab = tokens_by_id(tokenizer)
    write_text(folder / "vocab.txt", "\n".join(vocab) + "\n")
    if special_tokens(vocab) is GPT2_SPECIALS:
        write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))


def vocab_hash(vocab):
    """Return the SHA-256 of a vocabulary, which tells vocabularies apart."""
    return hashlib.sha256("\n".join(vocab).encode()).hexdigest()


def load_tokenizer(path):
    """Load the tokenizers.Tokenizer of a vocab.txt, or of the folder that has it.

    The tokenizer adds no special tokens. It encodes the name of a special token in a text as that
    token. A byte-level BPE is read from the tokenizer.json beside its vocab.txt.
    """
    vocab = read_vocab(path)
    if special_tokens(vocab) is SPECIALS:
        return wordpiece_tokenizer(vocab)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def text_tokenizer(path):
    """Load a tokenizer (see load_tokenizer) that encodes a "[SEP]" in a text as text."""
    tokenizer = load_tokenizer(path)
    tokenizer.encode_special_tokens = True
    return tokenizer


def full_tokenizer(path):
    """Load a tokenizer (see load_tokenizer) that adds special tokens and pads.

    [CLS] and [SEP] are put around a text or a pair of texts. [PAD] fills up the texts of a batch.
    """
    tokenizer = load_tokenizer(path)
    tokens = special_tokens(tokenizer.get_vocab())
    ids = special_ids(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokens.cls} $A {tokens.sep}",
        pair=f"{tokens.cls} $A {tokens.sep} $B:1 {tokens.sep}:1",
        special_tokens=[(tokens.cls, ids.cls), (tokens.sep, ids.sep)])
    tokenizer.enable_padding(pad_id=ids.pad, pad_token=tokens.pad)
    return tokenizer


def tokenize(tokenizer, texts, what):
    """Yield each text's tokenizers.Encoding, without special tokens. what: named in the bar."""
    for start in Progress(range(0, len(texts), 8192), what):
        yield from tokenizer.encode_batch(texts[start:start + 8192], add_special_tokens=False)


def wordpiece_tokenizer(vocab):
    """Make BERT's tokenizers.Tokenizer; the cased one for a vocabulary with capitals."""
    ids = {token: token_id for token_id, token in enumerate(vocab)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=SPECIALS.unk))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase="A" not in ids)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer
