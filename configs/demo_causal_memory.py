"""demo_causal.py and a residual memory in its third layer, from scratch."""
from configs.demo_causal import *  # all else is the same

memory_layers = (3,)  # of 4, counted from 1
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x)), section 4.2 of Kim & Jung
