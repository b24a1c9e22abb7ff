"""A rank's memory for its units, and the state of each unit in its home: weights, moments, gradients, their update, and
their capture for checkpoints. `engine` decides when data moves between homes, window and other ranks."""
