"""Residual memory added to demo.py's trained model: the paper's method, small."""
from configs.demo_more import *  # all else is the same

memory_layers = (2, 3)  # of 4, counted from 1
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x))
