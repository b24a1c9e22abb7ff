"""What MkDocs loads to build the site of the documents: hooks, an extension that shows examples of docstrings, a
style, and a vendored script with which search works without a server.

MkDocs runs in an environment of its own, so nothing here imports this project. The pages are in docs/.
"""
