"""PKM put into a trained BERT base: model (e) of Table 2."""
from configs.base import *  # all else is the same

init_from = "out/base"  # with a new warm-up (our reading)
seed = 1  # not base.py's: another order of the text, other masks
memory_layers = (4, 8)  # of 12, counted from 1 (section 5.1)
alpha, beta = 0, 1  # x' = LN(x + PKM(x)): the FFNs of layers 4 and 8 are dropped
