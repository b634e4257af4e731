"""Six layers of BERT base's width: the shape of DistilBERT, here trained without a teacher."""
from configs.base import *  # all else is the same

model = "distil"
batch_size = 64
accumulation = 32  # 64 x 32 = 2,048 sequences a step (footnote 5)
