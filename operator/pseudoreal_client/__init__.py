"""Command-line client: shows jobs on a cluster, and changes them on request."""
