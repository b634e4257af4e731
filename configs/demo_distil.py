"""demo.py, half as deep: stands for DistilBERT in the demo's tables, without a teacher."""
from configs.demo import *  # all else is the same

n_layer = 2
