"""Environment variables of the measured processes."""

import os
import sys
from pathlib import Path

EXTENSIONS = Path(sys.prefix) / "extensions"
"""Folder of the extensions that DeepSpeed compiled for this machine."""

ENVIRONMENT = {
    # ninja is beside python; DeepSpeed looks for ninja before it loads anything compiled.
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    # One core per rank.
    "OMP_NUM_THREADS": "1",
    # Waiting threads must not spin, because there are no cores to spare.
    "OMP_WAIT_POLICY": "passive",
    "GLOO_SOCKET_IFNAME": "lo",
}
