"""Which traffic crosses which level of a cluster, and how ranks are numbered so that little does.

Levels are domains of a topology, such as racks, the nodes in them, and the workers on a node.
"""
