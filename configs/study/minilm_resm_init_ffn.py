"""ResM': minilm_resm_init.py with the FFNs beside the memories drawn anew."""
from configs.study.minilm_resm_init import *  # all else is the same

reinit_ffn = True
