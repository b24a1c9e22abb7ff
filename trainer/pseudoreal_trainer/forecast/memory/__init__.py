"""How many bytes a plan takes of device, host and disk, and which homes fit.

How long it takes is in `forecast.time`.
"""
