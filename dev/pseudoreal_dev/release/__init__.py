"""`make release`: everything that a release publishes, in `dist/`.

Nothing here publishes it, and the version is in pseudoreal_dev.machine.
"""
