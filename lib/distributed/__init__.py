"""Several processes under torchrun, applied to a model from outside."""
