"""Generators: the CustomResourceDefinition, the manifest reference and the schema for editors, from the models.

No program imports these modules while a job runs.
"""
