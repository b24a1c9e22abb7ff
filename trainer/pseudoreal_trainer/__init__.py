"""Trains the phases of a PseudoRealJob with PyTorch, in the pods of a cluster or as local processes."""
