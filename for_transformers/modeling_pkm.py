"""
Classes of transformers with product-key memory, which an exported folder has beside its weights.

>>> model = AutoModelForMaskedLM.from_pretrained(FOLDER, trust_remote_code=True)
>>> sparse = model.value_optimizer(lr=1e-3)                  # updates the rows that were read
>>> dense = torch.optim.AdamW(model.parameters(), lr=1e-4)   # skips the values: they have no .grad
"""
import inspect

import transformers

from for_transformers.add_memory import add_memory
from pkm import PKM, LazyAdam


class PKMBertConfig(transformers.BertConfig):
    model_type = "pkm-bert"


class WithMemory:
    """Adds the memories that the config describes to a class of transformers."""

    config_class = PKMBertConfig

    def __init__(self, config, *args, **kwargs):
        refused = config.hidden_act  # BERT's own classes cannot load a model with this activation
        config.hidden_act = "gelu"
        super().__init__(config, *args, **kwargs)
        config.hidden_act = refused
        names = inspect.signature(PKM).parameters.keys() - {"d_model", "heads"}
        sizes = {name: getattr(config, name) for name in names}
        self.tables = add_memory(self, config.memory_layers, config.alpha, config.beta,
                                 heads=config.memory_heads, **sizes)

    def value_optimizer(self, lr=1e-3):
        return LazyAdam(self.tables.values(), lr=lr)


class BertModel(WithMemory, transformers.BertModel):
    pass


class BertForMaskedLM(WithMemory, transformers.BertForMaskedLM):
    pass


class BertForSequenceClassification(WithMemory, transformers.BertForSequenceClassification):
    pass


class BertForTokenClassification(WithMemory, transformers.BertForTokenClassification):
    pass


class BertForQuestionAnswering(WithMemory, transformers.BertForQuestionAnswering):
    pass
