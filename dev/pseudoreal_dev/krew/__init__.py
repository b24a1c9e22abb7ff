"""The kubectl plugin as krew installs it: an archive, and the manifest that names it.

The plugin's commands are in operator/pseudoreal_client.
"""
