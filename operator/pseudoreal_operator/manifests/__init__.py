"""The children of a job as manifests. Pure."""
