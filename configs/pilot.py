"""pilot_short.py's model, trained on with sequences of 512 tokens: a pilot of (a) of Table 2."""
from configs.pilot_short import *  # all else is the same

init_from = "out/pilot_short"
seq_len = 512
batch_size = 32  # x 8 x 512 = 131,072 tokens a step
max_steps = 1000  # x 131,072 = 131 million tokens
warmup_steps = 100
lr = 2e-4  # below pilot_short.py's; a guess
