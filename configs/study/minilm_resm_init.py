"""Residual memory added to minilm.py's trained model."""
from configs.study.minilm_more import *  # all else is the same

memory_layers = (2, 4)  # of 6 (section 5.1)
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x))
