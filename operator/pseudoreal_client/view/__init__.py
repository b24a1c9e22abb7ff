"""From what the API server says to what is shown and asked for. Pure: no request, no clock, no terminal.

The requests are in `cluster`, and what they are made for in `commands`.
"""
