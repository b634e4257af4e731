"""
Learn, save and load vocabularies and their tokenizers.

A vocabulary is a list of tokens, by id. It is BERT's (WordPiece) or GPT-2's (byte-level BPE).

>>> load_tokenizer("data/docs").encode("a [MASK]")     # [MASK] in a text is the token
>>> text_tokenizer("data/docs").encode("a [SEP]")      # [SEP] in a text is text
>>> full_tokenizer("data/docs").encode("a", "b")       # [CLS] a [SEP] b [SEP]
"""
import hashlib
import itertools
import json
import re
import unicodedata
from collections import Counter, namedtuple
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from lib.files import discard, read_json, write_text
from lib.settings import Progress, UserError

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


def tokens_by_id(tokenizer):
    """Return the tokens of a tokenizer, in the order of their ids."""
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.get)


def vocab_files(tokenizer):
    """Format a tokenizer as vocab.txt and tokenizer.json, "" if the first alone gives it."""
    vocab, text = tokens_by_id(tokenizer), tokenizer.to_str(pretty=True)
    if text == wordpiece_tokenizer(vocab).to_str(pretty=True):
        text = ""
    return "\n".join(vocab), text


def write_vocab(folder, tokenizer):
    """Write a tokenizer's vocab.txt and, if it takes one, its tokenizer.json."""
    vocab, text = vocab_files(tokenizer)
    write_text(folder / "vocab.txt", f"{vocab}\n")
    if text:
        write_text(folder / "tokenizer.json", text)
    else:
        discard(folder / "tokenizer.json")  # of an earlier vocabulary


def vocab_hash(tokenizer):
    """Return the SHA-256 of a vocabulary and its settings, which tells vocabularies apart."""
    vocab, text = vocab_files(tokenizer)
    if special_tokens(tokenizer.get_vocab()) is SPECIALS:  # GPT-2's rule is always the same
        vocab += text
    return hashlib.sha256(vocab.encode()).hexdigest()


def load_tokenizer(path):
    """Load the tokenizers.Tokenizer of a vocab.txt, or of the folder that has it.

    The JSON files beside a vocab.txt count as in transformers 5. A vocab.txt alone is cased if it
    has "A". The tokenizer adds no special tokens. It encodes the name of a special token in a
    text as that token.
    """
    path = Path(path)
    folder = path.parent if path.name == "vocab.txt" else path
    names = "tokenizer.json", "tokenizer_config.json", "config.json", "added_tokens.json"
    files = {name: read_json(folder / name) for name in names if (folder / name).is_file()}
    try:
        tokenizer = make_tokenizer(path, files)
        add_tokens(tokenizer, files)
        if None in special_ids(tokenizer):
            raise ValueError("a special token like [PAD] is missing")
    except Exception as error:  # noqa: BLE001 - tokenizers has no class of its own
        raise UserError(f"{path}: not a vocabulary of BERT: {error}") from None
    return tokenizer


def make_tokenizer(path, files):
    """Make the tokenizer of a tokenizer.json, or BERT's of its vocabulary or a vocab.txt.

    files: the JSON files beside it, {name: content}.
    """
    saved = files.get("tokenizer.json")
    settings = files.get("tokenizer_config.json", {})
    model = files.get("config.json", {}) | settings
    kind = model.get("tokenizer_class") or "BertTokenizer"
    as_saved = saved and kind in ("PreTrainedTokenizerFast", "TokenizersBackend")
    if not as_saved and not re.fullmatch("(Distil)?BertTokenizer(Fast)?", kind):
        raise ValueError(f"tokenizer_class = {kind!r}: expected BertTokenizer, or "
                         "PreTrainedTokenizerFast with a tokenizer.json")
    if saved:
        bare = saved | {"truncation": None, "padding": None, "post_processor": None,
                        "added_tokens": []}
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(bare))
    else:
        file = path / "vocab.txt" if path.is_dir() else path
        lines = file.read_text("utf-8").rstrip("\n").split("\n")
        tokenizer = wordpiece_tokenizer(lines)
    vocab = tokens_by_id(tokenizer)
    if tokenizer.token_to_id(vocab[-1]) >= len(vocab):
        raise ValueError("a token is in it twice: sort FILE | uniq -d shows which")

    of_berts = "tokenizer_config.json" in files or saved and "model_type" in model
    if of_berts and not as_saved:
        tokenizer = wordpiece_tokenizer(
            vocab, lowercase=settings.get("do_lower_case", True),
            strip_accents=settings.get("strip_accents"),
            handle_chinese_chars=settings.get("tokenize_chinese_chars", True))
    return tokenizer


