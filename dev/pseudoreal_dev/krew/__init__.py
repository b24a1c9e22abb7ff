"""The plugin of kubectl as krew installs it: an archive and the manifest that names it.

What the plugin does is in operator/pseudoreal_client.
"""
