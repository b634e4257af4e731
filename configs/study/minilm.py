"""MiniLM, an encoder trained for sentence similarity, learns to predict masked words.

$ python prepare_data.py weights sentence-transformers/all-MiniLM-L6-v2
$ python prepare_data.py text natural_bert wikipedia.txt novels.txt --vocab bert-base-uncased
"""
init_from = "sentence-transformers/all-MiniLM-L6-v2"  # without masked-LM head: a new one is trained
dataset = "natural_bert"
model = "distil"  # six layers, made narrower by the next three lines
d_model = 384
n_head = 12
d_ff = 1536
dropout = 0.0
seq_len = 64
batch_size = 16  # x 64 = 1,024 tokens a step
accumulation = 1
max_steps = 2000  # x 1,024 = 2 million tokens
warmup_steps = 100
lr = 3e-4
dtype = "bfloat16"  # on a CPU with AMX 1.7 times as fast as float32; other CPUs: --dtype=auto
log_interval = 50
eval_interval = 250
eval_sequences = 256
usage_interval = 250
checkpoint_interval = 250
keep_checkpoints = 1

# the memory of the other minilm configs
n_keys = 128  # 128 x 128 = 16,384 slots x 384 = 6.3M values a layer
memory_heads = 4
topk = 16  # 4 x 16 = 64 slots read a token
key_dim = 128
value_lr = 1e-3
