"""What a pod tells the operator: reports while it runs, and its termination message, with who is at fault. The program
that supervises the ranks is `cli.pod`."""
