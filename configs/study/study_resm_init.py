"""Residual memory added to study.py's trained model: (f) of Table 2."""
from configs.study.study_more import *  # all else is the same

memory_layers = (2, 3)  # of 4, counted from 1
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x))
