"""
Keep the random numbers of one seed apart by their use: np.random.default_rng([seed, ORDER, epoch]).
"""
ORDER = 1  # of the training data, by epoch
MASKS = 2  # by step and micro-batch
DROPOUT = 3  # by step and micro-batch
