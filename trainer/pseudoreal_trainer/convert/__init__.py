"""Conversion of weights from and to other programs: formats, tensor names, and the meaning of their configurations.

The project's own format is in `checkpoint`.
"""
