"""The model: blocks, attention, MLP, experts, the loss; its initial weights, and sampling from it.

The engine moves and shares its weights.
"""
