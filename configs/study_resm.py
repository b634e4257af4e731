"""Residual memory beside two FFNs, from scratch: (d) of Table 2."""
from configs.study import *  # all else is the same

memory_layers = (2, 3)  # of 4, counted from 1
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x))
