"""Traffic across the levels of a cluster, and a numbering of ranks that keeps it low.

Levels are domains of a topology, such as racks, the nodes in them, and the workers on a node.
"""
