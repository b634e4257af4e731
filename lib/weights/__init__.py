"""Weights on disk: checkpoints, and Hugging Face's names and folders."""
