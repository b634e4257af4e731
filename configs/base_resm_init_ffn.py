"""ResM' of Figure 3: base_resm_init.py, whose FFNs beside the memories are new."""
from configs.base_resm_init import *  # all else is the same

reinit_ffn = True
