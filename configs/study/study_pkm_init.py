"""PKM in place of two FFNs of study.py's trained model: (e) of Table 2."""
from configs.study.study_more import *  # all else is the same

memory_layers = (2, 3)  # of 4, counted from 1
alpha, beta = 0, 1  # x' = LN(x + PKM(x))
