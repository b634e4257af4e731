"""A pilot of base.py, first part: 4,000 steps on sequences of 128 tokens. pilot.py goes on from it.

The four pilot configs try the paper's comparison of (b) and (f) before a long run: BERT base, the
paper's text and memory, 1% of its tokens. On paper all four take about an hour on an A100 at 40% of
its peak; none has been run. As in Devlin et al., most steps are on short sequences.

$ python prepare_data.py wikibooks                # or --dataset=mine, prepared with BERT's vocabulary
$ python pretrain.py configs/pilot_short.py       # 4,000 steps
$ python pretrain.py configs/pilot.py             # 1,000 more on sequences of 512 tokens: (a)
$ python pretrain.py configs/pilot_more.py        # 1,000 more without memory: (b), the control
$ python pretrain.py configs/pilot_resm_init.py   # 1,000 more with a memory: (f)

What to expect:
- The loss starts at 10.3, which is ln(30,522), and the perplexity soon reaches the unigram
  perplexity that is printed at the start. When it leaves this plateau: unknown.
- Perplexities at the end: unknown. They will be far above the paper's.
"""
from configs.base import *  # all else is the same

seq_len = 128
batch_size = 128  # sequences at a time on the device
accumulation = 8  # 128 x 8 = 1,024 sequences of 128 = 131,072 tokens, Devlin et al.'s batch
max_steps = 4000  # x 131,072 = 524 million tokens
warmup_steps = 400
lr = 4e-4  # 4 x the paper's, as there are few steps; a guess
log_interval = 20
eval_interval = 250
usage_interval = 200  # five snapshots of 1,000 steps
checkpoint_interval = 500
keep_checkpoints = 1
