"""How long work tells its caller how it comes along."""

from __future__ import annotations

from collections.abc import Callable, Mapping

# Called with what is being done and the share done, 0..1.
Progress = Callable[[str, float], None]


class Course:
    """Steps one after another, by name, with the seconds that each is expected to take: tells the share done, and at first the whole."""

    def __init__(self, tell: Progress, seconds: Mapping[str, float]) -> None:
        self._tell, self._seconds = tell, dict(seconds)
        self._whole = sum(self._seconds.values()) or 1.0
        self._begun = False

    def at(self, step: str, part: float = 0.0) -> None:
        """Tell that a step has begun, or has come so far, 0..1; ValueError for one that is not known."""
        if step not in self._seconds:
            raise ValueError(f"step={step!r} is unknown: the course has {', '.join(self._seconds)}")
        names = list(self._seconds)
        before = sum(self._seconds[name] for name in names[: names.index(step)])
        whole = "" if self._begun else f" ({_duration(self._whole)} in all)"
        self._begun = True
        self._tell(step + whole, min(1.0, (before + part * self._seconds[step]) / self._whole))


def _duration(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"
