"""What a pod reports to the operator while it runs, and its termination message, with who is at fault. The program
that supervises the ranks is `cli.pod`."""
