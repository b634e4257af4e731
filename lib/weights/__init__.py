"""Weights on disk: the folder of a run, checkpoints, and Hugging Face's formats."""
