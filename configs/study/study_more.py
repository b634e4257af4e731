"""study.py's model, trained on without memory: (b) of Table 2."""
from configs.study.study import *  # all else is the same

init_from = "out/study"
seed = 1  # not study.py's: another order of the text, other masks
lr = 5e-4  # at study.py's 2e-3 these steps gain nothing: they first undo what it learned
max_steps = 3200  # x 2,048 = 6.6 million tokens, a fifth of what study.py read
