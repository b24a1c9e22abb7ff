"""Token files: their formats, native and foreign, and the reading of windows from them.

The order of windows is defined in `data`; text becomes tokens in `data.prepare`.
"""
