"""Takes from Python on Linux what macOS has not, in every process that has this folder on PYTHONPATH.

Python imports this module before any other. Native code still sees Linux: torch reads /proc by itself.
"""

import asyncio  # noqa: F401  # before sys.platform is changed: the standard library reads it when it is imported
import builtins
import concurrent.futures.process  # noqa: F401
import ctypes.util
import errno
import io
import mmap
import multiprocessing.util  # noqa: F401
import os
import select
import signal
import socket
import subprocess  # noqa: F401
import sys
import sysconfig
import urllib.request  # noqa: F401
from typing import Any

_HIDDEN = ("/proc", "/sys", "/dev/shm")
_MISSING = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "process_cpu_count", "memfd_create", "eventfd", "pidfd_open"),
        *("posix_fallocate", "posix_fadvise", "fdatasync", "preadv", "pwritev", "O_DIRECT", "RWF_NOWAIT"),
        "copy_file_range",
    ),
    socket: ("TCP_USER_TIMEOUT",),
    mmap: ("MADV_HUGEPAGE", "MAP_POPULATE"),
    select: ("epoll",),
    signal: ("pidfd_send_signal",),
}
_LIBRARY = ("renameat2", "malloc_trim", "mallopt", "prctl")


def _hide(path: object) -> None:
    if isinstance(path, str | bytes | os.PathLike):
        name = os.fsdecode(os.path.abspath(os.fspath(path)))
        if any(name == folder or name.startswith(folder + "/") for folder in _HIDDEN):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def _without_hidden(function: Any) -> Any:
    def call(path: object, *arguments: Any, **named: Any) -> Any:
        _hide(path)
        return function(path, *arguments, **named)

    return call


def _access(path: Any, *arguments: Any, **named: Any) -> bool:
    try:
        _hide(path)
    except FileNotFoundError:
        return False
    return bool(_real_access(path, *arguments, **named))


def _symbol(library: ctypes.CDLL, name: str) -> Any:
    if name in _LIBRARY:
        raise AttributeError(name)
    return _real_symbol(library, name)


_real_access, _real_symbol = os.access, ctypes.CDLL.__getattr__
for _module, _names in _MISSING.items():
    for _name in _names:
        if hasattr(_module, _name):
            delattr(_module, _name)
socket.__dict__["TCP_KEEPALIVE"] = socket.__dict__.pop("TCP_KEEPIDLE")
for _name in ("stat", "lstat", "open", "listdir", "scandir", "statvfs"):
    setattr(os, _name, _without_hidden(getattr(os, _name)))
os.access = _access
builtins.open = io.open = _without_hidden(io.open)
setattr(ctypes.CDLL, "__getattr__", _symbol)  # noqa: B010  # mypy takes no assignment to a method
sysconfig.get_config_vars()  # of Linux: those of macOS are in a file that is not here
sys.modules["triton"] = None  # type: ignore[assignment]  # there is none for macOS
sys.platform = "darwin"
