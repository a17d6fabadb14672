"""A daemon and engines as processes, for the end-to-end tests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
PATIENCE = (
    250  # ms that a store may wait: what is shown is not how fast this machine is
)


class Failed(AssertionError):
    """A check that did not hold."""


def until(what: str, holds: Callable[[], Any], seconds: float = 30) -> Any:
    """Waits until holds() is true and returns it; Failed when it does not become so."""
    end = time.monotonic() + seconds
    while not (value := holds()):
        if time.monotonic() > end:
            raise Failed(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)
    return value


@dataclass
class Setting:
    """What the machine has: where everything lies, and how an engine is started."""

    python: str  # of the environment that has vLLM
    kvlift: str  # the binary
    package: Path  # folder that holds kvlift_vllm
    models: Path  # folder of checkpoints, made when they are missing
    work: Path  # for logs and sockets
    overlay: str = (
        ""  # folder with the files of another release, before the environment's
    )
    environment: dict[str, str] = field(default_factory=dict)

    def model(self, name: str, seed: int = 7) -> str:
        """The folder of a tiny model, made on first use and kept for other runs."""
        script = HERE / "models.py"
        digest = hashlib.sha256(script.read_bytes()).hexdigest()[:8]
        folder = self.models / f"{name}-{seed}-{digest}"
        if not folder.exists():
            self.models.mkdir(parents=True, exist_ok=True)
            staged = tempfile.mkdtemp(dir=self.models)
            subprocess.run(
                [self.python, str(script), name, staged, str(seed)],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            Path(staged).rename(folder)
        return str(folder)


class Daemon:
    """``kvlift serve`` on an arena of its own, which outlives it."""

    def __init__(self, setting: Setting, mib: int, *flags: str) -> None:
        self.setting, self.flags = setting, flags
        self._folder = tempfile.TemporaryDirectory(prefix="kvlift-e2e-", dir="/dev/shm")
        self.arena = Path(self._folder.name) / "arena"
        self.socket = str(setting.work / f"{self.arena.parent.name}.sock")
        self.log = setting.work / f"{self.arena.parent.name}.log"
        self._mib = mib
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and waits until it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(self.setting.kvlift, "serve", "--arena", str(self.arena)),
                    *("--socket", self.socket, "--ram", f"{self._mib}MiB"),
                    *("--min-idle", "0s", *self.flags),
                ],
                stdout=log,
                stderr=log,
            )
        until("the daemon answers", self.alive)

    def alive(self) -> bool:
        with contextlib.suppress(Failed):
            return bool(self.status())
        return False

    def status(self) -> dict[str, Any]:
        """The status document. Failed when no daemon answers."""
        run = subprocess.run(
            [
                *(self.setting.kvlift, "status", "--json"),
                *("--socket", self.socket, "--timeout", "5s"),
            ],
            capture_output=True,
            check=False,
        )
        if run.returncode:
            raise Failed(run.stderr.decode().strip())
        return json.loads(run.stdout)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._process.wait(30)

    def flip(self) -> int:
        """Turns every bit of the pages that are in use; returns the bytes that were not zero."""
        touched = 0
        with (self.arena / "arena").open("r+b") as f:
            while page := f.read(MIB):
                touched += len(page) - page.count(0)
                f.seek(-len(page), os.SEEK_CUR)
                f.write(bytes(page).translate(_INVERTED))
        return touched

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(30)
        self._folder.cleanup()


_INVERTED = bytes(255 - b for b in range(256))


class Engine:
    """``engine.py`` as a process with children of its own."""

    def __init__(
        self,
        setting: Setting,
        model: str,
        socket: str | None,
        extra: dict[str, Any] | None = None,
        in_process: bool = True,
        prefix: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        """Starts an engine and returns once it is ready.

        ``socket`` is None for an engine without a tier. ``extra`` goes to the
        connector, which is more patient than by default. ``prefix`` are words
        before the command.
        """
        transfer = None
        if socket is not None:
            transfer = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "KvliftSpec",
                    "spec_module_path": "kvlift_vllm",
                    "kvlift_socket": socket,
                    "kvlift_deadline_ms": PATIENCE,
                    **(extra or {}),
                },
            }
        paths = [setting.overlay, str(setting.package)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
            **setting.environment,
        }
        spec = {"model": model, "transfer": transfer, "options": options}
        number = len(list(setting.work.glob("engine-*.log")))
        self.log = setting.work / f"engine-{number}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*prefix, setting.python, str(HERE / "engine.py"), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=setting.work,
                start_new_session=True,
            )
        self.boot = self._answer(300)["ready"]

    def ask(self, *names: str, tokens: int = 1500, output: int = 16) -> dict[str, Any]:
        """Lets it answer documents, all at once, and returns what engine.py says."""
        self.tell({"ask": names, "tokens": tokens, "output": output})
        return self._answer(300)

    def counters(self) -> dict[str, float]:
        """vLLM's metrics by name."""
        self.tell({"counters": True})
        return self._answer(60)

    def tell(self, line: dict[str, Any]) -> None:
        """Sends a line without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The answer to what was told."""
        return self._answer(300)

    def said(self, text: str) -> list[str]:
        """The lines of its log that have this text."""
        log = self.log.read_text(errors="replace")
        return [line for line in log.splitlines() if text in line]

    def kill(self) -> None:
        """SIGKILL for the process and everything below it, all at one time."""
        tree = _descendants(self._process.pid)
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(30)
        until("the engine's processes end", lambda: not any(map(_runs, tree)))

    def close(self) -> None:
        """Ends it in order."""
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
                return
            self.kill()

    def _answer(self, seconds: float) -> dict[str, Any]:
        pipe = self._process.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], seconds)[0]:
            raise Failed(f"the engine says nothing for {seconds:g} s: {self.log}")
        line = pipe.readline()
        if not line:
            tail = self.log.read_text(errors="replace").splitlines()[-15:]
            raise Failed("the engine has ended:\n" + "\n".join(tail))
        return json.loads(line)


def _descendants(pid: int) -> list[int]:
    """A process and all below it, by what the kernel says of their parents."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for p in found:
        found += parents.get(p, [])
    return found


def _runs(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


class Stage(contextlib.ExitStack):
    """What one scenario has started; everything ends with it."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting

    def daemon(self, mib: int = 256, *flags: str, start: bool = True) -> Daemon:
        d = Daemon(self.setting, mib, *flags)
        self.callback(d.close)
        if start:
            d.start()
        return d

    def engine(self, model: str, socket: str | None, **how: Any) -> Engine:
        e = Engine(self.setting, model, socket, **how)
        self.callback(e.close)
        return e
