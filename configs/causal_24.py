"""causal_12.py twice as deep: what a memory is to beat, for half the running time."""
from configs.causal_12 import *  # all else is the same

n_layer = 24
