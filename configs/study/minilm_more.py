"""minilm.py's model, trained on for as long without memory."""
from configs.study.minilm import *  # all else is the same

init_from = "out/minilm"
seed = 1  # not minilm.py's: another order of the text, other masks
