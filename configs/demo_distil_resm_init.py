"""Residual memory added to demo_distil.py's trained model."""
from configs.demo_resm_init import *  # all else is the same

init_from = "out/demo_distil"
n_layer = 2  # as demo_distil.py
memory_layers = (1,)  # of 2, counted from 1
