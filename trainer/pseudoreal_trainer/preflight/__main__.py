"""Check one rank: `python -m pseudoreal_trainer.preflight CONFIG.json DIAGNOSIS.json`, with torchrun's environment."""

import os
import socket
import sys
from pathlib import Path

from pseudoreal_api.resolved.config import read_phase_config
from pseudoreal_api.wire.reports import NODE_NAME

from pseudoreal_trainer.engine.ranks.ranks import device_of_rank
from pseudoreal_trainer.logs import configure_logs
from pseudoreal_trainer.preflight.check import CheckedRank, Limits, check
from pseudoreal_trainer.preflight.diagnosis import log_check


def main(limits: Limits) -> None:
    configure_logs()
    config, file = read_phase_config(Path(sys.argv[1])), Path(sys.argv[2])
    # Turns an NCCL collective that hangs into an error.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    own = CheckedRank(
        rank=int(os.environ.get("RANK", "0")),
        workers=config.workers,
        processes=config.processes_per_worker,
        node=os.environ.get(NODE_NAME) or socket.gethostname(),
        device=lambda: device_of_rank(config.gpus),
    )
    diagnosis, results = check(own, limits)
    if own.rank == 0:
        log_check(diagnosis, results)
    file.write_text(diagnosis.to_json(), encoding="utf-8")
    sys.stdout.flush()
    # A normal exit would wait for threads that hang.
    os._exit(0)


if __name__ == "__main__":
    main(Limits())
