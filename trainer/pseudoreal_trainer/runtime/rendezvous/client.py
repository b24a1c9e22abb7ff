"""Rendezvous as seen by workers other than worker 0: the worker tries to connect to worker 0 until it has a number."""

import asyncio
import secrets
import socket
import time
from contextlib import closing

import structlog

from pseudoreal_trainer.runtime.rendezvous.handshake import (
    HANDSHAKE_SECONDS,
    MEET,
    Connection,
    PeerRejected,
    greet_worker_0,
)
from pseudoreal_trainer.runtime.rendezvous.server import Answer, Arrival
from pseudoreal_trainer.runtime.rendezvous.tunnel import Address, connect
from pseudoreal_trainer.runtime.rendezvous.workers import WorkerDescription

_FIRST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS, _GROWTH = 0.1, 2.0, 1.5
"""First and longest pause between two tries, in seconds, and the growth factor of the pause."""
_LOG_SECONDS = 60.0

log = structlog.get_logger()


async def join_rendezvous(
    endpoint: tuple[str, int], key: bytes, description: WorkerDescription
) -> tuple[Answer, Address]:
    """Connect to worker 0, with retries; return the answer and the address of worker 0. Also retries if worker 0
    answers that the rendezvous is over: another rendezvous may follow."""
    arrival = Arrival(description, secrets.token_hex(8))
    pause, logged_at, has_logged = _FIRST_PAUSE_SECONDS, time.monotonic(), False
    while True:
        try:
            answer, address = await _try_to_join(endpoint, key, arrival)
            if not answer.is_over:
                return answer, address
            why = "the workers have met without this one"
        except PeerRejected as stranger:
            why = f"what answers there {stranger}"
            logged_at = logged_at if has_logged else float("-inf")
            has_logged = True
        except OSError as error:  # TimeoutError is one
            why = str(error) or type(error).__name__
        if time.monotonic() - logged_at >= _LOG_SECONDS:
            logged_at = time.monotonic()
            log.warning("worker_0_not_met", endpoint=f"{endpoint[0]}:{endpoint[1]}", because=why)
        await asyncio.sleep(pause)
        pause = min(_MOST_PAUSE_SECONDS, pause * _GROWTH)


async def _try_to_join(endpoint: tuple[str, int], key: bytes, arrival: Arrival) -> tuple[Answer, Address]:
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        connection = await _connect_by_name(endpoint)
    with closing(connection):
        address: Address = (connection.socket.family, connection.socket.getpeername())
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            texts = await greet_worker_0(connection, key, MEET)
            await texts.send(arrival.to_text())
        return Answer.from_text(await texts.receive()), address


async def _connect_by_name(endpoint: tuple[str, int]) -> Connection:
    """Connect to the first address of the name that accepts a connection. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(*endpoint, type=socket.SOCK_STREAM)
    failure = OSError(f"{endpoint[0]} has no address")
    for family, _, _, _, place in found:
        try:
            return await connect((family, place))
        except OSError as error:
            failure = error
    raise failure
