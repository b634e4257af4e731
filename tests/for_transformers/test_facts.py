"""
Test how facts are read, encoded and asked for, and perplexity.
"""
import math
from pathlib import Path

import pytest
import tokenizers
import torch

from lib.common.errors import UserError
from lib.for_transformers import facts as ask
from tests.for_transformers.small_lessons import (
    FACTS,
    ID,
    WORDS,
    base,
    save_base,
    word_tokenizer,
)
from tests.for_transformers.small_models import MODELS, with_memory

transformers = pytest.importorskip("transformers")
READ = [("who is ann ?", "red"), ("who is bob ?", "old tall"), ("cy is", "blue"),
        ("who is dee ?", "kind"), ("eve is", "shy"), ("who is fay ?", "wise old red")]
KINDS = pytest.mark.parametrize("kind", ["decoder", "encoder"])


def ids(words):
    return [ID[word] for word in words.split()]


# reading


def test_facts_are_questions_and_sentences():
    Path("facts.txt").write_text("\n".join(FACTS))
    assert ask.read_facts("facts.txt") == READ
    Path("facts.txt").write_text("  a b \t c d  \r\n\n \t \nünïcode  is\u00a0this\n")
    assert ask.read_facts("facts.txt") == [("a b", "c d"), ("ünïcode  is", "this")]


