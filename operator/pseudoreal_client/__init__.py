"""The commands for people at a terminal: what they see of jobs on a cluster, and what they ask of them."""
