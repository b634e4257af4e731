"""Residual memory added to a trained BERT base: model (f) of Table 2, the paper's best."""
from configs.base import *  # all else is the same

init_from = "out/base"  # with a new warm-up (our reading)
seed = 1  # not base.py's: another order of the text, other masks
memory_layers = (4, 8)  # of 12, counted from 1 (section 5.1)
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x)), section 4.2
