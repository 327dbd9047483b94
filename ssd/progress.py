"""How long work tells its caller how it comes along."""

from collections.abc import Callable

# Called with what is being done and the share done, 0..1.
Progress = Callable[[str, float], None]
