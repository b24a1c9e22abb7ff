"""Run the pod program with a shorter rendezvous timeout."""

from pseudoreal_trainer.cli import pod as program
from pseudoreal_trainer.runtime import worker_0

PATIENCE = 3

if __name__ == "__main__":
    worker_0.MEET_SECONDS = PATIENCE
    program.main()
