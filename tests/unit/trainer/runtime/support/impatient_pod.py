"""Run the pod program with a shorter rendezvous timeout."""

from pseudoreal_trainer.cli import pod as program
from pseudoreal_trainer.runtime.rendezvous import identity

PATIENCE = 3

if __name__ == "__main__":
    identity.RESTART_SECONDS = PATIENCE
    program.main()
