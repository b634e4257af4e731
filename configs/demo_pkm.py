"""PKM in place of two FFNs, from scratch."""
from configs.demo import *  # all else is the same

memory_layers = (2, 3)  # of 4, counted from 1
alpha, beta = 0, 1  # x' = LN(x + PKM(x))
