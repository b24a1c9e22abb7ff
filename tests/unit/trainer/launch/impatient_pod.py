"""The pod program, which waits a shorter time for the others."""

from pseudoreal_trainer.cli import pod as program
from pseudoreal_trainer.launch import rendezvous

PATIENCE = 3

if __name__ == "__main__":
    rendezvous.MEET_SECONDS = PATIENCE
    program.main()
