"""What a real engine must show with a real daemon.

A scenario yields a line for each thing that it has seen, and raises Failed where one
does not hold. Engines take long to start, so a scenario shows what it can with one.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from rig import Daemon, Engine, Failed, Stage, until

TOKENS = 1500
BLOCK = 32
WHOLE = TOKENS // BLOCK * BLOCK  # of a document that a cache can serve
DEADLINE = 0.005  # seconds that a store may wait for the daemon by default
SLACK = 0.25  # seconds beyond it for a machine that does other things as well

Scenario = Callable[[Stage], Iterator[str]]
ALL: dict[str, Scenario] = {}
SHORT = ("life",)


def scenario(run: Scenario) -> Scenario:
    ALL[run.__name__] = run
    return run


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Failed(what)


def one(engine: Engine, name: str) -> tuple[int, list[int]]:
    """Cached tokens and output of one document."""
    r = engine.ask(name)["results"][0]
    return r["cached"], r["output"]


def cold(engine: Engine, *names: str) -> dict[str, list[int]]:
    """Outputs of documents that nobody has seen, one after the other."""
    out = {}
    for n in names:
        cached, out[n] = one(engine, n)
        check(cached == 0, f"{n} had {cached} tokens cached before it was ever asked")
    return out


def served(engine: Engine, name: str, want: list[int]) -> None:
    """The document is served whole, with the tokens of the cold run."""
    cached, output = one(engine, name)
    check(cached == WHOLE, f"{name}: {cached} of {WHOLE} tokens from the cache")
    check(
        output == want, f"{name}: other tokens than in the cold run: {output}, {want}"
    )


def hits_again(engine: Engine, names: str, want: dict[str, list[int]]) -> None:
    """Hits come back, at the latest when the adapter has attached anew."""
    deadline = time.monotonic() + 60
    while True:
        hits = [one(engine, n) for n in names]
        for n, (_, output) in zip(names, hits, strict=True):
            check(output == want[n], f"{n}: other tokens: {output}, {want[n]}")
        if all(cached == WHOLE for cached, _ in hits):
            return
        check(time.monotonic() < deadline, f"no hits after 60 s: {hits}")


def evict(e: Engine) -> None:
    """Fills the engine's own cache with documents of no interest."""
    e.ask("X", output=1)
    e.ask("Y", output=1)


