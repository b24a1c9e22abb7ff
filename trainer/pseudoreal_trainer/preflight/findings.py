"""Findings of the ranks, and the verdict on all of them."""

from pseudoreal_api.base import ApiModel
from pydantic import Field

from pseudoreal_trainer.preflight.pairs import Network


class Talk(ApiModel):
    """Result of one pairing of two ranks, as seen by one of them."""

    network: Network
    partner: int
    seconds: float | None = Field(None, description="Of a sum over both, the fastest of some. None: it failed.")
    error: str = ""


class Finding(ApiModel):
    """Results of one rank."""

    rank: int
    node: str
    product_seconds: float | None = Field(None, description="The fastest of some. None: there was none.")
    product_right: bool = False
    error: str = Field("", description="Why there was none.")
    talks: list[Talk] = Field([], description="Those that it came to, in their order.")

    def seconds(self, network: Network) -> float | None:
        """Return the seconds with the rank's fastest partner on the network; None if no pairing succeeded.

        The minimum is taken because the slow one of a pair may be the partner.
        """
        return min((t.seconds for t in self.talks if t.network == network and t.seconds is not None), default=None)


class Fault(ApiModel):
    ranks: list[int] = Field(description="One, or the two of a pair; none where it is no rank's own.")
    text: str


class Verdict(ApiModel):
    broken: list[Fault] = Field([])
    slow: list[Fault] = Field([])

    @property
    def suspect(self) -> int | None:
        """First rank at fault by itself; None if there is none."""
        return next((fault.ranks[0] for fault in self.broken if len(fault.ranks) == 1), None)
