"""
BERT with product-key memory, for transformers. An exported folder has this file beside the weights.

>>> model = AutoModelForMaskedLM.from_pretrained(FOLDER, trust_remote_code=True)
>>> dense = torch.optim.AdamW(model.parameters(), lr=1e-4)   # skips the values: they have no .grad
>>> values = model.value_optimizer(lr=1e-3)                  # updates the rows that were read
"""
import transformers

from lib.for_transformers.add_memory import add_memory
from values import LazyAdam


class PKMBertConfig(transformers.BertConfig):
    model_type = "pkm-bert"


class WithMemory:
    config_class = PKMBertConfig

    def __init__(self, config):
        refused = config.hidden_act  # a name that makes BERT without memory refuse the folder
        config.hidden_act = "gelu"
        super().__init__(config)
        config.hidden_act = refused
        self.tables = add_memory(self, config.memory_layers, config.alpha, config.beta,
                                 n_keys=config.n_keys, heads=config.memory_heads,
                                 topk=config.topk, key_dim=config.key_dim,
                                 query_norm=config.query_norm)

    def value_optimizer(self, lr=1e-3):
        return LazyAdam(self.tables.values(), lr=lr)


class PKMBertForMaskedLM(WithMemory, transformers.BertForMaskedLM):
    pass


class PKMBertForSequenceClassification(WithMemory, transformers.BertForSequenceClassification):
    pass


class PKMBertForQuestionAnswering(WithMemory, transformers.BertForQuestionAnswering):
    pass
