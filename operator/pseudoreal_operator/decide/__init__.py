"""What to do next about a job. Pure."""
