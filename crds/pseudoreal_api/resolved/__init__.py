"""Configuration of one stage for its pods, with all defaults filled in, and its derivation from a spec.

No module reads from a cluster.
"""