def _life(s: Stage, in_process: bool) -> Iterator[str]:
    d = s.daemon()
    model = s.setting.model("dense")
    e = s.engine(model, d.socket, in_process=in_process)
    want = cold(e, "A", "B", "C")
    served(e, "A", want["A"])
    loaded = d.status()["counters"]["loaded_keys"]
    check(loaded == WHOLE // BLOCK, f"{loaded} keys loaded")
    yield f"A, B, C, A: {WHOLE} of {TOKENS} tokens cached, {loaded} keys loaded, equal tokens"

    evict(e)
    turned = d.flip()
    cached, output = one(e, "A")
    check(cached == WHOLE, f"A: {cached} tokens cached")
    check(output != want["A"], "the arena was turned over and the tokens are the same")
    evict(e)
    d.flip()
    served(e, "A", want["A"])
    yield f"{turned:,} bytes of the arena turned: other tokens; turned back: equal"

    e.kill()
    e = s.engine(model, d.socket, in_process=in_process)
    served(e, "A", want["A"])  # the first request of its life
    served(e, "B", want["B"])
    yield f"kill -9 of the engine, A first: {WHOLE} of {TOKENS} tokens cached, equal tokens"


@scenario
def life(s: Stage) -> Iterator[str]:
    """Eviction, a control with other bytes, kill -9 and restart; all in one process."""
    return _life(s, in_process=True)


@scenario
def life_processes(s: Stage) -> Iterator[str]:
    """The same with vLLM's own processes for the scheduler and the worker."""
    return _life(s, in_process=False)


@scenario
def second(s: Stage) -> Iterator[str]:
    """What one engine has stored, another one hits."""
    d = s.daemon()
    a = s.engine(s.setting.model("dense"), d.socket)
    want = cold(a, "A", "B")
    b = s.engine(s.setting.model("dense"), d.socket)
    served(b, "A", want["A"])
    served(b, "B", want["B"])
    want |= cold(b, "C")
    served(a, "C", want["C"])
    n = len(d.status()["engines"])
    check(n == 2, f"{n} engines attached")
    yield "2 engines, each hits what the other stored, equal tokens"


def under_load(
    d: Daemon, e: Engine, want: dict[str, list[int]], hurt: int
) -> dict[str, Any]:
    """Answers many documents at once, and sends the daemon a signal meanwhile."""
    names = sorted(want) * 8
    before = d.status()["traffic"]["requests"]
    e.tell({"ask": names, "tokens": TOKENS, "output": 16})
    until(
        "requests are under way",
        lambda: d.status()["traffic"]["requests"] >= before + 3,
    )
    d.signal(hurt)
    out = e.hear()
    check(len(out["results"]) == len(names), f"{len(out['results'])} answers")
    for r in out["results"]:
        n = r["document"]
        check(r["output"] == want[n], f"{n}: other tokens: {r['output']}, {want[n]}")
    return out


@scenario
def daemon(s: Stage) -> Iterator[str]:
    """No daemon at the boot; kill -9 and SIGSTOP of the daemon under load."""
    d = s.daemon(start=False)
    e = s.engine(
        s.setting.model("dense"),
        d.socket,
        extra={"kvlift_deadline_ms": DEADLINE * 1000},
    )
    want = cold(e, *"ABCDEF")
    check(one(e, "A")[0] == 0, "a hit without a daemon")
    d.start()
    hits_again(e, "ABC", want)
    yield "absent at the boot: ran without one, hits after it came, equal tokens"

    out = under_load(d, e, want, signal.SIGKILL)
    evict(e)
    check(one(e, "A")[1] == want["A"], "without a daemon: other tokens")
    d.start()
    hits_again(e, "ABC", want)
    keys = d.status()["adoption"]["ready"]
    yield (
        f"kill -9 under load: {len(out['results'])} requests finished with equal tokens; "
        f"{keys} keys adopted, hits again with the same engine"
    )

    out = under_load(d, e, want, signal.SIGSTOP)
    more = e.ask(*"GHI", tokens=TOKENS)  # to be stored; nobody answers
    longest = max((r["manager"] for r in (out, more)), key=lambda m: m["longest_s"])
    took, limit = longest["longest_s"], DEADLINE + SLACK
    check(took <= limit, f"{longest['longest']} took {took:.3f} s, {limit} are allowed")
    d.signal(signal.SIGCONT)
    hits_again(e, "ABC", want)
    yield (
        f"SIGSTOP under load: {len(out['results']) + 3} requests finished; the longest call of "
        f"the manager took {took * 1e3:.1f} ms, the deadline is {DEADLINE * 1e3:.0f} ms"
    )


@scenario
def full(s: Stage) -> Iterator[str]:
    """A tier that holds one document and a half: equal tokens, nothing breaks."""
    d = s.daemon(mib=2)
    e = s.engine(s.setting.model("dense"), d.socket)
    want = cold(e, *"ABC")
    for n in "ABCABC":
        cached, output = one(e, n)
        check(output == want[n], f"{n}: other tokens ({cached} cached)")
    together = e.ask(*"ABCABC")
    for r in together["results"]:
        check(r["output"] == want[r["document"]], f"{r['document']}: other tokens")
    counters = d.status()["counters"]
    gone = sum(counters["evicted_keys"].values())
    check(
        gone + counters["refused_keys"] > 0,
        f"nothing was evicted or refused: {counters}",
    )
    yield f"equal tokens; {gone} keys evicted, {counters['refused_keys']} refused"


@scenario
def wrong_socket(s: Stage) -> Iterator[str]:
    """A socket that is none, and one with nobody behind it."""
    folder = s.setting.work / "nothing"
    folder.mkdir(exist_ok=True)
    lines = []
    for socket in (str(folder), str(folder / ("x" * 200))):
        with Stage(s.setting) as inner:
            e = inner.engine(s.setting.model("dense"), socket)
            cold(e, "A")
            said = e.said("no daemon answers")
            check(bool(said), f"the log does not say what is wrong with {socket}")
            check(len(said) < 8, f"{len(said)} lines about it")
            lines.append(len(said))
    yield f"ran without a tier, {lines} lines in the log"


@scenario
def weights(s: Stage) -> Iterator[str]:
    """Other weights under the same name are another namespace."""
    d = s.daemon()
    name = s.setting.work / "model"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(name)
    outputs = []
    for seed in (7, 8, 7):
        shutil.copytree(s.setting.model("dense", seed), name)
        with Stage(s.setting) as inner:
            e = inner.engine(str(name), d.socket)
            outputs.append(one(e, "A"))
        shutil.rmtree(name)
    (first, a), (other, b), (again, c) = outputs
    check(first == 0 and other == 0, f"the other weights had {other} tokens cached")
    check(a != b, "two models answer the same")
    check(again == WHOLE and c == a, f"the first weights again: {again} tokens cached")
    spaces = {n["id"] for n in d.status()["namespaces"]}
    check(len(spaces) == 2, f"{len(spaces)} namespaces")
    yield "2 namespaces of one name, no hit across, a full hit for the first again"


@scenario
def reset(s: Stage) -> Iterator[str]:
    """After a reset nothing is served that was stored before it."""
    d = s.daemon()
    e = s.engine(s.setting.model("dense"), d.socket)
    want = cold(e, "A", "B", "C")
    served(e, "A", want["A"])
    e.tell({"reset": True})
    e.hear()
    cached, output = one(e, "A")
    check(cached == 0, f"{cached} tokens cached after a reset")
    check(output == want["A"], "other tokens after a reset")
    evict(e)
    served(e, "A", want["A"])
    yield "a miss after it, stored anew, hit"


@scenario
def spoiled(s: Stage) -> Iterator[str]:
    """A store that fails in the worker is never served, and vLLM never hears of it."""
    d = s.daemon()
    e = s.engine(s.setting.model("dense"), d.socket)
    e.tell({"spoil": True})
    e.hear()
    want = cold(e, "A", "B", "C")
    cached, output = one(e, "A")
    check(cached == 0, f"{cached} tokens of a store that failed")
    check(output == want["A"], "other tokens")
    counters = d.status()["counters"]
    check(counters["stored_keys"] == 0, f"{counters['stored_keys']} keys committed")
    e.tell({"spoil": False})
    e.hear()
    evict(e)
    one(e, "A")  # stored at last
    evict(e)
    served(e, "A", want["A"])
    yield f"{counters['aborted_keys']} keys aborted, none committed; stored later and served"


@scenario
def chunks(s: Stage) -> Iterator[str]:
    """Four blocks to a chunk."""
    d = s.daemon()
    e = s.engine(s.setting.model("dense"), d.socket, extra={"blocks_per_chunk": 4})
    want = cold(e, "A", "B", "C")
    cached, output = one(e, "A")
    whole = TOKENS // (4 * BLOCK) * 4 * BLOCK
    check(cached == whole, f"{cached} of {whole} tokens cached")
    check(output == want["A"], "other tokens")
    yield f"{cached} of {TOKENS} tokens cached, equal"


@scenario
def small_shm(s: Stage) -> Iterator[str]:
    """An engine whose own /dev/shm is smaller than the arena: the descriptor works."""
    unshare = ("unshare", "-m", "sh", "-c")
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    can = subprocess.run(
        [*unshare, mount, "sh", "true"], capture_output=True, check=False
    )
    if can.returncode:
        yield "LEFT OUT: no mount namespace can be made here"
        return
    d = s.daemon(mib=256)
    e = s.engine(s.setting.model("dense"), d.socket, prefix=(*unshare, mount, "sh"))
    want = cold(e, "A", "B", "C")
    served(e, "A", want["A"])
    yield "arena of 256 MiB, /dev/shm of 64: full hit, equal tokens"
