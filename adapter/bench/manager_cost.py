#!/usr/bin/env python3
"""What a scheduler pays for its manager: kvlift's beside vLLM's own, in one run.

Both replay the same requests of a trace in Mooncake's format through vLLM's own
interface, in turn: on_new_request, lookups until the first miss, prepare_load and
complete_load of the hits, on_schedule_end, prepare_store and complete_store of
the rest (--step-blocks at a time), on_request_finished, get_stats. The first
lookup of a step applies what the daemon has said since; the further ones show
what a key costs. kvlift's manager talks to
a real daemon, which this starts; vLLM's CPUOffloadingManager is in process. No
data is moved. Only calls of the managers are timed. The deadline of a reserve is
long by default, so that a busy machine makes nobody skip stores.

It needs a Python with vLLM, and ./kvlift (make build):

    python adapter/bench/manager_cost.py testdata/traces/*.jsonl.gz
"""

from __future__ import annotations

import argparse
import gc
import gzip
import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from engine_double import Rank, until
from real_daemon import Daemon, missing
from stand_in import config
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvlift_vllm.spec import manager_of

BLOCK_TOKENS = 512
CLOCKS = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}
PART = 4096  # bytes of a block: a page
KINDS = ("first", "further", "load", "step", "store", "evict", "finish")
LIMITS = {"further": 0.5, "lookup": 0.5, "load": 0.5, "store+evict": 1.0}

Requests = list[list[bytes]]


def read(path: str, limit: int) -> Requests:
    """The block digests of each request of a trace."""
    out: Requests = []
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as f:
        for line in f:
            ids = json.loads(line)["hash_ids"]
            out.append([hashlib.sha256(b"%d" % i).digest() for i in ids])
            if limit and len(out) == limit:
                break
    return out


def replay(
    mgr: Any, requests: Requests, step: int, clock: str
) -> tuple[dict[str, float], Any]:
    """Seconds and keys of each kind of call, and (hits, blocks, refused, written)."""
    now, hit = CLOCKS[clock], LookupResult.HIT
    ns, keys_n = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    hits = refs = refused = written = 0
    gc.collect()
    gc.freeze()
    for rid, digests in enumerate(requests):
        # Fresh key objects for each request, as the engine makes them.
        keys = [make_offload_key(d, 0) for d in digests]
        ctx = ReqContext(req_id=str(rid))
        for pos, key in enumerate(keys, 1):
            ctx.set_offload_key_position(key, pos * BLOCK_TOKENS)
        t = now()
        mgr.on_new_request(ctx)
        ns["finish"] += now() - t

        m = 0
        t = now()
        if mgr.lookup(keys[0], ctx) is hit:
            m = 1
            t, first = now(), t
            ns["first"] += t - first
            for key in keys[1:]:
                if mgr.lookup(key, ctx) is not hit:
                    break
                m += 1
            ns["further"] += now() - t
            keys_n["further"] += min(m + 1, len(keys)) - 1
        else:
            ns["first"] += now() - t
        keys_n["first"] += 1
        hits, refs = hits + m, refs + len(keys)

        if m:
            loaded = keys[:m]
            t = now()
            mgr.prepare_load(loaded, ctx)
            mgr.complete_load(set(loaded), ctx)
            ns["load"] += now() - t
            keys_n["load"] += m

        context = ScheduleEndContext([str(rid)], ())
        t = now()
        mgr.on_schedule_end(context)
        ns["step"] += now() - t
        keys_n["step"] += len(keys)

        rest = keys[m:]
        for i in range(0, len(rest), step):
            part = rest[i : i + step]
            t = now()
            out = mgr.prepare_store(part, ctx)
            if out is not None and out.keys_to_store:
                mgr.complete_store(set(out.keys_to_store), ctx)
            t = now() - t
            if out is None or not out.keys_to_store:
                refused += len(part)
            if out is None:
                continue
            kind = "evict" if out.evicted_keys else "store"
            ns[kind] += t
            keys_n[kind] += len(part)
            written += len(out.keys_to_store)

        t = now()
        mgr.on_request_finished(ctx)
        ns["finish"] += now() - t
        keys_n["finish"] += len(keys)
        t = now()
        mgr.get_stats()
        ns["step"] += now() - t
    gc.unfreeze()
    us = {k: ns[k] / 1e3 / keys_n[k] for k in KINDS if keys_n[k]}
    looked = keys_n["first"] + keys_n["further"]
    us["lookup"] = (ns["first"] + ns["further"]) / 1e3 / looked
    both = keys_n["store"] + keys_n["evict"]
    us["store+evict"] = (ns["store"] + ns["evict"]) / 1e3 / max(both, 1)
    us["all"] = sum(ns.values()) / 1e3 / refs
    return us, (hits, refs, refused, written)


