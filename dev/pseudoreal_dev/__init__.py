"""Developer tooling: a real single-node Kubernetes on this machine, and the images that run on it."""
