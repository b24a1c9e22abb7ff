"""How long the steps of a plan take on a machine whose profile was measured.

The measuring is in `measure`; the bytes that move are counted in `forecast.memory`.
"""
