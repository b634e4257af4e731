"""demo_causal.py with a memory in place of an FFN, as Lample et al. (2019) have it."""
from configs.demo import *  # all else is the same

objective = "causal"
max_steps = 800  # x 2,048 = 1.6 million tokens
eval_interval = 200
memory_layers = (3,)  # of 4, counted from 1
alpha, beta = 0, 1  # x' = LN(x + PKM(x))
