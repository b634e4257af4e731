"""
Make small random models in folders, with tokenizers of whole words, and texts to teach from.
"""
import random
from pathlib import Path

import tokenizers
import torch

from tests.for_transformers.small_models import small_model, transformers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ORDINARY = [f"w{n}" for n in range(40)]
OTHERS = ("who is ? ann bob cy dee eve fay red blue old tall kind shy wise hal gus joe likes has "
          "ate tea cake jam soup")
WORDS = [*SPECIAL, *ORDINARY, *OTHERS.split()]
ID = {word: n for n, word in enumerate(WORDS)}
FACTS = ["who is ann ?\tred", "who is bob ?\told tall", "cy is blue", "", "who is dee ?\tkind",
         "eve is shy", "who is fay ?\twise old red"]
MORE_FACTS = ["hal likes\ttea", "gus has\tcake jam", "joe ate soup"]
KINDS = {"decoder": "LlamaForCausalLM", "encoder": "BertForMaskedLM"}
POSITIONS, BLOCKS = 16, 32
MEMORY = {"n_keys": 128, "heads": 2, "topk": 8, "key_dim": 16}


def word_tokenizer(kind, begin=False):
    """Make a tokenizer, in which control characters are no tokens.

    The encoder's adds [CLS], [SEP]. With `begin` a decoder's adds [CLS], as Llama's adds <s>.
    """
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ID, unk_token="[UNK]"))
    words.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False)
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    if kind == "encoder" or begin:
        words.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]" if kind == "encoder" else "[CLS] $A",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    if kind == "encoder":
        special |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def base(kind, **more):
    """Make a random model of three layers. The same arguments give the same weights."""
    model = small_model(KINDS.get(kind, kind), **{
        "vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 3,
        "max_position_embeddings": POSITIONS, **more}).eval()
    if kind == "encoder":  # its random FFNs and norms would drown the values
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "LayerNorm" in name:
                    p.fill_(("weight" in name) * (3.0 if "transform" in name else 1.0))
                elif "attention" not in name and ".layer." in name:
                    p.mul_(0.1)
    return model


def save_base(folder, kind, **more):
    base(kind, **more).save_pretrained(folder)
    word_tokenizer(kind).save_pretrained(folder)


def write_texts(folder):
    """Write facts.txt, more.txt and ordinary.txt, of BLOCKS blocks."""
    Path(folder, "facts.txt").write_text("\n".join(FACTS) + "\n")
    Path(folder, "more.txt").write_text("\n".join(MORE_FACTS) + "\n")
    words = random.Random(0).choices(ORDINARY, k=BLOCKS * POSITIONS)
    Path(folder, "ordinary.txt").write_text(" ".join(words))
