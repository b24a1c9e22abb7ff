"""The local Kubernetes: its programs, a control plane, nodes with containerd, kubelet and a network of their own.

The project's images and chart come later, in `images` and `demo`.
"""
