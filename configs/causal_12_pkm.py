"""causal_12.py with a memory in place of an FFN, as Lample et al. (2019) have it."""
from configs.causal_12 import *  # all else is the same

memory_layers = (6,)  # of 12, as in causal_12_memory.py
alpha, beta = 0, 1  # x' = LN(x + PKM(x))
