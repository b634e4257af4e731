"""
Write a trained model as a folder that transformers' from_pretrained loads.

$ python -m lib.for_transformers.export out/demo my_folder               # a run, or one of its checkpoints
$ python -m lib.for_transformers.export out/demo_docs my_folder          # fine-tuned: the best epoch of its first seed

A model with memory brings its code along: AutoModelForMaskedLM.from_pretrained("my_folder",
trust_remote_code=True), or ...ForSequenceClassification, ...ForQuestionAnswering.
"""
import contextlib
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import processors

from lib.common.errors import ROOT, Failure, UserError, need, run_main
from lib.common.files import atomic, load_file, read_json
from lib.common.progress import markdown
from lib.common.settings import Parser
from lib.corpus.vocabulary import full_tokenizer, read_vocab, special_tokens
from lib.slot_usage.evaluation import describe_evaluation
from lib.training.run import read_evaluations, read_settings
from lib.weights.checkpoint import find_weights, pooler_is_trained, read_weights
from lib.weights.huggingface import ARCHITECTURES, MEMORY_ACT, SETTINGS, their_names
from model import BertConfig, build_model

CODE = ("pkm.py", "lib/for_transformers/add_memory.py", "lib/for_transformers/modeling_pkm.py")  # beside the weights of a model with memory
PIPELINES = {"MaskedLM": "fill-mask", "CausalLM": "text-generation",
             "SequenceClassification": "text-classification",
             "QuestionAnswering": "question-answering"}


