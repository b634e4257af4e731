"""demo_causal.py with a memory in place of an FFN, as Lample et al. (2019) have it."""
from configs.demo_causal_memory import *  # all else is the same

alpha, beta = 0, 1  # x' = LN(x + PKM(x))
