"""The first part of a pilot of base.py: 4,000 steps on sequences of 128 tokens.

The four pilot configs try the paper's comparison of (b) and (f) before a long run. They have its
text, BERT base and its memory, and a thousandth of its tokens. As in Devlin et al., most steps are
on short sequences. On paper all four take 75 minutes on an A100 at 40% of its peak, and 25 on an
H100. None has been run.

$ python prepare_data.py wikibooks                # or --dataset=mine, with BERT's vocabulary
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
