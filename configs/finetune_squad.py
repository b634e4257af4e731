"""SQuAD 1.1 as in Table 3, median of 5 seeds: --init_from=out/base_resm_init --seeds=5."""
task = "squad"
lr = 5e-5
batch_size = 32  # windows x accumulation = 1; as for GLUE
epochs = 3  # the best of them by dev F1 counts (our reading)
warmup = 0.06  # of all steps, then linear decay to 0
weight_decay = 0.01
max_len = 384
doc_stride = 128  # from one window's beginning to the next one's, as in Devlin et al.
value_lr = 1e-3  # of the value tables, sparsely updated, as in pretraining
dropout = 0.1
