"""torchrun with the workers' own numbers."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pseudoreal_api.resolved.config import read_phase_config
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.run import main

from pseudoreal_trainer.logs import configure_logs
from pseudoreal_trainer.rendezvous.handler import BACKEND, numbered
from pseudoreal_trainer.rendezvous.seats import Seat, numbers


def run(arguments: Sequence[str]) -> None:
    """Runs torchrun with its arguments, of which the last is the configuration of the phase. A worker that meets nobody
    needs no numbers, and gets torchrun as it is."""
    if os.environ.get("PET_RDZV_BACKEND") == "c10d":
        configure_logs()
        config = read_phase_config(Path(arguments[-1]))
        os.environ["PET_RDZV_BACKEND"] = BACKEND
        rendezvous_handler_registry.register(BACKEND, numbered(Seat.of_pod(), partial(numbers, config=config)))
    main([*arguments])
