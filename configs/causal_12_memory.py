"""causal_12.py with a residual memory in the middle; the talk names neither number nor place."""
from configs.causal_12 import *  # all else is the same

memory_layers = (6,)  # of 12, counted from 1: our reading; 512 x 512 slots, as in Kim & Jung
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x)), section 4.2 of Kim & Jung
