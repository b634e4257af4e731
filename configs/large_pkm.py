"""BERT large with PKM in place of two FFNs (Table 1)."""
from configs.large import *  # all else is the same

memory_layers = (8, 16)  # of 24, as in large_resm.py
alpha, beta = 0, 1
