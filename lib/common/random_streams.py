"""
Keep the random numbers of one seed apart by their use: np.random.default_rng([seed, ORDER, epoch]).
"""
ORDER = 1  # the order of the training data; the key goes on with the epoch
MASKS = 2  # which tokens are masked; the key goes on with the step and the micro-batch
DROPOUT = 3  # which activations are dropped; the key goes on with the step and the micro-batch
