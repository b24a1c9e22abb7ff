"""The images of the project: built by buildah, carried to containerd.

What is in them the Dockerfile says.
"""
