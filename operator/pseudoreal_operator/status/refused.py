"""A status whose texts the API server rejects is written without them, and then without figures: states and names must
not wait. Pure.

The sentence in place of a text contains a digest of the text, so the status itself remembers which texts were rejected:
these are not tried again, and others are.
"""

import hashlib

from pseudoreal_api.status.status import Condition, PseudoRealJobStatus

from pseudoreal_operator.changes import phase_with, status_with

_BEGIN = "The API server refused the text of this condition"


def without_texts(status: PseudoRealJobStatus) -> PseudoRealJobStatus:
    return status_with(status, conditions=[_without_text(condition) for condition in status.conditions])


def without_figures(status: PseudoRealJobStatus) -> PseudoRealJobStatus:
    """Return the status without its texts, and without values from pods that no decision needs."""
    known = without_texts(status)
    phases = [
        phase_with(phase, layout=None, loss=None, start_validation_loss=None, validation_loss=None)
        for phase in known.phases
    ]
    known = status_with(known, progress=None, placement=None, phases=phases)
    parts = {name: getattr(known, name) for name in ("spares", "elastic", "restarts_in_place")}
    return known.model_copy(
        update={name: part.model_copy(update={"message": ""}) for name, part in parts.items() if part}
    )


def texts_of(status: PseudoRealJobStatus) -> dict[str, str]:
    """Return digest -> text, for the texts that were not rejected before."""
    messages = [condition.message for condition in status.conditions]
    return {_digest(message): message for message in messages if not message.startswith(_BEGIN)}


def sentence_for(text: str) -> str:
    """Return the sentence that stands in place of a text."""
    return f"{_BEGIN}; the operator's log shows it as text {_digest(text)}."


def _without_text(condition: Condition) -> Condition:
    if condition.message.startswith(_BEGIN):
        return condition
    return condition.model_copy(update={"message": sentence_for(condition.message)})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
