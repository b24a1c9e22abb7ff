"""How the workers of a phase meet: by torchrun, with numbers of their own.

torchrun numbers workers by the names of their hosts, where 10 comes before 2.
"""