def add_tokens(tokenizer, files):
    """Add the tokens that a text is searched for before all else. files: see make_tokenizer."""
    added = {}
    for token, token_id in files.get("added_tokens.json", {}).items():
        added[token_id] = {"content": token}
    for token in files.get("tokenizer.json", {}).get("added_tokens", []):
        added[token.pop("id")] = token
    added |= files.get("tokenizer_config.json", {}).get("added_tokens_decoder", {})
    for token_id in sorted(added, key=int):
        token = tokenizers.AddedToken(**added[token_id])
        token.special = token.content in SPECIALS + GPT2_SPECIALS  # others are tokens in any text
        tokenizer.add_tokens([token])


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
    tokenizer.post_processor = processors.BertProcessing(
        (tokens.sep, ids.sep), (tokens.cls, ids.cls))
    tokenizer.enable_padding(pad_id=ids.pad, pad_token=tokens.pad)
    return tokenizer


def tokenize(tokenizer, texts, what):
    """Yield each text's tokenizers.Encoding, without special tokens. what: named in the bar."""
    for start in Progress(range(0, len(texts), 8192), what):
        yield from tokenizer.encode_batch(texts[start:start + 8192], add_special_tokens=False)


def wordpiece_tokenizer(vocab, **settings):
    """Make BERT's tokenizers.Tokenizer; the cased one for a vocabulary with "A".

    settings: of tokenizers' BertNormalizer.
    """
    ids = {token: token_id for token_id, token in enumerate(vocab)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=SPECIALS.unk))
    tokenizer.normalizer = normalizers.BertNormalizer(**{"lowercase": "A" not in ids} | settings)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([token for token in SPECIALS if token in ids])
    return tokenizer


def train_tokenizer(read, size, vocab_size, cased=False):
    """Learn WordPieces; return their tokenizer. The special tokens come first.

    It keeps accents and marks, and capitals if it is cased. Like BERT's it removes zero-width
    joiners and other control characters. A text without marks needs no setting that says so.
    read: returns an iterator over the lines of the text, whose number is `size`; called twice.
    `tokenizers` numbers "##x" pieces in random order, which changes ties. Declared as special, they
    keep their order.
    """
    text = Counter(itertools.chain.from_iterable(read()))
    marks = count_characters("".join(text), ["Mn"])
    settings = {"lowercase": not cased, "strip_accents": False if marks else None}
    tokenizer = wordpiece_tokenizer(SPECIALS, **settings)
    normalize = tokenizer.normalizer.normalize_str
    split = tokenizer.pre_tokenizer.pre_tokenize_str
    characters = Counter()
    for character, count in text.items():
        for normal in normalize(character).strip():
            characters[normal] += count
    # a character costs two tokens, "a" and "##a": rare ones would fill a small vocabulary
    by_count = sorted(sorted(characters), key=characters.get, reverse=True)
    common = sum(count > 1 + characters.total() / 10**6 for count in characters.values())
    alphabet = by_count[:max(vocab_size // 16, min(common, vocab_size * 3 // 8))]
    inside = [f"##{c}" for c in sorted(alphabet) if len(split(normalize(f"a{c}"))) == 1]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*SPECIALS, *inside],
        initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False)
    lines = Progress(read(), desc=f"learning {vocab_size:,} WordPieces", total=size, unit=" lines")
    tokenizer.train_from_iterator(lines, trainer)
    return wordpiece_tokenizer(tokens_by_id(tokenizer), **settings)


def count_characters(text, kinds):
    """Count a text's characters by Unicode's categories, where "é" is a letter and a mark.

    kinds: beginnings of categories, as "LM" for letters and marks.
    """
    parts = unicodedata.normalize("NFD", text.lower())
    return sum(unicodedata.category(part).startswith(tuple(kinds)) for part in parts)
