"""What an engine's KV events say of the tier.

An engine says that a key is stored when it has read that its own store is kept,
or when it loads what another has stored. It says that such a key is gone when
the daemon has removed it, whoever the room was for. While the daemon is away it
says nothing: what is stored comes back with the next snapshot, and what does
not is said then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Announcements:
    """The events that nobody has taken yet. It has no lock: it is its session's."""

    def __init__(self, enabled: bool) -> None:
        """Gathers nothing unless enabled."""
        self._enabled = enabled
        self._said: set[bytes] = set()  # keys that events said are stored
        self._events: list[tuple[bool, bytes]] = []

    def stored(self, keys: Iterable[bytes]) -> None:
        """These keys are stored."""
        if self._enabled:
            new = [k for k in keys if k not in self._said]
            self._said.update(new)
            self._events += [(True, k) for k in new]

    def removed(self, keys: Iterable[bytes]) -> None:
        """These keys are gone."""
        if self._said:
            gone = self._said.intersection(keys)
            self._said -= gone
            self._events += [(False, k) for k in gone]

    def only(self, held: Collection[bytes]) -> None:
        """No other keys than these are stored."""
        if self._said:
            self.removed([k for k in self._said if k not in held])

    def take(self) -> list[tuple[bool, bytes]]:
        """What was stored (true) and removed (false) since the last call, in order."""
        out, self._events = self._events, []
        return out
