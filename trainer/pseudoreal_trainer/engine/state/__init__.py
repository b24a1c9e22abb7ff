"""The state of units, wherever its home is: weights, moments and gradients, their update, their capture for
checkpoints. The copies that passes work on are in `engine`."""
