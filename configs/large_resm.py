"""BERT large with residual memory (Table 1)."""
from configs.large import *  # all else is the same

memory_layers = (8, 16)  # of 24: our reading, the paper names layers for 12 and 6 only
alpha, beta = 1, 1
