"""Whether the nodes of a cluster have room for a job, by its pods and by the trainer's forecast. Pure.

What a job needs is forecast in the trainer.
"""
