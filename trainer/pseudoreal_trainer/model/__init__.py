"""The model: blocks, attention, feed-forward, experts, the loss; how its weights begin, and sampling from it.

How its weights move and are shared is the engine's business.
"""
