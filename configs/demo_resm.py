"""Residual memory beside two FFNs, from scratch."""
from configs.demo import *  # all else is the same

memory_layers = (2, 3)  # of 4, counted from 1
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x))
