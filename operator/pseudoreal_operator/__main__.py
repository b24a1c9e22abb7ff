"""`python -m pseudoreal_operator`: runs until SIGTERM. Liveness is at :8080/healthz."""

import asyncio

import kopf
import structlog

from pseudoreal_operator.handlers import register
from pseudoreal_operator.kopf_settings import kopf_settings
from pseudoreal_operator.login import connect, register_login
from pseudoreal_operator.logs import configure_logs
from pseudoreal_operator.settings import Settings, read_settings


async def run(settings: Settings) -> None:
    registry = kopf.OperatorRegistry()
    register_login(registry)
    async with connect() as api:
        register(registry, api, settings)
        await kopf.operator(
            registry=registry,
            settings=kopf_settings(),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=list(settings.namespaces),
            liveness_endpoint=f"http://0.0.0.0:{settings.health_port}/healthz",
        )


def main() -> None:
    configure_logs()
    settings = read_settings()
    structlog.get_logger().info("started", image=settings.trainer_image, namespaces=settings.namespaces or "all")
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
