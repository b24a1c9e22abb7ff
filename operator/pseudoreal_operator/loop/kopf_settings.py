"""kopf's settings, each set for a reason (kopf 1.45.2)."""

import random

import kopf
from pseudoreal_api.base import GROUP

LISTED_AT_ONCE = 50
"""Most jobs of one answer: each may be a megabyte, and users decide that."""


def kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    # The operator posts its own events, one for each transition.
    settings.posting.enabled = False
    # Namespaces and kinds are known; looking for new ones takes rights over the whole cluster.
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.watching.chunk_size = LISTED_AT_ONCE
    # A connection that a load balancer dropped silently must end some day. Integers: they become query parameters.
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    # After that long kopf lets go of the newest body of a job.
    settings.queueing.idle_timeout = 0.5
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = [base + random.random() for base in (1, 1, 2, 3, 5, 8, 13, 21)]
    settings.execution.default_backoff = 10
    settings.background.cancellation_polling = 5
    # Below the grace period of the operator's pod.
    settings.process.ultimate_exiting_timeout = 20
    return settings
