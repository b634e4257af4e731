"""causal_12.py, twice as deep. The claim: 12 layers and a memory beat it in half the time."""
from configs.causal_12 import *  # all else is the same

n_layer = 24
