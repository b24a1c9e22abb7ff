"""Stands for a rank: takes memory until the system ends it."""

kept = []
while True:
    kept.append(bytearray(b"\1") * (64 << 20))
