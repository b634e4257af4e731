"""demo.py, twice as deep: stands for BERT large in the demo's tables."""
from configs.demo import *  # all else is the same

n_layer = 8
max_steps = 1000  # x 2,048 = 2.0 million tokens: half of demo.py's, in about its time
