"""
Write a trained model as a folder that transformers' from_pretrained loads.

$ python -m for_transformers.export out/demo my_folder        # a run, or one of its checkpoints
$ python -m for_transformers.export out/demo_docs_task my_folder   # the median seed's best epoch

The model card names the class that loads it. A memory's code needs trust_remote_code=True.
"""
import inspect
import json
import re
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes
from tokenizers import processors

from lib.files import atomic
from lib.huggingface import ARCHITECTURES, MEMORY_ACT, PRETRAINED, SETTINGS, to_huggingface
from lib.run import Run, read_state
from lib.settings import ROOT, Parser, UserError, run_main
from lib.tokenizer import full_tokenizer, load_tokenizer, special_tokens, tokens_by_id
from lib.weights import find_weights, read_weights, run_settings
from model import BertConfig
from pkm import PKM

CODE = "pkm.py", "for_transformers/add_memory.py", "for_transformers/modeling_pkm.py"
USED = {*SETTINGS["bert"], "memory_layers", "alpha", "beta", "memory_heads",
        *inspect.signature(PKM).parameters}  # settings that CODE and transformers' BERT know
TASKS = {"MaskedLM": "fill-mask", "SequenceClassification": "text-classification",
         "TokenClassification": "token-classification", "QuestionAnswering": "question-answering"}


def export(path, folder):
    """Write the model of `path` (see find_weights) as a new folder for transformers.

    A model with memory adds its code. A pooler that was never trained is left out.
    """
    if Path(folder).exists():
        raise UserError(f"{folder} exists already: name a new folder")
    source, vocab_file = find_weights(path)
    saved, vocab = read_weights(source), tokens_by_id(load_tokenizer(vocab_file))
    config, head, weights = saved["config"], saved.get("head"), saved["weights"]
    has_memory = bool(config.memory_layers and config.beta)
    if config.causal and has_memory:
        raise UserError(f"{path} is a causal language model with memory: transformers has none")
    if config.memory_layers and not has_memory and config.alpha != 1:
        raise UserError(f"{path} has alpha = {config.alpha} and no memory: transformers has none")
    for name, default in asdict(BertConfig()).items():
        if name not in USED and getattr(config, name) != default:
            raise UserError(f"{path}: {name} = {getattr(config, name)!r} would be lost: teach "
                            "for_transformers/modeling_pkm.py, and add it to USED in export.py")
    if not config.type_vocab:  # BERT has two token types: vectors of 0 have no effect
        config.type_vocab = 2
        weights["bert.token_types.weight"] = torch.zeros(2, config.d_model)
    if head != "classifier" and not run_settings(source).get("pooler_trained"):
        weights = {name: w for name, w in weights.items() if "pooler" not in name}
    weights = to_huggingface(weights, head)
    settings = their_settings(config, head, saved.get("labels"), vocab, has_memory)
    tokenizer, of_tokenizer = their_tokenizer(vocab_file, vocab, config)
    texts = {
        "config.json": json.dumps(settings, indent=1),
        "tokenizer_config.json": json.dumps(of_tokenizer, indent=1),
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "vocab.txt": "\n".join(vocab) + "\n",
        "README.md": card(source, Path(folder).name, config, head, has_memory),
    }
    if has_memory:  # its files import each other from the same folder
        imports = re.compile(r"^from (for_transformers\.)?(pkm|add_memory) import", re.MULTILINE)
        for file in CODE:
            texts[Path(file).name] = imports.sub(r"from .\2 import", (ROOT / file).read_text())
    with atomic(folder) as temporary:
        temporary.mkdir()
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        (temporary / "model.safetensors").write_bytes(to_bytes(weights, {"format": "pt"}))
    print(f"{folder}: weights of {source}, {settings['architectures'][0]}, {len(weights)} tensors")


