"""Residual memory added to DistilBERT: the system of Table 7.
$ python prepare_data.py weights distilbert-base-uncased
"""
from configs.base import *  # all else is the same; steps, rate and warm-up too (our reading)

init_from = "distilbert-base-uncased"  # or "out/distil", trained here without a teacher
model = "distil"
seed = 1  # not distil.py's: another order of the text, other masks
batch_size = 64
accumulation = 32  # 64 x 32 = 2,048 sequences a step (footnote 5), twice base's tokens
memory_layers = (2, 4)  # of 6 (section 5.1)
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x))
