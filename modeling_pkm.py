"""
BERT with product-key memory, in transformers: export.py writes this file beside the weights.

>>> model = AutoModelForMaskedLM.from_pretrained(FOLDER, trust_remote_code=True)
>>> dense = torch.optim.AdamW(model.parameters(), lr=1e-4)   # skips the values: they have no .grad
>>> values = model.value_optimizer(lr=1e-3)                  # the rows that were read
"""
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
)

from add_memory import add_memory
from pkm import LazyAdam


class PKMBertConfig(BertConfig):
    """BERT's, with memory_layers, alpha, beta, n_keys, memory_heads, topk and key_dim."""
    model_type = "pkm-bert"


class WithMemory:
    """What each class below has before BERT's own."""
    config_class = PKMBertConfig

    def __init__(self, config):
        # config.json names no activation that BERT has, so that BERT's own classes refuse weights
        # that they would load without the memory
        named, config.hidden_act = config.hidden_act, "gelu"
        super().__init__(config)
        config.hidden_act = named
        self.tables = add_memory(self, config.memory_layers, config.alpha, config.beta,
                                 config.n_keys, config.memory_heads, config.topk, config.key_dim)

    def value_optimizer(self, lr=1e-3):
        """The optimizer of the memories' values; all else has .grad, for any other optimizer."""
        return LazyAdam(self.tables.values(), lr=lr)


class PKMBertForMaskedLM(WithMemory, BertForMaskedLM):
    pass


class PKMBertForSequenceClassification(WithMemory, BertForSequenceClassification):
    pass


class PKMBertForQuestionAnswering(WithMemory, BertForQuestionAnswering):
    pass
