"""BERT base with PKM in place of two FFNs, from scratch: model (c) of Table 2."""
from configs.base import *  # all else is the same

memory_layers = (4, 8)  # of 12, counted from 1 (section 5.1)
alpha, beta = 0, 1  # x' = LN(x + PKM(x))
