"""pilot.py's model, trained on without memory: a pilot of (b) of Table 2.

What to expect: a lower perplexity than pilot.py's. How much lower is unknown. If it first rises by
more than a few percent, take a lower rate, here and in pilot_resm_init.py.
"""
from configs.pilot import *  # all else is the same

init_from = "out/pilot"
seed = 1  # not pilot.py's: another order of the text, other masks
lr = 1e-4  # with a new warm-up; low enough not to undo what was learned; a guess
