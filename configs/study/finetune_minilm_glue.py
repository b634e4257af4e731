"""GLUE for the MiniLM systems of results/study.md: --task=RTE --init_from=out/minilm --seeds=3."""
from configs.finetune_glue import *  # all else is Table 3's

lr = 1e-4  # not tuned
epochs = 3
train_examples = 3000  # of SST-2's 67,349; RTE has 2,490
dtype = "bfloat16"  # as minilm.py
