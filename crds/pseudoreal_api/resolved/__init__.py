"""What a pod is told: the configuration of one stage, with every default filled in, and how it follows from a spec.

Nothing in it is read from a cluster.
"""
