"""The live page of `pseudoreal ui`: a list of jobs, and the page of each, in a browser on the same machine.

`following` and `folders` read the folders of local runs again and again; `pseudoreal_client.ui` does the same for the
jobs of a cluster. `view` is what either says, `html` turns it into the parts of a page, `channels` has a thread for each
page that somebody has open, and `server` sends the parts that have changed. `access` decides who may ask. Figures and
their HTML are those of `report`. No module imports torch, and only `access`, `channels` and `server` know asyncio.

All that a page shows is untrusted, and so is every request until `access` has let it through.
"""
