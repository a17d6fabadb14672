"""When reserves that come late are no longer worth their wait."""

from __future__ import annotations

LIMIT = 3  # late answers in a row that open the breaker
PAUSE = 1.0  # seconds until one more is tried


class Breaker:
    """Opens after LIMIT late answers in a row; one try after every PAUSE."""

    def __init__(self) -> None:
        """A closed breaker."""
        self._late = 0
        self._until = 0.0

    @property
    def open(self) -> bool:
        """Whether the last answers were late, LIMIT or more."""
        return self._late >= LIMIT

    def allows(self, now: float) -> bool:
        """Whether a reserve may be tried at a time in seconds."""
        return not self.open or now >= self._until

    def late(self, now: float) -> None:
        """An answer did not come in time."""
        self._late += 1
        self._until = now + PAUSE

    def in_time(self) -> None:
        """An answer came in time."""
        self._late = 0
