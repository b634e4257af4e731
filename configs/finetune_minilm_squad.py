"""SQuAD for the MiniLM systems of results/study.md: --init_from=out/minilm --seeds=3."""
from configs.finetune_squad import *  # all else is Table 3's

lr = 1e-4  # not tuned
epochs = 1
train_examples = 3000  # windows; there are 87,599 questions
