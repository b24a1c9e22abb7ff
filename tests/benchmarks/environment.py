"""The environment of the processes that are measured."""

import os
import sys
from pathlib import Path

EXTENSIONS = Path(sys.prefix) / "extensions"
"""What DeepSpeed compiled for this machine."""

ENVIRONMENT = {
    # ninja, which is asked for before anything compiled is loaded, lies beside python.
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    # One core for each rank.
    "OMP_NUM_THREADS": "1",
    # Threads that wait must not spin: there are no cores to spare.
    "OMP_WAIT_POLICY": "passive",
    "GLOO_SOCKET_IFNAME": "lo",
}
