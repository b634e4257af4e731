"""The first 3,000 steps of the study's small BERT (results/study.md), on short sequences.

study.py continues on longer ones. Devlin et al. trained on 128 tokens before 512 in the same way.

$ python prepare_data.py text natural wikipedia.txt novels.txt --vocab_size 8192
"""
dataset = "natural"
model = "demo"  # 4 layers of width 64
n_head = 2
d_ff = 256  # 4 x width, as in BERT; the demo has half of that
dropout = 0.0
seq_len = 16  # with 64 from the start the loss stays on a plateau, see results/study.md
batch_size = 128  # x 16 = 2,048 tokens a step
accumulation = 1
max_steps = 3000  # x 2,048 = 6.1 million tokens
warmup_steps = 300
lr = 2e-3
log_interval = 50
eval_interval = 400
eval_sequences = 512
usage_interval = 320  # ten snapshots of 3,200 steps, for Figure 2
checkpoint_interval = 400
keep_checkpoints = 1

# the memory of the other study configs
n_keys = 128  # 128 x 128 = 16,384 slots x 64 = 1M values a layer
memory_heads = 4
topk = 8  # 4 x 8 = 32 slots read a token
key_dim = 64
value_lr = 4e-3
