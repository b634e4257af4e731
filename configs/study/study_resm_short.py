"""Residual memory beside two FFNs, from scratch, on short sequences; study_resm.py continues."""
from configs.study.study_short import *  # all else is the same

memory_layers = (2, 3)  # of 4, counted from 1
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x))
