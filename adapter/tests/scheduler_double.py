"""vLLM's scheduler without a GPU: requests of whole prompts, in each release's order.

There is no prefix cache, so everything that the tier does not have is computed
and stored. Transfers take a step: loads are completed behind the step that
prepared them, stores behind the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_double import Engine

CHUNK = 32


@dataclass
class Job:
    """A transfer under way. Of a store the copy is made when it is completed."""

    request: Request
    keys: list[bytes]
    spec: Any
    load: bool
    age: int = 0


@dataclass
class Request:
    """A prompt on its way through the engine."""

    name: str
    keys: list[bytes]
    params: Any = None
    ctx: Any = None
    hit: int = 0  # chunks that were loaded
    stored: int = 0  # chunks that were offered
    computed: int = 0
    started: bool = False
    loading: bool = False
    done: bool = False
    retries: int = 0
    refused: bool = False  # None from prepare_store in this step
    hits: list[int] = field(default_factory=list)  # chunks per lookup pass


class Scheduler:
    """Steps an engine until every request has ended."""

    def __init__(self, engine: Engine, batch: int = 4) -> None:
        self.engine, self.batch = engine, batch
        self.requests: list[Request] = []
        self.jobs: list[Job] = []
        self.starved = 0  # steps in which no blocks are free
        self.steps = 0

    def add(self, name: str, keys: Sequence[bytes], params: Any = None) -> Request:
        """A request arrives."""
        e = self.engine
        r = Request(name, list(keys), params, e.context(name, params))
        self.requests.append(r)
        e.call("on_new_request", r.ctx)
        if e.minor >= 31:
            for i, key in enumerate(r.keys, 1):
                r.ctx._offload_key_positions[key] = i * CHUNK
        return r

    def run(self, limit: int = 2000) -> None:
        """Steps until every request has ended and every job is completed."""
        while self.requests or self.jobs:
            self.step()
            limit -= 1
            assert limit > 0, "requests do not end"

    def step(self) -> None:
        """One step of the scheduler and of the model."""
        e = self.engine
        self.steps += 1
        new = [r.name for r in list(self.requests) if self._admit(r)]
        if e.minor < 33:
            e.end_step(*new)
        for r in self.requests:
            self._store(r)
        for r in [r for r in self.requests if r.done]:
            e.call("on_request_finished", r.ctx)
            self.requests.remove(r)
        if e.minor >= 33:
            e.end_step(*new)
        self._complete()
        e.call("get_stats")
        list(e.call("take_events"))

    def _admit(self, r: Request) -> bool:
        """Looks a waiting request up; whether it is scheduled for the first time."""
        e = self.engine
        if r.started or r.loading:
            return False
        if any(j.request is r for j in self.jobs):
            return False
        hits, later = 0, False
        for key in r.keys:
            answer = e.lookup(key, r.ctx)
            if answer == "MISS":
                break
            later = later or answer == "RETRY"
            hits += answer == "HIT"
        if e.minor <= 30:
            e.call("touch", list(r.keys), r.ctx)
        if later:
            r.retries += 1
            return False
        r.hits.append(hits)
        if self.starved > 0:
            self.starved -= 1
            return False
        if hits:
            keys = r.keys[:hits]
            spec = e.call("prepare_load", list(keys), r.ctx)
            e.check(spec, keys)
            self.jobs.append(Job(r, keys, spec, load=True))
            e.loaded += keys
            r.hit = r.stored = r.computed = hits
            r.loading = True
            return False
        r.started = True
        return True

    def _store(self, r: Request) -> None:
        """Computes a step's chunks of a running request and offers them."""
        e = self.engine
        if not r.started or r.done:
            return
        if not r.refused:
            r.computed = min(r.computed + self.batch, len(r.keys))
        r.refused = False
        offer = r.keys[r.stored : r.computed]
        if offer:
            out = e.store(offer, r.ctx)
            if out is None:
                r.refused = True
                return
            r.stored = r.computed
            if out.keys_to_store:
                job = Job(r, list(out.keys_to_store), out.store_spec, load=False)
                self.jobs.append(job)
                if e.minor <= 30:
                    e.call("touch", list(r.keys), r.ctx)
        r.done = r.computed == len(r.keys)

    def _complete(self) -> None:
        """Behind the model's step: what has been transferred is completed."""
        e = self.engine
        for j in list(self.jobs):
            j.age += 1
            if j.age < (1 if j.load else 2):
                continue
            self.jobs.remove(j)
            if j.load:
                e.check(j.spec, j.keys)
            else:
                e.write(j.spec, j.keys)
            name = "complete_load" if j.load else "complete_store"
            e.call(name, set(j.keys), j.request.ctx)
            self._report(j)
            if j.load:
                j.request.loading, j.request.started = False, True

    def _report(self, j: Job) -> None:
        """Ranks report the end, unless the daemon is away just now."""
        if not self.engine.reports:
            return
        for r in self.engine.ranks:
            r.ended(j.spec.job)

    def preempt(self, r: Request) -> None:
        """Takes a running request's blocks away: all of it is offered again."""
        r.started = False
        r.stored = r.computed = 0

    def reset(self) -> None:
        """The weights change: jobs in flight are never completed."""
        e = self.engine
        stale, self.jobs = self.jobs, []
        e.call("reset_cache")
        e.version += 1
        for r in self.requests:
            r.stored = r.computed = r.hit
            if r.loading:
                r.loading, r.started = False, True
        self.stale = stale

    def flush(self) -> None:
        """The ranks end the jobs from before a reset, and 0.33 says so."""
        e = self.engine
        for j in self.stale:
            if not j.load:
                e.version -= 1
                e.write(j.spec, j.keys)
                e.version += 1
            for r in e.ranks:
                r.ended(j.spec.job)
        if e.minor >= 33:
            e.call("on_reset_flushed")
