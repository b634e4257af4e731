"""study_resm_short.py's model, on sequences of 64 tokens: (d) of Table 2."""
from configs.study import *  # all else is the same

init_from = "out/study_resm_short"
max_steps = 3200  # as many as what starts from study.py
memory_layers = (2, 3)  # of 4, counted from 1
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x))
