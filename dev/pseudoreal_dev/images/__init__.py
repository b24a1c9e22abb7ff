"""The images of the project: built by buildah, carried to containerd."""
