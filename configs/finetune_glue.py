"""GLUE as in Table 3, median of 5 seeds: --task=MNLI --init_from=out/base_resm_init --seeds=5."""
task = "SST-2"  # or CoLA, MRPC, STS-B, QQP, MNLI, QNLI, RTE
lr = 2e-5
batch_size = 32  # x accumulation = 1; our reading: the column is empty in our copy of Table 3
epochs = 10  # the best on dev counts, as in RoBERTa; for MNLI on dev_matched (our reading)
warmup = 0.06  # of all steps, then linear decay to 0
weight_decay = 0.1
max_len = 128
value_lr = 1e-3  # of the value tables, sparsely updated, as in pretraining
dropout = 0.1
