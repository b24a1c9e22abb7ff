"""How the workers of a phase meet: all come to worker 0, which knows them by the secret of the job and numbers them.
When they come, and how often, is launch's.
"""
