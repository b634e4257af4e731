"""demo_causal.py, twice as deep: the model that n layers and a memory are to beat."""
from configs.demo_causal import *  # all else is the same

n_layer = 8
