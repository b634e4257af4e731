"""
Write a trained model as a folder that transformers' from_pretrained loads.

$ python -m for_transformers.export out/demo my_folder        # a run, or one of its checkpoints
$ python -m for_transformers.export out/demo_docs my_folder   # the best epoch of the first seed

A model with memory brings its code along: AutoModelForMaskedLM.from_pretrained("my_folder",
trust_remote_code=True) loads it. Fine-tuned models load by the class that the model card names.
"""
import contextlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import processors

from for_transformers.folder import AUTOS, code_files
from lib.errors import UserError, need, run_main
from lib.figures import markdown
from lib.files import atomic, check_new_folder
from lib.huggingface import ARCHITECTURES, MEMORY_ACT, SETTINGS, to_huggingface
from lib.run import Run
from lib.settings import Parser
from lib.tokenizer import full_tokenizer, read_vocab, special_tokens
from lib.usage import describe_evaluation
from lib.weights import find_weights, pooler_is_trained, read_weights


def export(path, folder):
    """Write the model of `path` (see find_weights) as a folder for transformers. The folder has the
    weights, the tokenizer and a model card; a model with memory adds its code. A pooler that was
    never trained is left out, and whoever fine-tunes from the folder draws a new one. UserError if
    the folder exists, or if transformers has no such model."""
    to_bytes = need("safetensors.torch", "export").save
    check_new_folder(folder)
    source, vocab_file = find_weights(path)
    saved, vocab = read_weights(source), read_vocab(vocab_file)
    config, head = saved["config"], saved.get("head")
    if len(vocab) != config.vocab_size:
        raise UserError(f"{vocab_file}: {len(vocab):,} tokens, the weights have "
                        f"{config.vocab_size:,}")
    has_memory = bool(config.memory_layers) and (config.alpha, config.beta) != (1, 0)
    if config.causal and has_memory:
        raise UserError(f"{path} is a causal language model with memory: transformers has none")
    if not config.type_vocab:  # BERT has two token types: vectors of 0 have no effect
        config.type_vocab = 2
        saved["weights"]["bert.token_types.weight"] = torch.zeros(2, config.d_model)
    if not pooler_is_trained(source, saved):
        saved["weights"] = {name: w for name, w in saved["weights"].items() if "pooler" not in name}
    weights = to_huggingface(saved["weights"], head)
    settings = their_settings(config, head, saved.get("labels"), vocab, has_memory)
    tokenizer, tokenizer_settings = their_tokenizer(vocab_file, vocab, config)
    texts = {"config.json": json.dumps(settings, indent=1),
             "tokenizer_config.json": json.dumps(tokenizer_settings, indent=1),
             "tokenizer.json": tokenizer.to_str(pretty=True),
             "vocab.txt": "\n".join(vocab) + "\n",
             "README.md": card(source, Path(folder).name, config, saved, has_memory),
             **(code_files() if has_memory else {})}
    with atomic(folder) as temporary:
        temporary.mkdir()
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        (temporary / "model.safetensors").write_bytes(to_bytes(weights, {"format": "pt"}))
    print(f"{folder}: weights of {source}, {settings['architectures'][0]}, {len(weights)} tensors")


def their_settings(config, head, labels, vocab, has_memory):
    """Return the content of config.json."""
    architecture = "BertLMHeadModel" if config.causal else ARCHITECTURES[head]
    kind = "pkm-bert" if has_memory else "bert"
    settings = {theirs: getattr(config, ours) for ours, theirs in SETTINGS[kind].items()}
    settings |= {"model_type": kind, "architectures": [architecture], "hidden_act": "gelu",
                 "layer_norm_eps": 1e-12, "attention_probs_dropout_prob": config.dropout,
                 "dtype": "float32", "is_decoder": config.causal,
                 "pad_token_id": vocab.index(special_tokens(vocab).pad)}
    if has_memory:
        tasks = [auto.removeprefix("AutoModel") for auto in AUTOS if auto != "AutoModelForCausalLM"]
        autos = {f"AutoModel{task}": f"modeling_pkm.Bert{task or 'Model'}" for task in tasks}
        settings |= {"hidden_act": MEMORY_ACT,
                     "auto_map": {"AutoConfig": "modeling_pkm.PKMBertConfig", **autos}}
    if head == "classifier":
        names = labels or ["LABEL_0"]
        settings |= {"id2label": dict(enumerate(names)),
                     "label2id": {name: n for n, name in enumerate(names)}}
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
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_len,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        **{f"{use}_token": token for use, token in specials._asdict().items()}}


def card(source, name, config, saved, has_memory):
    """Write the model card, in Markdown, with settings and results of the checkpoint's run."""
    head, run, training = saved.get("head"), Run(source.parent), ""
    if (source / "model.pt").is_file() and run.settings():
        settings = [[key, f"`{value}`"] for key, value in run.settings().items()]
        training = f"## training\n\n{markdown(['setting', 'value'], settings)}\n"
        lines = "".join(f"- {line}\n" for line in measured(run, source, head))
        training += f"## measured\n\n{lines}\n"
    task = "CausalLM" if config.causal else ARCHITECTURES[head].removeprefix("BertFor")
    return CARD.format(name=name, auto=f"AutoModelFor{task}", training=training,
                       code=", trust_remote_code=True" if has_memory else "",
                       memory=MEMORY.format(**asdict(config)) if has_memory else "",
                       **asdict(config))


def measured(run, checkpoint, head):
    """Return the results of a checkpoint as lines: a task's metrics, or its last evaluation."""
    if head:
        metrics = run.results() or {}
        prefix = "eval_" if checkpoint.name == "best" else "last_"  # best epoch's, last epoch's
        return [f"{name.removeprefix(prefix)} {value:.5g}, on the dev split"
                for name, value in metrics.items()
                if name.startswith(prefix) and name != f"{prefix}epoch"]
    last = None
    with contextlib.suppress(UserError):  # a copy of a run without its log or its state
        last = run.evaluations(checkpoint)[-1]
    return [f"step {last['step']:,}, held-out text", *describe_evaluation(last)] if last else []


CARD = """---
library_name: transformers
---
# {name}

BERT with {n_layer} layers of width {d_model}.{memory}

## use

```python
from transformers import AutoTokenizer, {auto}

tokenizer = AutoTokenizer.from_pretrained("{name}"{code})
model = {auto}.from_pretrained("{name}"{code})
```

{training}## licence

The code is under the MIT licence. The owner of the weights decides about theirs: the texts and
weights that they were made from have their own licences.
"""
MEMORY = """ Layers {memory_layers},
counted from 1, have a product-key memory of {n_keys} x {n_keys} slots, {memory_heads} heads and
top-{topk} ([Kim & Jung, 2020](https://aclanthology.org/2020.findings-emnlp.362/)):
x' = LN(x + {alpha:g} FFN(x) + {beta:g} PKM(x)). `modeling_pkm.py` shows how to train it further."""


def main(argv=None):
    parser = Parser(description=__doc__)
    parser.add_argument("path", help="out/<run>, one of its seeds or checkpoints")
    parser.add_argument("folder", help="the new folder")
    export(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    run_main(main)
