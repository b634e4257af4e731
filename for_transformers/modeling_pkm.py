"""
Classes of transformers with product-key memory, which a folder has beside its weights.

>>> model = AutoModelForMaskedLM.from_pretrained(FOLDER, trust_remote_code=True)
>>> dense = torch.optim.AdamW(model.parameters(), lr=1e-4)   # skips the values: they have no .grad
>>> values = model.value_optimizer(lr=1e-3)                  # updates the rows that were read

Each class of transformers is here under its own name, with the memory that the config describes.
"""
from functools import cache

import transformers

from for_transformers.add_memory import add_memory, find_layers
from for_transformers.folder import REFUSED, SIZES, activation
from values import LazyAdam


class PKMBertConfig(transformers.BertConfig):
    """The config of an exported run, whose memory has this project's names."""

    model_type = "pkm-bert"


class WithMemory:
    """Adds the memory after the model without it was made."""

    def __init__(self, config, *args, **kwargs):
        text_config, name = activation(config)
        setattr(text_config, name, getattr(text_config, name).removesuffix(REFUSED))
        super().__init__(config, *args, **kwargs)
        self.tables = add_memory(self, **memory_settings(config))
        if n_rows := getattr(config, "n_rows", 0):  # a pruned run
            layers = find_layers(self)
            for n in self.tables:
                layers[n - 1].memory.share_rows(n_rows)
                self.tables[n] = layers[n - 1].memory.values

    @classmethod
    def is_custom_code(cls):
        """Let transformers rename weights as it does for its own class."""
        return False

    def value_optimizer(self, lr=1e-3):
        return LazyAdam(self.tables.values(), lr=lr)


def memory_settings(config):
    """Return add_memory's arguments."""
    if not isinstance(config, PKMBertConfig):
        return config.product_key_memory
    theirs = {"layers": "memory_layers", "heads": "memory_heads"}
    return {name: getattr(config, theirs.get(name, name))
            for name in ("layers", "alpha", "beta", *SIZES)}


@cache
def __getattr__(name):
    """Make a class with memory of transformers' class. It keeps its name, by which transformers
    decides how to rename weights."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__} has no {name}")
    plain = getattr(transformers, name)
    attributes = {"__module__": __name__}  # where transformers looks for the code to be saved
    if plain.config_class is transformers.BertConfig:
        attributes["config_class"] = PKMBertConfig
    return type(name, (WithMemory, plain), attributes)
