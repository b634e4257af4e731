"""Residual memory added to a trained BERT base: model (f) of Table 2, the paper's best."""
from configs.base_500k_more import *  # all else is the same

memory_layers = (4, 8)  # of 12, counted from 1 (section 5.1)
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x)), section 4.2
