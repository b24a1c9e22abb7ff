"""The memory of a rank for its units, and the state of each in its home: weights, moments and gradients, their update,
their capture for checkpoints. What moves between homes, window and other ranks when is in `engine`."""
