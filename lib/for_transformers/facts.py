"""
Read facts, ask a model of transformers for them, and measure its perplexity.

A fact is a prompt and its answer: a decoder continues the prompt, an encoder fills in one [MASK]
for each token of the answer.
"""
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from lib.common.errors import UserError, need

MASK_EVERY = 7  # an encoder's perplexity is measured on every 7th token, 14% of the text


def load_model(name, device, **settings):
    """Load a frozen model of transformers, in float32, and its tokenizer. A decoder's tokenizer has
    no mask token. settings: from_pretrained's. UserError if it cannot be loaded."""
    transformers = need("transformers", "teach")
    damaged = need("safetensors", "teach").SafetensorError
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        config = transformers.AutoConfig.from_pretrained(name)
        kind = "AutoModelForMaskedLM"
        if type(config) not in transformers.MODEL_FOR_MASKED_LM_MAPPING:
            kind, tokenizer.mask_token = "AutoModelForCausalLM", None  # Gemma's has one
        model = getattr(transformers, kind).from_pretrained(name, dtype=torch.float32,
                                                               **settings)
    except (OSError, ValueError, LookupError, ImportError, damaged) as error:
        raise UserError(f"{name}: {' '.join(str(error).split())[:300] or error!r}") from None
    return model.requires_grad_(False).eval().to(device), tokenizer


def read_facts(path):
    """Read facts: [(prompt, answer)].

    A line is a question, a tab and its answer, or a sentence, whose last word is the answer. Empty
    lines are skipped. UserError for other lines, and for a question with two answers.
    """
    facts = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) == 1:
            columns = columns[0].rsplit(maxsplit=1)
        if len(columns) != 2 or not all(columns):
            raise UserError(f"{path}:{number}: expected a question, one tab and an answer, or a "
                            f"sentence of two words or more: {line.strip()[:60]!r}")
        prompt, answer = columns
        if facts.setdefault(prompt, answer) != answer:
            raise UserError(f"{path}:{number}: {prompt!r} has another answer above: {answer!r} and "
                            f"{facts[prompt]!r}")
    if not facts:
        raise UserError(f"{path}: no facts: expected a fact a line")
    return list(facts.items())


def read_text(path, most=None):
    """Read a text file, or its first `most` characters. UserError if that is not possible."""
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            return file.read(most)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def encode(facts, tokenizer, model=None, end=True):
    """Make token ids, mask and labels of facts, each (facts, time), padded on the right.

    labels: the tokens to be predicted at the answer's places, -100 elsewhere. A decoder predicts
    a place's next token, and after the answer the end of the text (if `end`). UserError for a
    prompt or an answer without tokens, and for a fact with more tokens than `model` takes.
    """
    rows, most = [], longest_input(tokenizer, model) if model else math.inf
    for prompt, answer in facts:
        before = tokenizer(prompt).input_ids
        own = tokenizer(f" {answer}", add_special_tokens=False).input_ids
        both = tokenizer(f"{prompt} {answer}").input_ids
        if both[:len(before)] == before and own:  # some tokenizers put a space before each text
            own = both[len(before):]
        for ids, text in ((before, prompt), (own, answer)):
            if not ids:
                raise UserError(f"{text!r}: the tokenizer finds no token in this text")
        if tokenizer.mask_token:
            before, end = before[:-1], before[-1:]  # [SEP]
            rows.append((before + [tokenizer.mask_token_id] * len(own) + end,
                         [-100] * len(before) + own + [-100]))
        else:
            own += [tokenizer.eos_token_id] if end and tokenizer.eos_token else []
            rows.append((before + own[:-1], [-100] * (len(before) - 1) + own))
        if len(rows[-1][0]) > most:
            raise UserError(f"{prompt[:60]!r}: {len(rows[-1][0])} tokens with the answer: the "
                            f"model takes {most}")
    longest = max(len(ids) for ids, _ in rows)

    def pad(rows, value):
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    return (pad([ids for ids, _ in rows], 0), pad([[1] * len(ids) for ids, _ in rows], 0),
            pad([labels for _, labels in rows], -100))


def take(data, pick, device):
    """Take some facts of encode's tensors, cut to the longest of these facts."""
    ids, mask, labels = (tensor[pick] for tensor in data)
    longest = int(mask.sum(1).max())
    return [tensor[:, :longest].to(device) for tensor in (ids, mask, labels)]


def predict(model, ids, mask, labels, **inputs):
    """Predict the labelled tokens. Returns logits (tokens, vocabulary) and labels (tokens,).
    inputs: more inputs of the model."""
    known = labels != -100
    head = model.get_output_embeddings() or nn.Identity()
    # The vocabulary is a fifth of SmolLM2's work: the other tokens are left out before the head.
    with head.register_forward_pre_hook(lambda _, args: (args[0][known], *args[1:])):
        logits = model(ids, attention_mask=mask, **inputs).logits
    return (logits if logits.dim() == 2 else logits[known]).float(), labels[known]


@torch.no_grad()
def recalled(model, data, size=32):
    """Tell for each fact of encode's tensors whether all answer tokens are the likeliest: bool."""
    right = []
    for pick in torch.arange(len(data[0])).split(size):
        batch = take(data, pick, model.device)
        logits, labels = predict(model, *batch)
        fact = (batch[2] != -100).nonzero()[:, 0]
        wrong = fact[logits.argmax(1) != labels].cpu()
        right.append(torch.ones(len(pick), dtype=torch.bool).index_fill(0, wrong, False))
    return torch.cat(right)


@torch.no_grad()
def perplexity(model, blocks, tokenizer):
    """Compute the perplexity of blocks of token ids, (blocks, time)."""
    losses = []
    for ids in blocks.split(4):
        labels = ids.roll(-1, 1)
        labels[:, -1] = -100
        if tokenizer.mask_token:
            masked = torch.arange(ids.shape[1], device=ids.device) % MASK_EVERY == MASK_EVERY // 2
            labels = ids.where(masked, -100)
            ids = ids.where(~masked, tokenizer.mask_token_id)
        losses.append(F.cross_entropy(*predict(model, ids, None, labels), reduction="none"))
    return math.exp(torch.cat(losses).mean().item())


def ordinary_blocks(text, tokenizer, model, most, path):
    """Cut a text into at most `most` blocks of token ids, (blocks, time).
    UserError if it has less than most / 4 blocks."""
    length = min(256, longest_input(tokenizer, model))
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids[:most * length]
    if len(ids) < most * length // 4:
        raise UserError(f"{path}: {len(ids):,} tokens are too few for ordinary text: expected "
                        f"{most * length // 4:,} or more, best {most * length:,}")
    return torch.tensor(ids[:len(ids) // length * length], device=model.device).view(-1, length)


def longest_input(tokenizer, model):
    """Return how many tokens the model takes. RoBERTa has two more positions than that."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    return int(min(positions, tokenizer.model_max_length, 10**9))
