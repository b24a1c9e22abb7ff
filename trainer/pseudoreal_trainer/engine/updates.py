"""The thread that updates units, one after the other, while the main thread computes and another one reduces."""

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future

from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec

from pseudoreal_trainer.engine.ranks.grid import Grid
from pseudoreal_trainer.engine.ranks.lanes import Lane, Lanes, Mark
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.reductions import Reductions
from pseudoreal_trainer.engine.side_work import SideWork
from pseudoreal_trainer.engine.state.memory import State
from pseudoreal_trainer.forecast.memory.crossing import KEPT_GRADIENTS
from pseudoreal_trainer.plan.steps import Update


class Updates:
    def __init__(
        self,
        spec: OptimizerSpec,
        grid: Grid,
        states: Mapping[int, State],
        reductions: Reductions,
        lanes: Lanes,
        trace: Trace,
    ) -> None:
        self._spec, self._states, self._reductions = spec, states, reductions
        self._lanes, self._trace, self._heartbeat = lanes, trace, grid.ranks.heartbeat
        self._thread = SideWork("updates", self._heartbeat.failure, lanes.enter_thread)
        self._newest: deque[Future[Mark]] = deque(maxlen=KEPT_GRADIENTS)
        self.holds: dict[int, Future[None]] = {}
        """Unit -> capture that its next update waits for."""
        self.held_seconds = 0.0
        """Seconds that updates have waited for captures."""

    @property
    def room(self) -> Future[Mark] | None:
        """The update that must be done before the next gradient is kept. None: there is room."""
        return self._newest[0] if len(self._newest) == KEPT_GRADIENTS else None

    def update(self, step: Update, rate: float) -> Future[Mark]:
        hold, scale = self.holds.pop(step.unit, None), self._reductions.scale(step)
        updated = self._thread.later(lambda: self._update(step, rate, scale, hold))
        self._newest.append(updated)
        return updated

    def close(self) -> None:
        self._thread.close()

    def _update(self, step: Update, rate: float, scale: Future[float | None], hold: Future[None] | None) -> Mark:
        with self._heartbeat.updates.waiting_behind(self._heartbeat.reductions):
            factor = scale.result()
        if factor is None:
            self._states[step.unit].drop_gradient()
            return None
        if hold is not None:
            self._wait_for(hold, step)
        with self._trace.span("update", step), self._lanes.on(Lane.UPDATE):
            self._states[step.unit].update(self._spec, rate, factor)
            return self._lanes.mark()

    def _wait_for(self, hold: Future[None], step: Update) -> None:
        begin = time.perf_counter()
        with self._trace.span("checkpoint", step, "hold"):
            hold.result()
        self.held_seconds += time.perf_counter() - begin
