"""The stages of a job in order, and where it is: train, delink, train, ... Pure.

`status.phases` is the memory: a phase's train stage is done when its state is Succeeded, and the delink that leads into
a phase is done when the phase has a start checkpoint. Children of finished stages may vanish.
"""

from dataclasses import dataclass

from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.status.status import PhaseStatus, PseudoRealJobStatus

from pseudoreal_operator.observe.observed import Role, Run

Phases = list[PhaseStatus]


@dataclass(frozen=True)
class Stage:
    """`index` is that of the phase that is trained, or delinked for."""

    index: int
    phase: str
    role: Role

    def run(self, attempt: int) -> Run:
        return Run(self.phase, self.role, attempt)

    @property
    def number(self) -> int:
        """Its place in all_stages."""
        return 2 * self.index - (self.role is Role.DELINK)

    @property
    def title(self) -> str:
        return f"phase {self.phase}" if self.role is Role.TRAIN else f"the delink into phase {self.phase}"


def all_stages(spec: PseudoRealJobSpec) -> list[Stage]:
    """In their order."""
    names = [phase.name for phase in spec.phases]
    roles = (Role.DELINK, Role.TRAIN)
    return [Stage(index, name, role) for index, name in enumerate(names) for role in roles][1:]


def first_phases(spec: PseudoRealJobSpec) -> Phases:
    return [PhaseStatus(name=phase.name, state="Pending") for phase in spec.phases]


def current_stage(phases: Phases) -> Stage | None:
    """The first stage that is not done; None when all are."""
    for index, phase in enumerate(phases):
        if phase.state == "Succeeded":
            continue
        role = Role.DELINK if index > 0 and phase.start_checkpoint is None else Role.TRAIN
        return Stage(index, phase.name, role)
    return None


def is_started(phases: Phases, stage: Stage) -> bool:
    """Whether the status says that children of the stage were made."""
    return phases[stage.index].state == ("Running" if stage.role is Role.TRAIN else "Delinking")


def has_begun(status: PseudoRealJobStatus) -> bool:
    """Whether the status says that children of any stage were made."""
    return any(phase.state != "Pending" for phase in status.phases) or status.execution_attempt > 1


def started(status: PseudoRealJobStatus, stage: Stage) -> PseudoRealJobStatus:
    """The status once the present attempt at the stage has begun."""
    state = "Running" if stage.role is Role.TRAIN else "Delinking"
    return status.model_copy(update={"phases": changed(status.phases, stage.index, state=state), "restart_after": None})


def changed(phases: Phases, index: int, **update: object) -> Phases:
    return [phase.model_copy(update=update) if i == index else phase for i, phase in enumerate(phases)]
