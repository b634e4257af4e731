"""BERT base with residual memory, from scratch: model (d) of Table 2."""
from configs.base import *  # all else is the same

memory_layers = (4, 8)  # of 12, counted from 1 (section 5.1)
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x))
