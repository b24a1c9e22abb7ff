"""torchrun with the workers' own numbers: `python -m pseudoreal_trainer.rendezvous OPTIONS --module RANK CONFIG.json`.

The options are torchrun's. A worker that meets nobody needs no numbers, and gets torchrun as it is.
"""

import os
import sys
from functools import partial
from pathlib import Path

from pseudoreal_api.resolved.config import read_phase_config
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.run import main

from pseudoreal_trainer.logs import configure_logs
from pseudoreal_trainer.rendezvous.handler import BACKEND, numbered
from pseudoreal_trainer.rendezvous.seats import Seat, numbers


def run() -> None:
    if os.environ.get("PET_RDZV_BACKEND") == "c10d":
        configure_logs()
        config = read_phase_config(Path(sys.argv[-1]))
        os.environ["PET_RDZV_BACKEND"] = BACKEND
        rendezvous_handler_registry.register(BACKEND, numbered(Seat.of_pod(), partial(numbers, config=config)))
    main()


if __name__ == "__main__":
    run()
