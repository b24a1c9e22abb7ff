"""Local Kubernetes cluster: its programs, a control plane, and nodes with containerd, kubelet and a network of their
own.

The project's images and chart are in `images` and `demo`.
"""
