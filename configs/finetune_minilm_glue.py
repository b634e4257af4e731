"""GLUE for the MiniLM systems of results/study.md: --task=RTE --init_from=out/minilm --seeds=3."""
from configs.finetune_glue import *  # Table 3, but

lr = 1e-4  # narrower models like higher rates
epochs = 3
train_examples = 6000  # of SST-2's 67,349; RTE has 2,490
