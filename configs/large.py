"""BERT large (Table 1), with the recipe of base.py; the paper has not pretrained it."""
from configs.base import *  # all else is the same

model = "large"
batch_size = 16
accumulation = 64  # 16 x 64 = 1,024 sequences a step
