"""BERT large with PKM in place of two FFNs (Table 1)."""
from configs.base import *  # all else is the same

model = "large"
batch_size = 16
accumulation = 64  # 16 x 64 = 1,024 sequences a step
memory_layers = (8, 16)  # of 24: our reading, the paper names layers for 12 and 6 only
alpha, beta = 0, 1  # x' = LN(x + PKM(x))
