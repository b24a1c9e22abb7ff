"""Resources of this machine: programs and their processes, packages, mounts, and the persistent cache.

This package is independent of Kubernetes.
"""
