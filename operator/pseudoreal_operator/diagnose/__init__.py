"""What failures, waits and results mean. Pure."""
