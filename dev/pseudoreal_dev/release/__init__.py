"""A release: one version for all its parts, and the parts in `dist/`."""
