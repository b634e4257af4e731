"""A small BERT on the docstrings of Python, torch and numpy: minutes on two cores, no network."""
dataset = "docs"  # made on the spot if it is missing
model = "demo"  # 4 layers of width 64
dropout = 0.0
seq_len = 32  # with 64, one seed of five stayed on the plateau (results/demo.md)
batch_size = 64  # x 32 = 2,048 tokens a step
accumulation = 1
max_steps = 2000  # x 2,048 = 4.1 million tokens
warmup_steps = 100
lr = 4e-3
log_interval = 50
eval_interval = 400
usage_interval = 400
checkpoint_interval = 400

# the memory of the other demo configs; this one sets no memory_layers
n_keys = 64  # 64 x 64 = 4,096 slots x 64 = 0.26M values a layer
memory_heads = 4
topk = 8  # 4 x 8 = 32 slots read a token
key_dim = 64
value_lr = 4e-3
