"""A small causal language model on the docstrings: predicts the next token, not a masked one."""
from configs.demo import *  # all else is the same

objective = "causal"
max_steps = 1000  # x 2,048 = 2.0 million tokens
eval_interval = 200
eval_sequences = 512  # x 64 = 32,768 tokens
usage_interval = 500
