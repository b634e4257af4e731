"""A small causal language model on the docstrings: predicts the next token, not a masked one."""
from configs.demo import *  # all else is the same

objective = "causal"
max_steps = 800  # x 2,048 = 1.6 million tokens
eval_interval = 200
