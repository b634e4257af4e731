"""Residual memory added to a trained six-layer BERT: the system of Table 7 but for its initial
model, which is DistilBERT there."""
from configs.distil import *  # all else is the same

init_from = "out/distil"
seed = 1  # not distil.py's: another order of the text, other masks
memory_layers = (2, 4)  # of 6 (section 5.1)
alpha, beta = 1, 1
