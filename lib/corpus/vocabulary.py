"""
Vocabularies and tokenizers.
"""
import collections
import hashlib
import itertools
import os
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from lib.common.errors import Failure, UserError, need
from lib.common.progress import Progress

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
GPT2_SPECIALS = ("<pad>", "<|endoftext|>", "<s>", "</s>", "<mask>")  # in the same order
IDS = ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id")


def read_vocab(path):
    """The tokens of a vocab.txt, or of the one in the folder `path`: a list of str, by id."""
    path = Path(path, "vocab.txt") if Path(path).is_dir() else Path(path)
    saved = path.with_name("tokenizer.json")  # all that transformers 5 saves
    try:
        if saved.exists() and path.name == "vocab.txt" and not path.exists():
            ids = tokenizers.Tokenizer.from_file(str(saved)).get_vocab()
            tokens = sorted(ids, key=ids.get)
        else:
            tokens = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain Exceptions
        raise UserError(f"{path}: no vocabulary of UTF-8 text ({error})") from None
    missing = [token for token in special_tokens(tokens) if token not in tokens]
    again = [token for token, number in collections.Counter(tokens).items() if number > 1]
    wrong = (f"no {', '.join(missing)}" if missing else f"{again[0]!r} more than once" if again
             else "no token but the special ones" if len(tokens) == len(SPECIALS)
             else f"{len(tokens):,} tokens, but ids of 16 bits allow 65,536"
             if len(tokens) > 2**16 else None)
    if wrong:
        raise UserError(f"{path}: not a vocabulary: {wrong}")
    return tokens


def special_tokens(vocab):
    """A vocabulary's padding, unknown, first, separator and mask tokens. Byte-level BPE has no
    unknown token; GPT-2's <|endoftext|> fills the slot."""
    return GPT2_SPECIALS if "<mask>" in vocab else SPECIALS


def vocab_hash(vocab):
    """SHA-256 of a list of tokens: tells vocabularies apart."""
    return hashlib.sha256("\n".join(vocab).encode()).hexdigest()


def vocab_facts(vocab):
    """What meta.json says of a vocabulary: its size, hash and special ids."""
    return {"vocab_size": len(vocab), **dict(zip(IDS, map(vocab.index, special_tokens(vocab)))),
            "tokenizer_hash": vocab_hash(vocab)}


def load_tokenizer(path):
    """The tokenizers.Tokenizer of a vocab.txt or of the folder that it is in: BERT's, or,
    where a byte-level BPE's tokenizer.json lies beside it, that one. It adds no special tokens."""
    vocab = read_vocab(path)
    if special_tokens(vocab) is SPECIALS:
        return wordpiece_tokenizer(vocab)
    file = (Path(path) if Path(path).is_dir() else Path(path).parent) / "tokenizer.json"
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain Exceptions
        raise UserError(f"{file}: no tokenizer ({error}): prepare the corpus again") from None


def wordpiece_tokenizer(vocab):
    """BERT's tokenizer of a list of tokens: the cased one's of a vocabulary with capitals."""
    ids = {token: number for number, token in enumerate(vocab)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase="A" not in ids)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def byte_characters():
    """The character that stands for each byte in the tokens of byte-level BPE (Radford et al.):
    printable ones for themselves, the others from 256 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def gpt2_vocab():
    """GPT-2's tokens by id, then <s>, </s>, <pad>, <mask>. tiktoken downloads them, or has them
    in TIKTOKEN_CACHE_DIR."""
    try:
        gpt2 = need("tiktoken", "--tokenizer gpt2").get_encoding("gpt2")
    except (OSError, ValueError) as error:
        raise Failure(f"no GPT-2 vocabulary ({error}): without a network, put tiktoken's two files "
                      "into TIKTOKEN_CACHE_DIR") from None
    characters = byte_characters()
    tokens = ["".join(characters[byte] for byte in gpt2.decode_single_token_bytes(token_id))
              for token_id in range(gpt2.n_vocab - 1)]
    return [*tokens, "<|endoftext|>", "<s>", "</s>", "<pad>", "<mask>"]


def _merges(ids):
    """The merges of a byte-level BPE vocabulary {token: id} whose ids are in the order in which
    they were learned: what the earlier merges make of a token's characters is its own merge."""
    merges = []
    for token in ids.keys() - set(GPT2_SPECIALS):
        parts = list(token)
        while len(parts) > 2:
            ranks = [ids.get(a + b, len(ids)) for a, b in itertools.pairwise(parts)]
            at = ranks.index(min(ranks))
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(parts)
    return sorted(map(tuple, merges), key=lambda pair: ids["".join(pair)])


