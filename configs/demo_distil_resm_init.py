"""Residual memory added to demo_distil.py's trained model."""
from configs.demo import *  # all else is the same

init_from = "out/demo_distil"
seed = 1  # not demo_distil.py's: another order of the text, other masks
max_steps = 1200  # x 2,048 = 2.5 million tokens
lr = 3e-3  # with a new warm-up; high, as demo_distil.py's model is far from done (results/demo.md)
eval_interval = 240
usage_interval = 240  # five snapshots, as in Figure 2
checkpoint_interval = 240
n_layer = 2  # as demo_distil.py
memory_layers = (1,)  # of 2, counted from 1
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x))
