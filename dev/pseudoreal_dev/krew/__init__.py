"""The kubectl plugin as krew installs it: an archive, and its manifest.

The plugin's commands are in operator/pseudoreal_client and trainer/pseudoreal_trainer/cli.
"""
