"""BERT base without memory: model (a) of Table 2. The Init systems start from it."""
model = "base"
dataset = "wikibooks"  # Wikipedia + BookCorpus, 17 GB in the paper; uncased
seq_len = 512  # our reading
batch_size = 32  # sequences at a time on the device; the product counts:
accumulation = 32  # 32 x 32 = 1,024 sequences a step = 524,288 tokens (section 5.2)
max_steps = 500_000  # x 524,288 = 262 billion tokens
warmup_steps = 10_000  # then linear decay to 0, as Devlin et al.
lr = 1e-4
weight_decay = 0.01  # as Devlin et al.
usage_interval = 100_000  # Figure 2, counted on 1,024 held-out sequences

# the memory of the other base configs (section 5.1); this one sets no memory_layers
n_keys = 512  # 512 x 512 = 262,144 slots x 768 = 201M values a layer
memory_heads = 4
topk = 32  # 4 x 32 = 128 slots read a token
key_dim = 256
value_lr = 1e-3  # for the values, which are updated sparsely; constant
