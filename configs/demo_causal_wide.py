"""demo_causal.py with a wider FFN that takes the time of demo_causal_memory.py's memory."""
from configs.demo_causal import *  # all else is the same

d_ff = 384  # not 128, in all four layers
