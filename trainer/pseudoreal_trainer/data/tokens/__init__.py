"""Token files: their formats, native and foreign, and the reading of windows from them.

In which order windows are taken is decided in `data`; how text becomes tokens is decided where files are prepared.
"""
