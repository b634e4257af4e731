"""Several processes under torchrun: they share the work on a model that knows only of one."""
