"""SQuAD for the MiniLM systems of results/study.md: --init_from=out/minilm."""
from configs.finetune_squad import *  # all else is Table 3's

lr = 1e-4  # not tuned
batch_size = 8  # 375 steps
epochs = 1
train_examples = 3000  # windows; there are 87,599 questions
dtype = "bfloat16"  # as minilm.py
