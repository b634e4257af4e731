"""
Let save_pretrained write all that a model with memory needs: its settings and its code.

The folder loads by AutoModelFor...from_pretrained(folder, trust_remote_code=True). Classes without
memory refuse it. Needs torch only, and transformers in save_pretrained.
"""
import copy
import inspect
import re
from functools import partial
from pathlib import Path

from torch import nn

from pkm import PKM

CODE = ("pkm.py", "values.py", "add_memory.py", "folder.py", "modeling_pkm.py")
# Appended to the activation's name. Classes without memory have no such activation, and their
# error shows the name.
REFUSED = " (this model has a memory: AutoModelFor..., trust_remote_code=True)"
# {name: default} of a memory's sizes
SIZES = {name: parameter.default for name, parameter in inspect.signature(PKM).parameters.items()
         if name != "d_model"}
ACTIVATIONS = "hidden_act", "hidden_activation", "activation_function", "activation", "afn"
AUTOS = {"AutoModel": "MODEL_MAPPING", **{
    f"AutoModelFor{task}": f"MODEL_FOR_{name}_MAPPING" for task, name in {
        "MaskedLM": "MASKED_LM", "CausalLM": "CAUSAL_LM", "QuestionAnswering": "QUESTION_ANSWERING",
        "SequenceClassification": "SEQUENCE_CLASSIFICATION",
        "TokenClassification": "TOKEN_CLASSIFICATION", "MultipleChoice": "MULTIPLE_CHOICE",
        "NextSentencePrediction": "NEXT_SENTENCE_PREDICTION", "PreTraining": "PRETRAINING",
        }.items()}}


def save_with_code(model, layers, alpha, beta, sizes):
    """Write add_memory's arguments into model.config, and let save_pretrained add the code.
    A model that is not of transformers stays as it is."""
    if hasattr(model, "get_base_model"):  # PEFT's
        model = model.get_base_model()
    if hasattr(model, "save_pretrained"):
        model.config.product_key_memory = {"layers": list(layers), "alpha": alpha, "beta": beta,
                                           **SIZES, **sizes}
        model.save_pretrained = partial(save_pretrained, model)


def check_marks(model):
    """Raise a ValueError if save_pretrained could not mark the config of a model with memory."""
    if not hasattr(model, "save_pretrained"):
        return
    config = copy.deepcopy(model.config)
    try:
        text_config, name = activation(config)
        setattr(text_config, name, REFUSED)
    except Exception as error:  # classes differ in what they raise
        reason = str(error).partition("\n")[0] or "it names no activation"
        raise ValueError(f"{type(model).__name__}: its config could not tell of the memory: "
                         f"{reason}") from error


def save_pretrained(model, save_directory, *args, **kwargs):
    """Save a model of transformers with its memory's code. Classes without memory refuse it.
    Takes the arguments of the model's own save_pretrained, except push_to_hub."""
    import transformers

    if kwargs.get("push_to_hub"):
        raise ValueError("push_to_hub=True would leave out the memory's code: use "
                         "model.push_to_hub(NAME)")
    keep_query(model)
    folder, config = Path(save_directory), model.config
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in code_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    text_config, name = activation(config)
    plain, autos = getattr(text_config, name), getattr(config, "auto_map", None)
    mappings = {auto: getattr(transformers, mapping) for auto, mapping in AUTOS.items()}
    config.auto_map = autos or {
        auto: f"modeling_pkm.{classes[type(config)].__name__}"
        for auto, classes in mappings.items() if type(config) in classes}
    setattr(text_config, name, f"{plain}{REFUSED}")
    try:
        return type(model).save_pretrained(model, save_directory, *args, **kwargs)
    finally:
        setattr(text_config, name, plain)
        if autos:
            config.auto_map = autos
        else:
            del config.auto_map


def keep_query(model):
    """Tell the config of a quantized model which Linears are not: the memory's query is not."""
    quantization = getattr(model.config, "quantization_config", None)
    for name in ("llm_int8_skip_modules", "modules_to_not_convert"):
        if hasattr(quantization, name):
            setattr(quantization, name, [module for module, part in model.named_modules()
                                         if type(part) is nn.Linear])


def activation(config):
    """Find the FFN's activation in a config of transformers: the config that has it, its name."""
    text_config = config.get_text_config()
    return text_config, next(name for name in ACTIVATIONS if hasattr(text_config, name))


def code_files():
    """Read the files of CODE: {name: text}, with relative imports of each other."""
    here = Path(__file__).parent
    modules = "|".join(Path(name).stem for name in CODE)
    imports = re.compile(rf"^from (lib\.for_transformers\.)?({modules}) import", re.MULTILINE)
    files = {name: here / name for name in CODE}
    for name in CODE[:2]:  # in this repository they are at the root
        if not files[name].exists():
            files[name] = here.parents[1] / name
    return {name: imports.sub(r"from .\2 import", file.read_text(encoding="utf-8"))
            for name, file in files.items()}
