"""What this machine has: programs and their processes, packages, mounts, and the cache that outlives a run.

Nothing here knows of Kubernetes.
"""
