"""How the workers of a phase meet: each comes to worker 0, which knows them by the job's secret and gives them numbers.
"""
