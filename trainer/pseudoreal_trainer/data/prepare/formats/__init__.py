"""Inputs of every format as records, which are documents that are parsed when they are asked for.

Which files are read is decided one room above, and what becomes of a document there, too.
"""
