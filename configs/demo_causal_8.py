"""demo_causal.py, twice as deep: the model that n layers and a memory are to beat."""
from configs.demo import *  # all else is the same

objective = "causal"
max_steps = 800  # x 2,048 = 1.6 million tokens
eval_interval = 200
n_layer = 8
