"""The manager: what vLLM's scheduler asks about the tier.

It fits every release from 0.27.1 to 0.33.0, whatever the order of calls. vLLM
calls it from one thread. Nothing but ``prepare_load`` can raise into vLLM: an
error of the adapter is logged once, and from there on everything is a miss.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeVar

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)

from . import wire
from .geometry import Group, suffixes
from .mirror import extents_of
from .requests import Request, Transfer, hint_of, take
from .reservation import Reservation, Skipped
from .session import Session
from .specs import ArenaSpec
from .stats import Stats

try:  # since 0.32
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    CacheHitSource = None

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
except ImportError:  # it has moved: nothing is counted
    OffloadingConnectorStats = None

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY

F = TypeVar("F", bound=Callable[..., Any])


def _open(otherwise: Callable[..., Any]) -> Callable[[F], F]:
    """Makes a method fail open: an error of ours becomes what ``otherwise`` says."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: KvliftManager, *args: Any, **kw: Any) -> Any:
            try:
                return method(self, *args, **kw)
            except Exception as e:  # noqa: BLE001  # whatever it is, the engine goes on
                self._failed(method.__name__, e)
                return otherwise(self)

        return guarded  # type: ignore[return-value]

    return wrap


class KvliftManager(OffloadingManager):
    """vLLM's view of a session."""

    def __init__(
        self,
        session: Session,
        groups: Sequence[Group],
        log: logging.Logger,
        events: bool = False,
        info: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the session over, which has been started or never will be.

        groups are the engine's, in its order; info is what ``config_info`` says.
        """
        self._session = session
        self._groups = groups
        self._position = suffixes(groups)
        self._packed = {
            end: at.to_bytes(2, "little") for end, at in self._position.items()
        }
        # Positions of a group whose kind is a guess would say what is not so.
        self._placed = all(g.certain for g in groups)
        self._log, self._clock = log, clock
        self._emits = events
        self._info = dict(info or {})
        self._running: dict[str, Request] = {}
        self._requests = 0
        self._stats = Stats()
        self._errors = 0

    # Lookups: one key a call, thousands in a step.

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether a key can be loaded, from the mirror alone."""
        session = self._session
        if key in session.hits:
            return HIT
        if session.settled:
            return MISS
        return self._lookup(key, req_context)

    @_open(lambda _: MISS)
    def _lookup(self, key: bytes, ctx: Any) -> LookupResult:
        """A lookup that opens a window, or one that has to be put off."""
        session = self._session
        session.open()
        if key in session.hits:
            return HIT
        if session.expecting and self._request(ctx).waits(self._clock()):
            return RETRY
        return MISS

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """What a loaded key came from: the host's memory."""
        return CacheHitSource.HOST if CacheHitSource is not None else None

    # Loads.

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> ArenaSpec:
        """Pins what this step's lookups hit.

        RuntimeError for a key that none of them has hit: nobody vouches for its
        bytes, and there is no way to say so.
        """
        wanted, r = list(keys), self._request(req_context)
        hits = self._session.hits
        try:
            copies = [hits[k] for k in wanted]
        except KeyError:
            raise RuntimeError(
                "kvlift: vLLM loads a key that no lookup of this step has hit"
            ) from None
        jobs = self._session.pin(r.number, copies)
        groups = self._groups_of(wanted)
        if jobs:
            r.loads.append(Transfer(jobs, wanted))
            r.hit_tokens = max(r.hit_tokens, self._tokens(groups))
            self._stats.add("loaded_keys", len(wanted))
            if self._emits:
                self._session.announce(wanted)
        counts, extents = extents_of(copies)
        return self._spec(jobs[0] if jobs else 0, b"", groups, counts, extents)

    @_open(lambda _: None)
    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Every rank has loaded these keys of a request."""
        done = take(self._request(req_context).loads, keys)
        if done is not None:
            self._session.unpin(done.jobs)

    # Stores.

    @_open(lambda self: self._nothing())
    def prepare_store(
        self, keys: Collection[bytes], req_context: Any
    ) -> PrepareStoreOutput | None:
        """Asks the daemon for room: the one call that waits, up to the deadline.

        What is stored already is left out, and so is what does not fit: of a
        batch the longest head is stored. None (which vLLM offers again) only for
        a passing reason, and RETRIES times in a request.
        """
        offered, r = list(keys), self._request(req_context)
        if not offered or len(offered[0]) > wire.MAX_KEY:
            self._session.held(r.number, ())
            return self._nothing()
        session = self._session
        if session.knows(offered[0]) and session.held(r.number, offered):
            self._stats.add("present_keys", len(offered))
            return self._nothing()
        if len(offered) > wire.MAX_OFFERS:
            rest = len(offered) - wire.MAX_OFFERS
            self._stats.add("refused_keys", rest, "too-many")
            offered = offered[: wire.MAX_OFFERS]
        records = self._records(offered, r)
        out = session.reserve(r.number, offered, records)
        if isinstance(out, Skipped):
            self._stats.add("skipped_keys", len(offered), out.value)
            again = out is Skipped.LATE and r.retry()
            return None if again else self._nothing()
        if out.refused:
            reason = wire.REASONS[min(out.reason, len(wire.REASONS) - 1)]
            self._stats.add("refused_keys", out.refused, reason)
        self._stats.add("present_keys", out.present)
        if not out.job:
            waiting = out.refused and out.reason == wire.WAITING
            return None if waiting and r.retry() else self._nothing(out.removed)
        return self._stored(out, r)

    def _stored(self, out: Reservation, r: Request) -> PrepareStoreOutput:
        self._stats.add("stored_keys", len(out.keys))
        r.stores.append(Transfer((out.job,), out.keys))
        groups = self._groups_of(out.keys)
        spec = self._spec(out.job, out.mark, groups, out.counts, out.extents)
        return PrepareStoreOutput(
            keys_to_store=out.keys, store_spec=spec, evicted_keys=list(out.removed)
        )

    @_open(lambda _: None)
    def complete_store(
        self, keys: Collection[bytes], req_context: Any, success: bool = True
    ) -> None:
        """Every rank has ended its copies of these keys of a request."""
        done = take(self._request(req_context).stores, keys)
        if done is not None and not self._session.commit(done.jobs[0], success):
            self._log.error("kvlift: %d keys are not kept: a copy failed", len(keys))

    # Requests and steps.

    @_open(lambda _: RequestOffloadingContext())
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """A request begins."""
        r = self._request(req_context)
        self._running[req_context.req_id] = r
        now = int(time.time() * 1000)
        begin = wire.encode_begin(r.number, now, str(req_context.req_id))
        self._session.post(wire.BEGIN, begin)
        return RequestOffloadingContext()

    @_open(lambda _: None)
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Up to 0.30: the keys of a group that a request has so far, used or not."""
        listed = keys if isinstance(keys, list) else list(keys)
        if not listed:
            return
        r, at = self._request(req_context), self._position[listed[0][-4:]]
        g = self._groups[at]
        new = r.learn(at, listed, g.chunk_tokens, g.kind == "full")
        if new:
            self._session.touch(r.number, new)

    @_open(lambda _: None)
    def on_schedule_end(self, context: Any) -> None:
        """A step has been decided: the window closes, unless a store has closed it."""
        for req_id in context.new_req_ids:
            r = self._running.get(req_id)
            if r is not None:
                self._use(r)
        self._session.step_end()

    @_open(lambda _: None)
    def on_request_finished(self, req_context: Any) -> None:
        """A request has ended; jobs of it may be completed later."""
        r = self._request(req_context)
        self._running.pop(req_context.req_id, None)
        self._use(r)
        hint = hint_of(req_context.kv_transfer_params)
        finish = wire.encode_finish(r.number, r.prompt_tokens, r.hit_tokens, hint)
        self._session.post(wire.FINISH, finish)

    @_open(lambda _: None)
    def reset_cache(self) -> None:
        """The same keys will have other bytes: forget everything."""
        for r in self._running.values():
            r.loads, r.stores = [], []
        self._session.reset()

    @_open(lambda _: None)
    def on_reset_flushed(self) -> None:
        """Since 0.33: every rank has ended every job from before a reset."""
        self._session.reset_flushed()

    # What vLLM reports.

    @_open(lambda _: ())
    def take_events(self) -> Iterable[OffloadingEvent]:
        """KV events since the last call, equal ones in a row together."""
        out: list[OffloadingEvent] = []
        for stored, key in self._session.take_events():
            if out and out[-1].removed is not stored:
                out[-1].keys.append(key)
            else:
                out.append(
                    OffloadingEvent(keys=[key], medium=Medium.CPU, removed=not stored)
                )
        return out

    @_open(lambda _: None)
    def get_stats(self) -> Any:
        """What has changed since the last call, None when nothing has."""
        self._session.flush()
        if OffloadingConnectorStats is None:
            return None
        c, s = self._session.counters, self._stats
        s.level("late_reserves", c.late)
        s.level("reserves", c.reserves)
        s.level("reserve_seconds", c.seconds)
        s.level("failed_stores", c.failed)
        s.level("lost_connections", c.lost)
        s.level("errors", self._errors)
        out = OffloadingConnectorStats()
        changed = s.fill(
            out,
            {
                "attached": int(self._session.attached),
                "known_keys": self._session.keys,
                "breaker_open": int(self._session.breaker_open),
            },
        )
        return out if changed else None

    def config_info(self) -> Sequence[Mapping[str, str]]:
        """Since 0.33: labels of ``vllm:kv_offload_config_info``, the same for life."""
        return [dict(self._info)]

    def shutdown(self) -> None:
        """Lets go of the daemon. Idempotent."""
        try:
            self._session.close()
        except Exception as e:  # noqa: BLE001  # the engine ends in any case
            self._failed("shutdown", e)

    # Helpers.

    def _request(self, ctx: Any) -> Request:
        r: Request | None = ctx.get_state(Request)
        if r is None:
            self._requests += 1
            r = Request(self._requests, getattr(ctx, "_offload_key_positions", None))
            ctx.set_state(r)
        return r

    def _use(self, r: Request) -> None:
        """Says which stored keys a request uses, as far as vLLM has said that anew."""
        if new := r.fresh():
            self._session.touch(r.number, new)

    def _records(self, keys: list[bytes], r: Request) -> list[bytes]:
        """The key records of a reserve."""
        known = r.positions
        if not self._placed:
            places: Iterable[int] = repeat(0)
        elif known is not None:
            places = [known.get(k, 0) for k in keys]
        else:
            places = [r.hash_at.get(k[:-4], 0) for k in keys]
        groups: Iterable[int] = repeat(0)
        if len(self._groups) > 1:
            groups = [self._position[k[-4:]] for k in keys]
        return list(map(wire.KEY.pack, keys, map(len, keys), groups, places))

    def _groups_of(self, keys: list[bytes]) -> bytes:
        """The positions of the keys' groups (u16, little-endian)."""
        if len(self._groups) == 1:
            return bytes(2 * len(keys))
        packed = self._packed
        return b"".join([packed[k[-4:]] for k in keys])

    def _tokens(self, groups: bytes) -> int:
        """Of how many tokens keys of these groups are."""
        if len(self._groups) == 1:
            return len(groups) // 2 * self._groups[0].chunk_tokens
        at = memoryview(groups).cast("H").tolist()
        return max(at.count(i) * g.chunk_tokens for i, g in enumerate(self._groups))

    def _spec(
        self, job: int, mark: bytes, groups: bytes, counts: bytes, extents: bytes
    ) -> ArenaSpec:
        s = self._session
        return ArenaSpec(
            *(job, s.session, s.arena, mark, groups, counts, extents),
            *(s.slots.packed, s.slots.world),
        )

    def _nothing(self, removed: Sequence[bytes] = ()) -> PrepareStoreOutput:
        return PrepareStoreOutput(
            keys_to_store=[],
            store_spec=self._spec(0, b"", b"", b"", b""),
            evicted_keys=list(removed),
        )

    def _failed(self, method: str, error: Exception) -> None:
        """An error of ours: from here on nothing is promised any more."""
        self._errors += 1
        if self._errors == 1:
            self._log.error(
                "kvlift: an error of the adapter in %s; this engine goes on without "
                "the tier until its restart",
                method,
                exc_info=error,
            )
        self._session.give_up()
