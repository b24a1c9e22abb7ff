"""How a pod starts its ranks, meets the other pods, and restarts its ranks in place. torch is imported in no process
but that from which torchrun is forked.
"""
