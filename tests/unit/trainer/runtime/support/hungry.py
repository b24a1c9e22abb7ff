"""Stand in for a rank: allocate memory until the kernel kills the process."""

kept = []
while True:
    kept.append(bytearray(b"\1") * (64 << 20))
