"""What Prometheus reads of the operator itself: what is measured, and where it is served.

What is measured of the jobs follows from the watch of them, in `loop`.
"""
