"""Generators: the CustomResourceDefinition and the manifest reference, from the models.

No program imports these modules while a job runs.
"""
