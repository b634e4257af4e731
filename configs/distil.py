"""DistilBERT's shape without a teacher; Table 7's DistilBERT has the public, distilled weights."""
from configs.base import *  # all else is the same; steps, rate and warm-up too (our reading)

model = "distil"
batch_size = 64
accumulation = 32  # 64 x 32 = 2,048 sequences a step (footnote 5), twice base's tokens
