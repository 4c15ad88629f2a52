"""Forecasts how long the demo takes on this machine, from the start and the first steps of its first run."""

from __future__ import annotations

FIRST_STEPS = 5  # steps that are timed, after the first one, which prepares
STARTS = 4  # three launches of the trainer, and the process that loads the last checkpoint


class Forecast:
    """The demo's time in seconds, known after the first run's first steps. Times come from the caller's clock."""

    def __init__(self, steps: int, now: float) -> None:
        self._steps, self._began = steps, now
        self._launched = now
        self._first: tuple[int, float] | None = None
        self.whole_s: float | None = None

    def launch(self, now: float) -> None:
        """The first run is being started."""
        self._launched = now

    def note(self, step: int, now: float) -> bool:
        """Note how far the first run is; True once, when that makes the whole time known."""
        if step < 1 or self.whole_s is not None:
            return False
        if self._first is None:
            self._first = step, now
            return False
        first_step, first_at = self._first
        if step < first_step + FIRST_STEPS:
            return False
        step_s = (now - first_at) / (step - first_step)
        start_s = first_at - self._launched
        # Both runs train all steps; the few that the killed run does twice hardly count.
        self.whole_s = self.elapsed_s(now) + (STARTS - 1) * start_s + (2 * self._steps - step) * step_s
        return True

    def elapsed_s(self, now: float) -> float:
        """Seconds since the demo began."""
        return now - self._began

    def left_s(self, now: float) -> float | None:
        """Seconds until the demo will be done; None while that is not known."""
        return None if self.whole_s is None else max(self.whole_s - self.elapsed_s(now), 0.0)
