"""PyTorch trainer that runs the phases of a PseudoRealJob, in the pods of a cluster or as local processes."""
