"""kopf's settings, each with its reason (kopf 1.45.2)."""

import random
from collections.abc import Iterator

import kopf
from pseudoreal_api.base import GROUP


class Backoffs:
    """Endless waits in seconds, for kopf's retries while the API server rejects requests or is away."""

    def __iter__(self) -> Iterator[float]:
        waits = iter((0.5, 1.0, 2.0, 3.0, 5.0))
        while True:
            yield next(waits, 8.0) + random.random()


def kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    # The operator posts its own events, one for each transition.
    settings.posting.enabled = False
    # Namespaces and kinds are known; scanning for new ones needs permissions on the whole cluster.
    settings.scanning.disabled = True
    settings.peering.standalone = True
    # A connection that a load balancer dropped silently must end at some time. Integers, because they become query
    # parameters.
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    # Seconds after which kopf releases the newest body of a job.
    settings.queueing.idle_timeout = 0.5
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = Backoffs()
    settings.execution.default_backoff = 10
    settings.background.cancellation_polling = 5
    # With a timeout kopf would kill the whole process; here only kopf is restarted.
    settings.process.ultimate_exiting_timeout = None
    return settings
