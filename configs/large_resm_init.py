"""Residual memory added to large.py's trained model."""
from configs.base import *  # all else is the same

init_from = "out/large"
seed = 1  # not large.py's: another order of the text, other masks
model = "large"
batch_size = 16
accumulation = 64  # 16 x 64 = 1,024 sequences a step
memory_layers = (8, 16)  # of 24: our reading, the paper names layers for 12 and 6 only
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x))
