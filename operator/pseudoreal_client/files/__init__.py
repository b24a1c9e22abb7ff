"""Job files, with line and column of each fault. Pure, except for reading the file.

The API package has the rules for jobs.
"""
