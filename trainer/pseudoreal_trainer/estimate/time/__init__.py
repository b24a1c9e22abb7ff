"""Duration of the steps of a plan on a machine with a measured profile.

Measurements are made in `measure`; the bytes that move are counted in `plan.effects`.
"""
