"""PKM in place of two FFNs, from scratch, on short sequences; study_pkm.py continues."""
from configs.study.study_short import *  # all else is the same

memory_layers = (2, 3)  # of 4, counted from 1
alpha, beta = 0, 1  # x' = LN(x + PKM(x))
