"""torchrun with the project's own rendezvous."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pseudoreal_api.resolved.config import read_phase_config
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.run import main

from pseudoreal_trainer.logs import configure_logs
from pseudoreal_trainer.runtime.rendezvous.handler import BACKEND, static
from pseudoreal_trainer.runtime.rendezvous.seats import Seat, numbers
from pseudoreal_trainer.runtime.rendezvous.secret import meeting_key


def run(arguments: Sequence[str]) -> None:
    """Run torchrun with its arguments; the last one is the configuration file of the phase."""
    configure_logs()
    config = read_phase_config(Path(arguments[-1]))
    meets = int(os.environ.get("PET_NNODES", "1")) > 1
    # All workers have equally many ranks, so the numbers of ranks follow from the numbers of workers; torchrun would
    # take them from a store.
    os.environ |= {"PET_RDZV_BACKEND": BACKEND, "TORCH_ELASTIC_WORKER_IDENTICAL": "1"}
    create = static(Seat.of_pod(), partial(numbers, config=config), meeting_key() if meets else None)
    rendezvous_handler_registry.register(BACKEND, create)
    main([*arguments])
