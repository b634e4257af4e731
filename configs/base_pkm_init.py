"""PKM put into a trained BERT base: model (e) of Table 2."""
from configs.base_500k_more import *  # all else is the same

memory_layers = (4, 8)
alpha, beta = 0, 1  # the FFNs of layers 4 and 8 are dropped
