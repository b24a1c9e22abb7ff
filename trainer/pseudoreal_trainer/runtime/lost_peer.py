"""Recognizes errors caused by another rank: it is gone, has failed, or does not answer, so its pod is at fault. Pure.

torch has no error type for this case: gloo raises RuntimeError with the name of gloo's source file in the text (torch
2.11 to 2.15).
"""

import re

from pseudoreal_trainer.errors import PeerFailed, causes

_TYPES = ("DistNetworkError", "DistStoreError")
"""Names of torch's error types for failures of the store used for rendezvous; names, because torch may not be imported
yet."""
_GLOO_SAYS = "gloo/transport/"
_NCCL_SAYS = (
    "ncclRemoteError",
    "remote process exited",
    "Connection closed by remote peer",
    "collective operation timeout",
    "NCCL operation timed out",
)
_TIMED_OUT = re.compile(r"tim(?:ed |e)out", re.IGNORECASE)
_MILLISECONDS = re.compile(r"(\d+) ?(?:ms\b|milliseconds)")


def has_lost_a_peer(error: BaseException) -> bool:
    return any(_says_so(cause) for cause in causes(error))


def timeout_sentence(error: BaseException) -> str:
    """Return a sentence for a collective timed out because of absent ranks; empty for other errors."""
    for cause in causes(error):
        if _says_so(cause) and _TIMED_OUT.search(text := str(cause)):
            limit = _MILLISECONDS.search(text)
            after = f" after {int(limit[1]) / 1000:g} s" if limit else ""
            return f"a collective timed out{after}, as some rank did not take part in it: "
    return ""


def _says_so(error: BaseException) -> bool:
    text = str(error)
    known = isinstance(error, PeerFailed) or type(error).__name__ in _TYPES
    return known or any(words in text for words in (_GLOO_SAYS, *_NCCL_SAYS))
