"""The model: blocks, attention, MLP, experts, loss, initial weights and sampling.

The engine moves the weights and shares them between layers.
"""
