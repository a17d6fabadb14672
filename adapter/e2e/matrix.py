"""Every release with every kind of model, alone and on two ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import environment
from rig import Failed, Setting, Stage
from scenarios import check

TOKENS = 1500


def options(model: str, release: str, tp: int) -> dict[str, Any]:
    """What a model needs beyond engine.py's own settings, so that the others evict A."""
    minor = int(release.split(".")[1])
    o: dict[str, Any] = {}
    if model in ("gptoss", "gemma3"):
        groups = 2 if model == "gptoss" else 4
        o["num_gpu_blocks_override"] = 40 * groups + 50
    if model == "gptoss" and minor == 28:
        o["dtype"] = "bfloat16"
    if model == "qwen3next":
        o |= {
            "dtype": "bfloat16",  # the recurrence on CPUs knows no other
            "mamba_cache_mode": "align",
            "num_gpu_blocks_override": 44,
        }
        if minor <= 28:
            o["mamba_ssm_cache_dtype"] = "float32"
    if tp > 1:
        o["tensor_parallel_size"] = tp
    return o


def cell(s: Setting, model: str, release: str, tp: int) -> str:
    """A, others that evict it, A, kill -9, A: full hits and equal tokens, or Failed."""
    environ = dict(s.environment)
    if tp > 1:
        environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
    s = replace(s, environment=environ)
    how: dict[str, Any] = {"in_process": tp == 1, **options(model, release, tp)}
    with Stage(s) as stage:
        d = stage.daemon(mib=512)
        e = stage.engine(s.model(model), d.socket, **how)
        names = (
            "ABCDEF" if model == "qwen3next" else "ABC"
        )  # its blocks are few and large
        first = {n: e.ask(n, tokens=TOKENS)["results"][0] for n in names}
        for n, r in first.items():
            check(r["cached"] == 0, f"{n} had {r['cached']} tokens cached")
        again = e.ask("A", tokens=TOKENS)["results"][0]
        loaded = d.status()["counters"]["loaded_keys"]
        e.kill()
        e = stage.engine(s.model(model), d.socket, **how)
        risen = e.ask("A", tokens=TOKENS)["results"][0]
        want = first["A"]["output"]
        check(again["output"] == want, f"A again: {again['output']}, cold {want}")
        check(
            risen["output"] == want, f"A after kill -9: {risen['output']}, cold {want}"
        )
        check(loaded > 0, "nothing was loaded")
        block = 288 if model == "qwen3next" else 32
        whole = TOKENS // block * block
        for what, r in (("again", again), ("after kill -9", risen)):
            check(
                r["cached"] >= whole,
                f"A {what}: {r['cached']} of {whole} tokens cached",
            )
        keys = d.status()["counters"]["loaded_keys"]
        groups = len(d.status()["namespaces"][0]["groups"])
        return f"{again['cached']} and {risen['cached']} of {TOKENS} tokens, {keys} keys loaded, {groups} groups"


def run(s: Setting, releases: list[str], names: list[str], tps: list[int]) -> bool:
    """Runs all cells, prints one line each, and tells whether every one was good."""
    bad = total = 0
    for release in releases:
        folder, more = environment.overlay(release)
        of = replace(s, overlay=folder, environment={**s.environment, **more})
        for model in names:
            for tp in tps:
                total += 1
                began = time.monotonic()
                try:
                    saw, word = cell(of, model, release, tp), "ok  "
                except Failed as e:
                    saw, word, bad = str(e), "FAIL", bad + 1
                took = time.monotonic() - began
                print(
                    f"{word} {release} {model:9} tp{tp} {took:5.0f} s  {saw}",
                    flush=True,
                )
    print(f"{total - bad} of {total} cells passed", flush=True)
    return bad == 0
