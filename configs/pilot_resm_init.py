"""Residual memory added to pilot.py's trained model: a pilot of (f) of Table 2.

What to expect:
- At step 0 about pilot.py's perplexity: 1.01 times in results/study.md and 1.00 times with MiniLM.
- After 128 steps most slots have been some token's top-1. In results/study.md 98% were in the end.
- Whether it ends below pilot_more.py after 1,000 steps: unknown. In results/study.md it ended 1.3%
  below, in the paper 9 to 14% (500,000 steps).
"""
from configs.pilot_more import *  # all else is the same

memory_layers = (4, 8)  # of 12, counted from 1 (section 5.1)
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x)), section 4.2
keys_lr = 0.1  # slower sub-keys: more slots stayed in use (results/study.md)