def export(path, folder):
    """Write `path` (see find_weights) as a folder that transformers' from_pretrained loads:
    config.json, model.safetensors, vocab.txt, tokenizer.json, a model card README.md, and the code
    of a model with memory, which load_model reads too. A pooler that was never trained is left out:
    who fine-tunes from the folder draws a new one."""
    save_file = need("safetensors.torch", "export").save_file
    if Path(folder).exists():
        raise UserError(f"{folder} exists already")
    source, vocab_file = find_weights(path)
    saved, vocab = read_weights(source), read_vocab(vocab_file)
    config, head, labels = BertConfig(**saved["config"]), saved.get("head"), saved.get("labels")
    plain = not config.memory_layers or (config.alpha, config.beta) == (1, 0)
    if config.causal and not plain:
        raise UserError(f"{path} is a causal language model with memory: transformers has none")
    if not config.type_vocab:  # as good as none
        config.type_vocab = 2
        saved["weights"]["bert.token_types.weight"] = torch.zeros(2, config.d_model)
    if not pooler_is_trained(source, saved):
        saved["weights"] = {name: w for name, w in saved["weights"].items() if "pooler" not in name}
    weights = their_weights(saved["weights"], head)
    settings = their_settings(config, head, labels, vocab, plain)
    tokenizer, about = their_tokenizer(vocab_file, vocab, config)
    with atomic(folder) as temporary:
        temporary.mkdir()
        try:
            save_file(weights, temporary / "model.safetensors", {"format": "pt"})
        except Exception as error:  # noqa: BLE001 - safetensors has a type of its own
            raise Failure(f"{folder}: not saved ({error})") from None
        (temporary / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
        shutil.copymode(temporary / "vocab.txt", temporary / "model.safetensors")  # was 0600
        tokenizer.save(str(temporary / "tokenizer.json"))
        for name, content in (("config", settings), ("tokenizer_config", about)):
            (temporary / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        for name in () if plain else CODE:
            code = (ROOT / name).read_text(encoding="utf-8")
            code = re.sub(r"(?m)^from (?:lib\.\w+\.)?(pkm|add_memory) import", r"from .\1 import",
                          code)
            (temporary / Path(name).name).write_text(code, encoding="utf-8")
        (temporary / "README.md").write_text(card(source, Path(folder).name, config, saved, plain),
                                             encoding="utf-8")
    print(f"{folder}: weights of {source}, {settings['architectures'][0]}, {len(weights)} tensors")


def their_weights(ours, head):
    """A state dict of ours under Hugging Face's names."""
    weights = {}
    for name, w in ours.items():
        theirs = their_names(name, head)
        prefix = "bert." if name.startswith("bert.") else ""
        parts = [w] if len(theirs) == 1 else [part.clone() for part in w.chunk(len(theirs))]
        weights |= {prefix + n: part for n, part in zip(theirs, parts, strict=True)}
    return weights


def their_settings(config, head, labels, vocab, plain):
    """The content of config.json; plain: whether the model has no memory."""
    kind, architecture = ("bert" if plain else "pkm-bert"), ARCHITECTURES[head]
    settings = {theirs: getattr(config, ours) for ours, theirs in SETTINGS[kind].items()}
    settings |= {"model_type": kind, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
                 "attention_probs_dropout_prob": config.dropout, "dtype": "float32",
                 "architectures": [architecture],
                 "pad_token_id": vocab.index(special_tokens(vocab)[0])}
    if config.causal:
        settings |= {"is_decoder": True, "architectures": ["BertLMHeadModel"]}
    if not plain:
        settings |= {"architectures": [f"PKM{architecture}"], "hidden_act": MEMORY_ACT}
        settings["auto_map"] = {"AutoConfig": "modeling_pkm.PKMBertConfig"} | {
            each.replace("Bert", "AutoModel"): f"modeling_pkm.PKM{each}"
            for each in ARCHITECTURES.values()}
    if head == "classifier":
        names = labels or ["LABEL_0"]
        settings |= {"id2label": dict(enumerate(names)),
                     "label2id": {name: n for n, name in enumerate(names)}}
    return settings


def their_tokenizer(vocab_file, vocab, config):
    """The tokenizer, and the content of tokenizer_config.json."""
    pad, unk, cls, sep, mask = special_tokens(vocab)
    tokenizer = full_tokenizer(vocab_file)
    tokenizer.no_padding()  # transformers has settings of its own for it
    if config.causal:  # no [CLS]: a document begins after [SEP]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{sep} $A", special_tokens=[(sep, vocab.index(sep))])
    own = cls == "[CLS]" and not config.causal  # BertTokenizer puts [CLS] before a text
    return tokenizer, {
        "tokenizer_class": "BertTokenizer" if own else "PreTrainedTokenizerFast",
        "do_lower_case": "A" not in vocab, "model_max_length": config.max_len,
        "pad_token": pad, "unk_token": unk, "cls_token": cls, "sep_token": sep,
        "mask_token": mask}


def card(source, name, config, saved, plain):
    """The model card: what the model is, how it was trained and what was measured, as far as the
    run of the checkpoint `source` says it, licences, and how to cite. Markdown."""
    head, run_folder = saved.get("head"), source.parent
    with torch.device("meta"):  # for its sizes
        model = build_model(config, head, saved.get("labels", ()))
    size = sum(p.numel() for p in model.parameters())
    kind = "CausalLM" if config.causal else ARCHITECTURES[head].removeprefix("BertFor")
    text = CARD.format(
        name=name, task=PIPELINES[kind], auto=f"AutoModelFor{kind}",
        code="" if plain else ", trust_remote_code=True", size=size,
        memory="" if plain else MEMORY.format(**asdict(config)), **asdict(config))
    if (source / "model.pt").is_file() and (run_folder / "config.json").is_file():
        rows = [[key, f"`{value}`"] for key, value in read_settings(run_folder).items()]
        text += f"\n## training\n\n{markdown(['setting', 'value'], rows)}"
        text += f"\n## measured\n\n{measured(source, head)}"
    return text + RIGHTS


def measured(source, head):
    """What a run's folder says of a checkpoint: perplexity and memory usage at its last evaluation,
    or the metrics of a fine-tuned model. Markdown."""
    results = source.parent / "eval_results.json"
    if head and results.is_file():  # of the best epoch's model, and of the last one's
        prefix = "eval_" if source.name == "best" else "last_"
        rows = [[key.removeprefix(prefix), f"{value:.5g}"]
                for key, value in read_json(results).items() if key.startswith(prefix)]
        return "On the dev split:\n\n" + markdown(["metric", "value"], rows)
    evaluations = []
    if not head:
        with contextlib.suppress(UserError):  # a copy of a run without its log or its state
            step = load_file(source / "state.pt")["step"]
            step += read_settings(source.parent)["first_step"]
            evaluations = [e for e in read_evaluations(source.parent) if e["step"] <= step]
    if not evaluations:
        return "Nothing is known.\n"
    results = evaluations[-1]
    lines = "\n".join(f"- {line}" for line in describe_evaluation(results))
    return (f"On {results['masked_tokens']:,} predicted tokens of held-out text after "
            f"{results['step']:,} steps (MU: share of the slots that were read; top-1 MU: that "
            f"were a head's first choice):\n\n{lines}\n")


CARD = """---
library_name: transformers
pipeline_tag: {task}
---
# {name}

BERT of {n_layer} layers and width {d_model}: {size:,} parameters.{memory}

## use

```python
from transformers import AutoTokenizer, {auto}

tokenizer = AutoTokenizer.from_pretrained("{name}"{code})
model = {auto}.from_pretrained("{name}"{code})
```
"""
MEMORY = """ Layers {memory_layers},
counted from 1, have a product-key memory of {n_keys} x {n_keys} slots (Kim & Jung, 2020), of which
each of {memory_heads} heads reads {topk}: x' = LN(x + {alpha:g} FFN(x) + {beta:g} PKM(x)).
`modeling_pkm.py` is its code, and says how it is trained further; pkm-bert's own scripts take this
folder as `--init_from`."""
RIGHTS = """
## licence

The code is under the MIT licence. The weights are for their owner to license: the texts and the
weights that they were made from have licences of their own.

## cite

```bibtex
@inproceedings{kim-jung-2020-large,
    title = "Large Product Key Memory for Pretrained Language Models",
    author = "Kim, Gyuwan and Jung, Tae Hwan",
    booktitle = "Findings of the Association for Computational Linguistics: EMNLP 2020",
    year = "2020",
    url = "https://aclanthology.org/2020.findings-emnlp.362/",
    pages = "4060--4069",
}
```
"""


def main(argv=None):
    parser = Parser(description=__doc__)
    parser.add_argument("path", help="out/<run>, one of its seeds or checkpoints")
    parser.add_argument("folder", help="the new folder")
    args = parser.parse_args(argv)
    export(args.path, args.folder)


if __name__ == "__main__":
    run_main(main)