def their_settings(config, head, labels, vocab, has_memory):
    """Return the content of config.json."""
    kind = "pkm-bert" if has_memory else "bert"
    settings = {theirs: getattr(config, ours) for ours, theirs in SETTINGS[kind].items()}
    settings |= {
        "model_type": kind,
        "architectures": ["BertLMHeadModel" if config.causal else ARCHITECTURES[head]],
        "hidden_act": MEMORY_ACT if has_memory else "gelu",
        "layer_norm_eps": 1e-12,
        "attention_probs_dropout_prob": config.dropout,
        "dtype": "float32",
        "pad_token_id": vocab.index(special_tokens(vocab).pad),
    }
    if has_memory:
        autos = {f"AutoModelFor{task}": f"modeling_pkm.BertFor{task}" for task in TASKS}
        settings["auto_map"] = {"AutoConfig": "modeling_pkm.PKMBertConfig",
                                "AutoModel": "modeling_pkm.BertModel", **autos}
    if head == "classifier":
        names = labels or ["LABEL_0"]
        settings["id2label"] = dict(enumerate(names))
        settings["label2id"] = {name: n for n, name in enumerate(names)}
    return settings


def their_tokenizer(vocab_file, vocab, config):
    """Return the tokenizer as transformers needs it, and the content of tokenizer_config.json."""
    specials = special_tokens(vocab)
    tokenizer = full_tokenizer(vocab_file)
    tokenizer.no_padding()  # transformers pads by itself
    if config.causal:  # no [CLS]: a document begins after [SEP]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{specials.sep} $A",
            special_tokens=[(specials.sep, vocab.index(specials.sep))])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_len,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        **{f"{use}_token": token for use, token in specials._asdict().items()},
    }
    return tokenizer, settings


def card(source, name, config, head, has_memory):
    """Write the model card, in Markdown, with settings and results of the checkpoint's run."""
    task = "CausalLM" if config.causal else ARCHITECTURES[head].removeprefix("BertFor")
    run = Run(source.parent)
    records = [record for record in run.records() if record["kind"] in ("eval", "dev")]
    if (source / "state.pt").is_file():
        step = read_state(source)["step"]
    else:  # the best epoch of fine-tuning
        results = run.results() or read_state(run.newest_checkpoint())["results"]
        step = next(r["step"] for r in records if r.get("epoch") == results["eval_epoch"])
    measured = [record for record in records if record["step"] <= step][-1:]
    told = json.dumps({"step": step, "measured": measured, "settings": run.settings()}, indent=1)
    told = re.sub(r'"[^"\n]*/([^"/\n]+)/*"', r'"\1"', told)  # paths are of this machine
    return CARD.format(
        name=name, config=config, told=told, auto=f"AutoModelFor{task}", base=base_model(run),
        pipeline=TASKS.get(task, "text-generation"),
        memory=MEMORY.format(config=config) if has_memory else "",
        code=", trust_remote_code=True" if has_memory else "")


def base_model(run):
    """Write the line of the weights on the hub that a run began from, also through others."""
    start = Path(run.settings().get("init_checkpoint", ""))
    if (start / "model.pt").is_file():
        return base_model(Run(start.parent))
    return f"base_model: {PRETRAINED[start.name]}\n" if start.name in PRETRAINED else ""


CARD = """---
library_name: transformers
pipeline_tag: {pipeline}
tags: [bert, product-key-memory]
license: unknown  # fill in one of https://huggingface.co/docs/hub/repositories-licenses
{base}---
# {name}

BERT with {config.n_layer} layers of width {config.d_model}.{memory}

## use

```python
from transformers import AutoTokenizer, {auto}

name = "YOU/{name}"  # on the hub, after `hf upload YOU/{name} FOLDER`; or the folder's path
tokenizer = AutoTokenizer.from_pretrained(name{code})
model = {auto}.from_pretrained(name{code})
```

## training

The weights are those after `step` steps of this run. What was measured has a step of its own.

```
{told}
```

The code is under the MIT licence. The texts and weights that these were made from have their own.
"""
MEMORY = """ Layers {config.memory_layers}, counted from 1, have a product-key memory of
{config.n_keys} x {config.n_keys} slots, {config.memory_heads} heads and top-{config.topk}
([Kim & Jung, 2020](https://aclanthology.org/2020.findings-emnlp.362/)):
x' = LN(x + {config.alpha:g} FFN(x) + {config.beta:g} PKM(x)). `modeling_pkm.py` trains it."""


def main(argv=None):
    parser = Parser(description=__doc__)
    parser.add_argument("path", help="out/<run>, one of its seeds or checkpoints")
    parser.add_argument("folder", help="the new folder")
    export(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    run_main(main)
