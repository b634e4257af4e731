"""A causal language model of 12 layers, compared with 24 and with a memory (Lample et al., 2019).

Their talk gives the layers, the kind of text (160 GB of news) and the result. The rest is our
reading: width, heads and positions are those of BERT large; text, vocabulary, batch, steps and
learning rate are those of configs/base.py.
"""
objective = "causal"  # next token, at every position
model = "large"  # width 1,024, 16 heads
n_layer = 12
batch_size = 8  # logits at 8 x 512 positions x 30,522 words: 0.5 GB in fp32, and their gradient
accumulation = 128  # 8 x 128 = 1,024 sequences