def byte_level_tokenizer(vocab):
    """The tokenizers.Tokenizer of GPT-2's tokens, for tokenizer.json."""
    ids = {token: token_id for token_id, token in enumerate(vocab)}
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, _merges(ids)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # <mask> strips the space before it, as RoBERTa's does: it stands for a word and its space
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, lstrip=token == "<mask>",
                                                        normalized=False)
                                  for token in GPT2_SPECIALS])
    return tokenizer


def text_encoder(vocab):
    """texts -> the ids of each, on all cores. A "[SEP]" in a text is text, not the token."""
    if special_tokens(vocab) is SPECIALS:
        tokenizer = wordpiece_tokenizer(vocab)
        tokenizer.encode_special_tokens = True
        return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch_fast(
            texts, add_special_tokens=False)]
    bytes_of = {character: byte for byte, character in enumerate(byte_characters())}
    ranks = {bytes(bytes_of[c] for c in token): rank for rank, token in enumerate(vocab)
             if token not in GPT2_SPECIALS}
    gpt2 = need("tiktoken", "--tokenizer gpt2").Encoding("gpt2", pat_str=(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
        mergeable_ranks=ranks, special_tokens={})
    return lambda texts: gpt2.encode_ordinary_batch(texts, num_threads=os.cpu_count())


def train_vocab(read, size, vocab_size):
    """BERT's special tokens, then the WordPieces that `tokenizers` learns; read() gives the lines.

    The same text gives the same vocabulary. `tokenizers` numbers the pieces "##a" in an order of
    chance and breaks ties between equally frequent merges by these numbers: so they are numbered
    here, as special tokens of the training.
    """
    tokenizer = wordpiece_tokenizer(list(SPECIALS))
    normalize, split = tokenizer.normalizer, tokenizer.pre_tokenizer
    counts = collections.Counter()
    for line in read():
        counts.update(line)
    characters = collections.Counter()
    for character, count in counts.items():
        for normal in normalize.normalize_str(character).strip():
            characters[normal] += count
    # every character costs two tokens, "a" and "##a": all of them would fill a small vocabulary
    alphabet = sorted(characters, key=lambda c: (-characters[c], c))[:vocab_size // 16]
    inside = [c for c in sorted(alphabet)
              if len(split.pre_tokenize_str(normalize.normalize_str(f"a{c}"))) == 1]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*SPECIALS, *(f"##{c}" for c in inside)],
        initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False)
    tokenizer.train_from_iterator(Progress(
        read(), desc=f"learning {vocab_size:,} WordPieces", total=size, unit=" lines"), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.get)


def special_ids(tokenizer):
    """The ids of padding, unknown, [CLS], [SEP] and [MASK]."""
    return tuple(map(tokenizer.token_to_id, special_tokens(tokenizer.get_vocab())))


def tokenize(tokenizer, texts, what):
    """The Encodings of texts, one by one, without special tokens."""
    for n in Progress(range(0, len(texts), 8192), what):
        yield from tokenizer.encode_batch(texts[n:n + 8192], add_special_tokens=False)


def full_tokenizer(path):
    """load_tokenizer's, which also puts [CLS] and [SEP] around a text or a pair of texts, and pads
    the texts of a batch to the same length."""
    tokenizer, vocab = load_tokenizer(path), read_vocab(path)
    pad, _, cls, sep, _ = special_tokens(vocab)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, vocab.index(cls)), (sep, vocab.index(sep))])
    tokenizer.enable_padding(pad_id=vocab.index(pad), pad_token=pad)
    return tokenizer
