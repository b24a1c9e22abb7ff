"""Log format: JSON lines, or colours on a terminal."""

import sys
from typing import TextIO

import structlog


def configure_logs(stream: TextIO | None = None) -> None:
    """Write logs to the stream; None: standard output."""
    stream = stream or sys.stdout
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if stream.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        logger_factory=structlog.WriteLoggerFactory(stream),
    )
