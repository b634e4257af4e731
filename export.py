"""
Write a trained model as a folder that transformers' from_pretrained loads.

$ python export.py out/demo my_folder               # a run, or one of its checkpoints
$ python export.py out/demo_docs my_folder          # fine-tuned: the best epoch of its first seed
"""
import json
import shutil
from dataclasses import asdict
from pathlib import Path

from common import Failure, Parser, UserError, atomic, need, run  # before torch

# isort: split
import torch
from tokenizers import processors

from checkpoint import find_weights, read_weights
from data import load_tokenizer, read_vocab, special_tokens
from huggingface import ARCHITECTURES, SETTINGS, their_names
from model import BertConfig


def export(path, folder):
    """Write `path` (see find_weights) as a folder that transformers' from_pretrained loads:
    config.json, model.safetensors, vocab.txt, tokenizer.json. transformers has no memory: a model
    with one gets the same layout and a model_type of its own, which load_model reads."""
    save_file = need("safetensors.torch", "export").save_file
    if Path(folder).exists():
        raise UserError(f"{folder} exists already")
    source, vocab_file = find_weights(path)
    saved, vocab = read_weights(source), read_vocab(vocab_file)
    config, head, labels = BertConfig(**saved["config"]), saved.get("head"), saved.get("labels")
    plain = not config.memory_layers or (config.alpha, config.beta) == (1, 0)
    if config.causal and not plain:
        raise UserError(f"{path} is a causal language model with memory: transformers has none")
    if plain and not config.type_vocab:  # as good as none
        config.type_vocab = 2
        saved["weights"]["bert.token_types.weight"] = torch.zeros(2, config.d_model)
    weights = {}
    for name, w in saved["weights"].items():
        theirs = their_names(name, head)
        prefix = "bert." if name.startswith("bert.") else ""
        parts = [w] if len(theirs) == 1 else [part.clone() for part in w.chunk(len(theirs))]
        weights |= {prefix + n: part for n, part in zip(theirs, parts, strict=True)}
    pad, unk, cls, sep, mask = special_tokens(vocab)
    kind = "bert" if plain else "pkm-bert"
    settings = {theirs: getattr(config, ours) for ours, theirs in SETTINGS[kind].items()}
    settings |= {"model_type": kind, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
                 "attention_probs_dropout_prob": config.dropout, "dtype": "float32",
                 "architectures": [ARCHITECTURES[head]], "pad_token_id": vocab.index(pad)}
    if config.causal:
        settings |= {"is_decoder": True, "architectures": ["BertLMHeadModel"]}
    if not plain:
        settings["architectures"] = [f"PKM{ARCHITECTURES[head]}"]
    if head == "classifier":
        names = labels or ["LABEL_0"]
        settings |= {"id2label": dict(enumerate(names)),
                     "label2id": {name: n for n, name in enumerate(names)}}
    tokenizer = load_tokenizer(vocab_file)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, vocab.index(cls)), (sep, vocab.index(sep))])
    if config.causal:  # no [CLS]: a document begins after [SEP]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{sep} $A", special_tokens=[(sep, vocab.index(sep))])
    own = cls == "[CLS]" and not config.causal  # BertTokenizer puts [CLS] before a text
    about = {"tokenizer_class": "BertTokenizer" if own else "PreTrainedTokenizerFast",
             "do_lower_case": cls == "[CLS]", "model_max_length": config.max_len, "pad_token": pad,
             "unk_token": unk, "cls_token": cls, "sep_token": sep, "mask_token": mask}
    with atomic(folder) as temporary:
        temporary.mkdir()
        try:
            save_file(weights, temporary / "model.safetensors", {"format": "pt"})
        except Exception as error:  # noqa: BLE001 - safetensors has a type of its own
            raise Failure(f"{folder}: not saved ({error})") from None
        shutil.copyfile(vocab_file, temporary / "vocab.txt")
        shutil.copymode(temporary / "vocab.txt", temporary / "model.safetensors")  # was 0600
        tokenizer.save(str(temporary / "tokenizer.json"))
        for name, content in (("config", settings), ("tokenizer_config", about)):
            (temporary / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        if not plain:
            (temporary / "README.md").write_text(MEMORY_README.format(**asdict(config)))
    print(f"{folder}: weights of {source}, {settings['architectures'][0]}, {len(weights)} tensors")


MEMORY_README = """# BERT with product-key memory

Layers {memory_layers}, counted from 1, have a memory of {n_keys} x {n_keys} slots: alpha {alpha},
beta {beta}.
`transformers` does not know such layers. pkm-bert reads this folder:

```python
from checkpoint import load_model
bert = load_model("THIS_FOLDER").eval()
```

or `--init_from=THIS_FOLDER`. The tensors are named as Hugging Face's BERT names them; those of the
memory of layer 4 are under `bert.encoder.layer.3.memory.`
"""


def main(argv=None):
    parser = Parser(description=__doc__)
    parser.add_argument("path", help="out/<run>, one of its seeds or checkpoints")
    parser.add_argument("folder", help="the new folder")
    args = parser.parse_args(argv)
    export(args.path, args.folder)


if __name__ == "__main__":
    run(main)
