"""Which errors say that another rank is gone, has failed, or does not answer: what is wrong is wrong there. Pure.

torch has no type for them: gloo raises RuntimeError, with its own source file in the text (torch 2.11 to 2.15).
"""

from pseudoreal_trainer.errors import PeerFailed, causes

_TYPES = ("DistNetworkError", "DistStoreError")
"""Of torch, which may not be imported yet: known by their names. They speak of the store by which ranks meet."""
_GLOO_SAYS = "gloo/transport/"
_NCCL_SAYS = ("ncclRemoteError", "remote process exited", "Connection closed by remote peer")


def has_lost_a_peer(error: BaseException) -> bool:
    return any(_says_so(cause) for cause in causes(error))


def _says_so(error: BaseException) -> bool:
    text = str(error)
    known = isinstance(error, PeerFailed) or type(error).__name__ in _TYPES
    return known or any(words in text for words in (_GLOO_SAYS, *_NCCL_SAYS))
