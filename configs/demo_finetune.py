"""Which package does a docstring come from? A task for the demo: minutes on two cores, no network.

The rates also suit a task of your own on the demo: --task=FOLDER, see docs/reproduce.md.
"""
task = "docs_task"  # made on the spot if it is missing
init_from = "out/demo"  # or --init_from=out/demo_resm_init, with memory
max_len = 32  # demo.py's seq_len; first paragraphs of docstrings have 22 tokens on average
epochs = 4
lr = 1e-3  # the model is 64 wide, not 768: much higher than Table 3's
value_lr = 4e-3  # as in demo.py
weight_decay = 0.01
log_interval = 200
