"""Reads files of inputs: local ones, and those of services and web servers by requests for ranges of bytes.

The formats of their content are in `formats`.
"""
