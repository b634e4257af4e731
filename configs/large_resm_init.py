"""Residual memory added to large.py's trained model."""
from configs.large_resm import *  # all else is the same

init_from = "out/large"
seed = 1  # not large.py's: another order of the text, other masks
