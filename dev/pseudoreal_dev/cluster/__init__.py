"""Local Kubernetes cluster: its programs, a control plane, and nodes, each with its own containerd, kubelet and
network.

The project's images and chart are in `images` and `demo`.
"""
