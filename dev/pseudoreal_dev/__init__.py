"""Developer tooling: a real single-node Kubernetes on this machine, and its images."""
