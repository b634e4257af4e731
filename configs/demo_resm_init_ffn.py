"""ResM': demo_resm_init.py, whose FFNs beside the memories are new."""
from configs.demo import *  # all else is the same

init_from = "out/demo"
seed = 1  # not demo.py's: another order of the text, other masks
max_steps = 1200  # x 2,048 = 2.5 million tokens
lr = 3e-3  # with a new warm-up; high, as demo.py's model is far from done (results/demo.md)
eval_interval = 240
usage_interval = 240  # five snapshots, as in Figure 2
checkpoint_interval = 240
memory_layers = (2, 3)  # of 4, counted from 1
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x))
reinit_ffn = True  # of layers 2 and 3