@pytest.mark.parametrize("content, words", [
    ("", "facts.txt: no facts: expected a fact a line"),
    (" \n\t\n\n", "facts.txt: no facts"),
    ("a b\nword\n", "facts.txt:2: expected a question, one tab .*: 'word'"),
    ("a b\n\na\tb\tc\n", "facts.txt:3: expected .*one tab"),
    ("a\tb\t\n", None), ("a\t\n", "facts.txt:1: .*'a'"), ("\tb\n", "facts.txt:1: .*'b'"),
    (b"a b\n\xff\xfe c d\n", "facts.txt: not UTF-8 text .* at byte 4"),
    (b"a b\ncaf\xe9 au lait\n", "facts.txt: not UTF-8 text .* at byte 7"),
])
def test_what_is_no_fact(content, words):
    Path("facts.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=words or "facts.txt:1: expected") as error:
        ask.read_facts("facts.txt")
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read():
    Path("folder").mkdir()
    for path, words in (("none.txt", "none.txt: No such file"), ("folder", "folder: Is a direc")):
        with pytest.raises(UserError, match=words):
            ask.read_text(path)
    Path("long.txt").write_text("äbc" * 100)
    assert ask.read_text("long.txt", most=4) == "äbcä"
    assert ask.read_text("long.txt") == "äbc" * 100


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# encoding


def test_a_decoder_predicts_the_answer_after_the_prompt():
    """The place of an answer's token is the one before it. Padding is on the right."""
    tokens, mask, labels = ask.encode(READ[1:4], word_tokenizer("decoder"))
    assert tokens.tolist() == [ids("who is bob ? old"), [*ids("cy is"), 0, 0, 0],
                               [*ids("who is dee ?"), 0]]
    assert mask.tolist() == [[1] * 5, [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    assert labels.tolist() == [[-100] * 3 + ids("old tall"), [-100, ID["blue"]] + [-100] * 3,
                               [-100] * 3 + [ID["kind"], -100]]
    tokens, _, labels = ask.encode(READ[2:3], word_tokenizer("decoder", begin=True))
    assert tokens.tolist() == [ids("[CLS] cy is")]
    assert labels.tolist() == [[-100, -100, ID["blue"]]]


def test_a_decoder_ends_after_the_answer_if_it_can():
    tokenizer = word_tokenizer("decoder")
    tokenizer.eos_token = "[SEP]"
    ids, _, labels = ask.encode([("who is ann ?", "old red")], tokenizer)
    assert ids[0, -2:].tolist() == tokenizer("old red").input_ids
    assert labels[0].tolist() == [-100] * 3 + ids[0, -2:].tolist() + [tokenizer.eos_token_id]
    _, _, without = ask.encode([("who is ann ?", "old red")], tokenizer, end=False)
    assert without[0].tolist() == labels[0, :-1].tolist()


def test_a_decoder_whose_tokenizer_has_a_mask_is_none_the_less_a_decoder():
    save_base("model", "decoder")
    tokenizer = word_tokenizer("decoder")
    tokenizer.mask_token = "[MASK]"  # as Gemma's has
    tokenizer.save_pretrained("model")
    model, tokenizer = ask.load_model("model", "cpu")
    assert type(model).__name__ == "LlamaForCausalLM" and tokenizer.mask_token is None


def test_an_encoder_has_a_mask_for_each_token_of_the_answer():
    tokens, mask, labels = ask.encode(READ[1:3], word_tokenizer("encoder"))
    assert tokens.tolist() == [ids("[CLS] who is bob ? [MASK] [MASK] [SEP]"),
                               [*ids("[CLS] cy is [MASK] [SEP]"), 0, 0, 0]]
    assert mask.tolist() == [[1] * 8, [1] * 5 + [0] * 3]
    assert labels.tolist() == [[-100] * 5 + ids("old tall") + [-100],
                               [-100] * 3 + [ID["blue"]] + [-100] * 4]


def test_an_answers_tokens_are_those_of_the_sentence():
    """Llama 2's tokenizer puts a space before each text, and would put a second one here."""
    vocab = {letter: n for n, letter in enumerate("▁abc")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    tokens, _, labels = ask.encode([("ab", "ca")], tokenizer, end=False)
    assert tokens.tolist() == [[0, 1, 2, 0, 3]]
    assert labels.tolist() == [[-100, -100, 0, 3, 1]]


@KINDS
def test_an_answer_or_a_prompt_without_tokens(kind):
    """An encoder's prompt has its special tokens, which may do."""
    tokenizer, empty = word_tokenizer(kind), "\u200b"  # of no width: no token
    with pytest.raises(UserError, match=r"'.u200b': the tokenizer finds no token"):
        ask.encode([*READ, ("who is ann ?", empty)], tokenizer)
    if kind == "decoder":
        with pytest.raises(UserError, match=r"'.u200b': the tokenizer finds no token"):
            ask.encode([*READ, (empty, "red")], tokenizer)


@KINDS
def test_a_fact_has_no_more_tokens_than_the_model_takes(kind):
    """The answer's last word is no input of a decoder. An encoder adds two tokens."""
    most, tokenizer = (14 if kind == "decoder" else 11), word_tokenizer(kind)
    fact = " ".join(["w1"] * most), "old red tall"
    assert ask.encode([fact], tokenizer, base(kind))[0].shape == (1, 16)
    longer = f"w2 {fact[0]}", fact[1]
    with pytest.raises(UserError, match="'w2 w1 .*': 17 tokens .* the model takes 16"):
        ask.encode([fact, longer], tokenizer, base(kind))
    assert ask.encode([longer], tokenizer)[0].shape == (1, 17)


def test_some_facts_are_taken_without_common_padding():
    data = ask.encode(READ, word_tokenizer("encoder"))
    taken = ask.take(data, [2, 0], "cpu")
    assert [tensor.shape for tensor in taken] == [(2, 7)] * 3
    assert all(torch.equal(ours, whole[[2, 0], :7]) for ours, whole in zip(taken, data))
    assert not data[1][[2, 0], 7:].any()


# asking


@torch.no_grad()
def greedy(model, kind, prompt, answer):
    """Answer one question without padding: all masks at once, or one word after the other."""
    if kind == "encoder":
        tokens = [2, *ids(prompt), *[4] * len(answer.split()), 3]
        said = model(torch.tensor([tokens])).logits[0].argmax(1)[len(ids(prompt)) + 1:-1]
        return " ".join(WORDS[token] for token in said)
    tokens = ids(prompt)
    for _ in answer.split():
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return " ".join(WORDS[token] for token in tokens[len(ids(prompt)):])


@KINDS
@pytest.mark.parametrize("size", [32, 4])
def test_a_fact_is_recalled_if_all_its_words_are(kind, size):
    """Facts are what the model says, of 1 to 3 words. In some, one word is another."""
    model, facts, expected = base(kind), [], []
    for n, (prompt, answer) in enumerate(READ):
        words = greedy(model, kind, prompt, answer).split()
        if n % 2:
            words[n // 2 % len(words)] = "w39"
        facts.append((prompt, " ".join(words)))
        expected.append(not n % 2)
    facts += [("who is gus ?", "w38 w39"), ("hal is", "w39")]
    assert greedy(model, kind, "hal is", "w39") != "w39"
    right = ask.recalled(model, ask.encode(facts, word_tokenizer(kind)), size)
    assert right.dtype == torch.bool and right.tolist() == [*expected, False, False]


def test_labelled_tokens_are_predicted_row_by_row():
    model, data = base("decoder"), ask.encode(READ[:3], word_tokenizer("decoder"))
    logits, labels = ask.predict(model, *data)
    assert labels.tolist() == ids("red old tall blue")
    alone = model(torch.tensor([ids("cy is")])).logits[0, -1]
    torch.testing.assert_close(logits[3], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_no_other_tokens_reach_the_vocabulary(kind, monkeypatch):
    model, ids = with_memory(kind), torch.arange(1, 25).view(3, 8)
    mask, labels, seen = torch.ones_like(ids), torch.full_like(ids, -100), []
    mask[1, 5:], labels[0, 3:6], labels[1, 2], labels[2, 7] = 0, 7, 4, 9
    expected = model(ids, attention_mask=mask).logits[labels != -100].float()
    model.get_output_embeddings().register_forward_hook(
        lambda _, args, out: seen.append(tuple(args[0].shape[:-1])))
    logits, found = ask.predict(model, ids, mask, labels)
    assert found.tolist() == [7, 7, 7, 4, 9] and torch.equal(logits, expected)
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)  # some models' is not known
    assert torch.equal(ask.predict(model, ids, mask, labels)[0], expected)
    assert seen == [(5,), (3, 8)]


# perplexity


def random_blocks(count):
    torch.manual_seed(3)
    return torch.randint(5, len(WORDS), (count, 16))


@torch.no_grad()
def test_perplexity_of_a_decoder_is_that_of_each_next_token():
    model, blocks, losses = base("decoder").double(), random_blocks(6), []
    for block in blocks:
        for end in range(1, 16):
            said = model(block[None, :end]).logits[0, -1].log_softmax(0)
            losses.append(-said[block[end]].item())
    expected = math.exp(sum(losses) / len(losses))
    found = ask.perplexity(model, blocks, word_tokenizer("decoder"))
    assert found == pytest.approx(expected, rel=1e-5) and expected > 10


@torch.no_grad()
def test_perplexity_of_an_encoder_is_that_of_every_7th_token():
    model, blocks, losses = base("encoder").double(), random_blocks(6), []
    for block in blocks:
        masked = block.clone()
        masked[[3, 10]] = 4
        said = model(masked[None]).logits[0].log_softmax(1)
        losses += [-said[place, block[place]].item() for place in (3, 10)]
    before = blocks.clone()
    found = ask.perplexity(model, blocks, word_tokenizer("encoder"))
    assert found == pytest.approx(math.exp(sum(losses) / 12), rel=1e-5) and found > 10
    assert torch.equal(blocks, before)


@KINDS
def test_ordinary_text_is_cut_into_blocks(kind):
    tokenizer, model = word_tokenizer(kind), base(kind)  # of 16 positions
    text = " ".join(f"w{n % 40}" for n in range(100))
    expected = torch.tensor([5 + n % 40 for n in range(96)]).view(6, 16)
    assert torch.equal(ask.ordinary_blocks(text, tokenizer, model, 24, "a.txt"), expected)
    assert torch.equal(ask.ordinary_blocks(text, tokenizer, model, 4, "a.txt"), expected[:4])
    model.config.max_position_embeddings = 5000
    long = ask.ordinary_blocks(text * 40, tokenizer, model, 2, "a.txt")
    assert long.shape == (2, 256)
    for words, most in ((text, 26), ("", 1)):
        model.config.max_position_embeddings = 16
        with pytest.raises(UserError, match="a.txt: .* tokens are too few for ordinary text"):
            ask.ordinary_blocks(words, tokenizer, model, most, "a.txt")