def ours(
    requests: Requests, capacity: int, step: int, deadline: float, clock: str
) -> Any:
    """A replay through kvlift's manager and a daemon of its own."""
    ram = -(-capacity * PART // (1 << 20)) << 20
    keys = str(capacity)
    d = Daemon(f"{ram}B", "--max-keys", keys)
    try:
        c = config(
            d.socket,
            ((BLOCK_TOKENS, ("model.layers.0.self_attn.attn",)),),
            kvlift_deadline_ms=deadline,
        )
        rank = Rank(c, 0, (PART,))
        rank.attach()
        mgr = manager_of(c, emits=False)
        session = mgr._session
        until("attached", lambda: session.attached)
        out = replay(mgr, requests, step, clock)
        late = session.counters.late
        mgr.shutdown()
        rank.close()
        return *out, late
    finally:
        d.close()


def main() -> None:
    """Prints a table per trace and share of its distinct blocks."""
    ap = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    ap.add_argument("trace", nargs="+")
    ap.add_argument("--fraction", type=float, default=0.1, help="of distinct blocks")
    ap.add_argument("--step-blocks", type=int, default=16, help="of one prepare_store")
    ap.add_argument("--policy", default="lru", help="of vLLM's manager")
    ap.add_argument("--deadline-ms", type=float, default=1000)
    ap.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: for a busy machine"
    )
    ap.add_argument("--runs", type=int, default=3)
    ap.add_argument("--limit", type=int, default=0, help="only the first requests")
    ap.add_argument("--json", action="store_true")
    a = ap.parse_args()
    if why := missing():
        sys.exit(why)
    for path in a.trace:
        requests = read(path, a.limit)
        capacity = max(1, int(a.fraction * len({d for r in requests for d in r})))
        runs: dict[str, list[dict[str, float]]] = {"kvlift": [], "vLLM": []}
        for _ in range(a.runs):
            us, theirs = replay(
                CPUOffloadingManager(num_chunks=capacity, cache_policy=a.policy),
                requests,
                a.step_blocks,
                a.clock,
            )
            runs["vLLM"].append(us)
            us, mine, late = ours(
                requests, capacity, a.step_blocks, a.deadline_ms, a.clock
            )
            runs["kvlift"].append(us)
        report(Path(path).name, capacity, runs, theirs, mine, late, a.json)


def report(
    name: str,
    capacity: int,
    runs: dict[str, list[dict[str, float]]],
    theirs: Any,
    mine: Any,
    late: int,
    as_json: bool,
) -> None:
    """The medians of the runs, and of their ratios pair by pair."""
    rows = {}
    for kind in (*KINDS, "lookup", "store+evict", "all"):
        pairs = zip(runs["kvlift"], runs["vLLM"], strict=True)
        ratios = [k[kind] / v[kind] for k, v in pairs if v.get(kind) and kind in k]
        if ratios:
            at = {
                who: statistics.median([r.get(kind, 0.0) for r in runs[who]])
                for who in runs
            }
            spread = (min(ratios), max(ratios))
            rows[kind] = (at, statistics.median(ratios), spread)
    if as_json:
        values = {
            kind: {"us": at, "ratio": ratio, "ratio_min_max": spread}
            for kind, (at, ratio, spread) in rows.items()
        }
        print(json.dumps({"trace": name, "capacity": capacity, "per_key": values}))
        return
    print(f"{name}, {capacity:,} blocks, load {os.getloadavg()[0]:.1f}")
    for who, (hits, refs, refused, written) in (("kvlift", mine), ("vLLM", theirs)):
        print(
            f"  {who:7} {hits:,} of {refs:,} blocks hit, {written:,} written, "
            f"{refused:,} refused"
        )
    if late:
        print(f"  in the last run {late} reserves were late")
    print(f"  {'µs per key':12} {'kvlift':>8} {'vLLM':>8} {'ratio':>7}")
    for kind, (at, ratio, (lo, hi)) in rows.items():
        limit = f"  at most {LIMITS[kind]}" if kind in LIMITS else ""
        print(
            f"  {kind:12} {at['kvlift']:8.3f} {at['vLLM']:8.3f} {ratio:7.2f}"
            f"  ({lo:.2f}–{hi:.2f}){limit}"
        )


if __name__ == "__main__":
    main()
