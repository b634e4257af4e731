"""BERT base, trained on for 500,000 steps: model (b) of Table 2."""
from configs.base import *  # all else is the same

init_from = "out/base"  # with a new warm-up, like the Init systems (our reading)
seed = 1  # not base.py's: another order of the text, other masks
