"""ResM' of Figure 3: base_resm_init.py, whose FFNs beside the memories are new."""
from configs.base import *  # all else is the same

init_from = "out/base"  # with a new warm-up (our reading)
seed = 1  # not base.py's: another order of the text, other masks
memory_layers = (4, 8)  # of 12, counted from 1 (section 5.1)
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x)), section 4.2
reinit_ffn = True  # of layers 4 and 8
