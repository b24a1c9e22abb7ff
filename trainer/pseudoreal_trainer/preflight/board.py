"""Exchange between ranks through torch's TCP store. The store works even while their collectives hang."""

import os
import time
from collections.abc import Collection
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from pseudoreal_trainer.preflight.findings import Finding, Verdict
from pseudoreal_trainer.preflight.judge import Nodes


def connect(seconds: float, *, holds: bool = False) -> Store:
    """Connect to the store at MASTER_ADDR. `holds`: this process is the store's server. Raises torch's errors."""
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=holds,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )
    return part_of(store, "preflight", seconds)


def part_of(store: Store, name: str, seconds: float) -> Store:
    """Return a part of the store under a prefix of its own; a read waits at most `seconds` for an entry."""
    part = PrefixStore(name, store)
    part.set_timeout(timedelta(seconds=seconds))
    return part


def is_held_by_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class Board:
    """Messages between the ranks in the store.

    No method waits longer than its `seconds`. After a timeout, a waiting method returns False, None or fewer entries.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def begin(self, rank: int, node: str) -> None:
        self._store.set(f"node/{rank}", node)

    def nodes(self, ranks: Collection[int], seconds: float) -> Nodes:
        """Return the nodes of the given ranks as far as they have started, waiting up to `seconds` for all of them."""
        found = self._wait_for_each("node", ranks, seconds)
        return {rank: self._store.get(f"node/{rank}").decode() for rank in found}

    def go(self, is_complete: bool) -> None:
        """Tell all ranks whether to measure. Without all ranks the measurement makes no sense."""
        self._store.set("go", str(is_complete))

    def may_go(self, seconds: float) -> bool:
        return self._wait(["go"], seconds) and self._store.get("go") == b"True"

    def answer(self, finding: Finding) -> None:
        self._store.set(f"finding/{finding.rank}", finding.to_json())

    def findings(self, ranks: Collection[int], seconds: float) -> list[Finding]:
        found = self._wait_for_each("finding", ranks, seconds)
        return [Finding.model_validate_json(self._store.get(f"finding/{rank}")) for rank in found]

    def publish(self, verdict: Verdict) -> None:
        self._store.set("verdict", verdict.to_json())

    def verdict(self, rank: int, seconds: float) -> Verdict | None:
        if not self._wait(["verdict"], seconds):
            return None
        verdict = Verdict.model_validate_json(self._store.get("verdict"))
        self._store.set(f"heard/{rank}", "")
        return verdict

    def wait_until_heard(self, ranks: Collection[int], seconds: float) -> None:
        """Wait until the ranks have read the verdict, because the store may end with this process."""
        self._wait([f"heard/{rank}" for rank in ranks], seconds)

    def _wait_for_each(self, key: str, ranks: Collection[int], seconds: float) -> list[int]:
        """Return the ranks with timely entries."""
        until = time.monotonic() + seconds
        return [rank for rank in ranks if self._wait([f"{key}/{rank}"], until - time.monotonic())]

    def _wait(self, keys: list[str], seconds: float) -> bool:
        if seconds <= 0:
            return bool(self._store.check(keys))
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except DistStoreError:
            return False
        return True
