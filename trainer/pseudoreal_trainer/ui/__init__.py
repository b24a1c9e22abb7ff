"""The live page of `pseudoreal ui`: a list of jobs, and the page of each, in a browser on the same machine.

`following` and `folders` read the folders of local runs again and again; `pseudoreal_client.ui` does the same for the
jobs of a cluster. `view` defines the content that both give, `html` turns the content into the parts of a page,
`channels` has a thread for each job that somebody looks at, and `server` sends the parts that have changed. `access`
decides which requests are answered. Figures and their HTML come from `report`. No module imports torch, and only
`access`, `channels` and `server` know asyncio.

All that a page shows is untrusted, and so is every request until `access` has let it through.
"""
