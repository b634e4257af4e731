"""study.py's model, trained on without memory: (b) of Table 2."""
from configs.study import *  # all else is the same

init_from = "out/study"
seed = 1  # not study.py's: another order of the text, other masks
max_steps = 3200  # x 2,048 = 6.6 million tokens, a fifth of what study.py read
