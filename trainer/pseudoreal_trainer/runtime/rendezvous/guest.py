"""The other workers' side of a rendezvous: each connects to worker 0 until it has a number."""

import asyncio
import secrets
import socket
import time
from contextlib import closing

import structlog

from pseudoreal_trainer.runtime.rendezvous.gate import Answer, Arrival
from pseudoreal_trainer.runtime.rendezvous.handshake import HANDSHAKE_SECONDS, MEET, Line, Stranger, greet_worker_0
from pseudoreal_trainer.runtime.rendezvous.seats import Seat
from pseudoreal_trainer.runtime.rendezvous.tunnel import Address, connect

_FIRST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS, _GROWTH = 0.1, 2.0, 1.5
"""Seconds between two tries, at first and at most, and the growth from one try to the next."""
_LOG_SECONDS = 60.0

log = structlog.get_logger()


async def come(endpoint: tuple[str, int], key: bytes, seat: Seat) -> tuple[Answer, Address]:
    """Return the answer of worker 0 and the address of worker 0; tries until there is an answer."""
    arrival = Arrival(seat, secrets.token_hex(8))
    pause, said, is_told = _FIRST_PAUSE_SECONDS, time.monotonic(), False
    while True:
        try:
            answer, address = await _come_once(endpoint, key, arrival)
            if not answer.is_over:
                return answer, address
            why = "the workers have met without this one"
        except Stranger as stranger:
            why = f"what answers there {stranger}"
            said = said if is_told else float("-inf")
            is_told = True
        except OSError as error:  # TimeoutError is one
            why = str(error) or type(error).__name__
        if time.monotonic() - said >= _LOG_SECONDS:
            said = time.monotonic()
            log.warning("worker_0_not_met", endpoint=f"{endpoint[0]}:{endpoint[1]}", because=why)
        await asyncio.sleep(pause)
        pause = min(_MOST_PAUSE_SECONDS, pause * _GROWTH)


async def _come_once(endpoint: tuple[str, int], key: bytes, arrival: Arrival) -> tuple[Answer, Address]:
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        line = await _connect_by_name(endpoint)
    with closing(line):
        address: Address = (line.socket.family, line.socket.getpeername())
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            seal = await greet_worker_0(line, key, MEET)
            await seal.send(arrival.to_text())
        return Answer.from_text(await seal.receive()), address


async def _connect_by_name(endpoint: tuple[str, int]) -> Line:
    """Connect to the first address of the name that accepts. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(*endpoint, type=socket.SOCK_STREAM)
    failure = OSError(f"{endpoint[0]} has no address")
    for family, _, _, _, place in found:
        try:
            return await connect((family, place))
        except OSError as error:
            failure = error
    raise failure
