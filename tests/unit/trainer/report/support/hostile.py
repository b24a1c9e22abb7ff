"""A job in which every text that a tenant, a model or a file system can write tries to become a script."""

from typing import Any

from pseudoreal_api.resolved.config import JobIdentity, PhaseConfig
from pseudoreal_trainer.report.job import Job

from tests.unit.trainer.checkpoint.support.by_hand import manifest_of
from tests.unit.trainer.report.support.jobs import entry, job, line, started

ATTACKS = (
    "</script><script>window.hit=1</script>",
    '"><img src=x onerror="window.hit=1">',
    "'><svg/onload=window.hit=1>",
    "{{ ''.__class__ }}{% for x in [1] %}hit{% endfor %}",
    "<!--<script>",
    "javascript:window.hit=1//\u2028\u202e\x1b[31m\x00]]>",
)


def hostile_job(config: PhaseConfig, attack: str) -> Job:
    """Return a job with the attack in each text of a page."""
    identity = JobIdentity(name=attack, namespace=attack, uid=attack)
    data = config.data.model_copy(update={"path": attack})
    config = config.model_copy(update={"job": identity, "data": data})
    heads = [manifest_of(5, loss=1.0).head.model_copy(update={"job": identity, "parent": f"{attack}-00000003"})]
    texts: dict[str, Any] = {"pod": attack, "node": attack, "ranks": [0, 1]}
    history = [
        started(config, 0, **texts),
        entry("Ended", 5, outcome="Failed", message=attack, **texts),
        started(config, 9, step=3, execution=2, checkpoint=attack, **texts),
        entry("Ended", 12, phase=attack, stage="delink", outcome="Failed", message=attack, **texts),
    ]
    lines = [
        *(line(step) for step in range(1, 5)),
        line(5, samples=[{"prompt": attack, "text": attack}], validation_losses={attack: 1.0, "b": 2.0}),
        line(6, phase=attack),
    ]
    return job(lines, heads, history, folder=f"runs/{attack}", notices=[attack])
