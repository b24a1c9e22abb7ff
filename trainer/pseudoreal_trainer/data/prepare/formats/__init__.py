"""Inputs of every format as records: documents that are parsed on access.

The choice of files, and the processing of documents, are in `prepare`.
"""
