"""What people and programs read of a job. Pure."""
