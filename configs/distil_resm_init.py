"""Residual memory added to DistilBERT: the system of Table 7.
$ python prepare_data.py weights distilbert-base-uncased
"""
from configs.distil import *  # all else is the same; steps, rate and warm-up too

init_from = "distilbert-base-uncased"  # or "out/distil", trained here without a teacher
seed = 1  # not distil.py's: another order of the text, other masks
memory_layers = (2, 4)  # of 6 (section 5.1)
alpha, beta = 1, 1
