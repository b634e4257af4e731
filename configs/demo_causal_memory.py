"""demo_causal.py and a residual memory in its third layer, from scratch."""
from configs.demo import *  # all else is the same

objective = "causal"
max_steps = 800  # x 2,048 = 1.6 million tokens
eval_interval = 200
memory_layers = (3,)  # of 4, counted from 1
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x)), section 4.2 of Kim & Jung
