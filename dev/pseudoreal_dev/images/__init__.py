"""The project's images: built by buildah, transferred to containerd.

The Dockerfile defines their contents.
"""
