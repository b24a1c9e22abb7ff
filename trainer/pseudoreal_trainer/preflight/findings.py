"""What a rank found out, and what all of it together means."""

from pseudoreal_api.base import ApiModel
from pydantic import Field

from pseudoreal_trainer.preflight.pairs import Network


class Talk(ApiModel):
    """One pairing of two ranks, as one of them saw it."""

    network: Network
    partner: int
    seconds: float | None = Field(None, description="Of a sum over both, the fastest of some. None: it failed.")
    error: str = ""


class Finding(ApiModel):
    """What one rank found out."""

    rank: int
    node: str
    product_seconds: float | None = Field(None, description="The fastest of some. None: there was none.")
    product_right: bool = False
    error: str = Field("", description="Why there was none.")
    talks: list[Talk] = Field([], description="Those that it came to, in their order.")

    def seconds(self, network: Network) -> float | None:
        """Seconds on this network with the rank's best partner: a partner may be the slow one."""
        return min((t.seconds for t in self.talks if t.network == network and t.seconds is not None), default=None)


class Fault(ApiModel):
    ranks: list[int] = Field(description="One, or the two of a pair; none where it is no rank's own.")
    text: str


class Verdict(ApiModel):
    broken: list[Fault] = Field([])
    slow: list[Fault] = Field([])

    @property
    def suspect(self) -> int | None:
        """The first rank that is at fault by itself; None where there is none."""
        return next((fault.ranks[0] for fault in self.broken if len(fault.ranks) == 1), None)
