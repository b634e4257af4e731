"""SQuAD for the MiniLM systems of results/study.md: --init_from=out/minilm --seeds=3."""
from configs.finetune_squad import *  # Table 3, but

lr = 1e-4
epochs = 1
train_examples = 6000  # windows, of some 88,000
