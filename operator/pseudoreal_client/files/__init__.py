"""Job files, with line and column of whatever is wrong in them. Pure, but for reading the file.

What a job may say is decided in the contract.
"""
