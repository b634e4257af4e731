"""study_resm_short.py's model, trained on with sequences of 64 tokens: (d) of Table 2."""
from configs.study.study import *  # all else is the same

init_from = "out/study_resm_short"
max_steps = 3200  # the same number as in study_*_init.py
memory_layers = (2, 3)  # of 4, counted from 1
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x))
