"""study_short.py's model, trained on with sequences of 64 tokens: (a) of Table 2."""
from configs.study.study_short import *  # all else is the same

init_from = "out/study_short"
seq_len = 64
batch_size = 32  # x 64 = 2,048 tokens a step
max_steps = 16_000  # x 2,048 = 32.8 million tokens, nearly all of the corpus
