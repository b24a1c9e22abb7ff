"""The resident memory of this process."""

import gc
import re
from pathlib import Path


class Growth:
    """Measures the peak growth of the resident memory since the object's creation."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # reset the kernel's peak counter
        self.before_bytes = _status("VmRSS")

    @property
    def peak_bytes(self) -> int:
        return _status("VmHWM") - self.before_bytes


def _status(name: str) -> int:
    """Return a byte count by its name in /proc/self/status."""
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, name
    return 1024 * int(found[1])
