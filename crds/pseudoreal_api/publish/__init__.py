"""What is generated from the models: the CustomResourceDefinition and the reference of the manifest.

No program imports it while a job runs.
"""
