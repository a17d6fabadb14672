"""A real daemon for tests: started, killed, stopped and started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("KVLIFT") or ROOT / "kvlift")
START = 30.0  # seconds that a start may take


def missing() -> str | None:
    """Why no daemon can be started here, or None."""
    if not BINARY.is_file():
        return f"no {BINARY}: make build"
    return None if Path("/dev/shm").is_dir() else "no /dev/shm"


class Daemon:
    """``kvlift serve`` on an arena of its own, removed by ``close``."""

    def __init__(self, ram: str = "16MiB", *options: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvlift-test-", dir="/tmp"))
        self.arena = Path(tempfile.mkdtemp(prefix="kvlift-test-", dir="/dev/shm"))
        self.socket = str(self.folder / "s")
        self.options = ["--ram", ram, "--min-idle", "0", *options]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts it and waits until it answers."""
        Path(self.socket).unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(str(BINARY), "serve", "--arena", str(self.arena / "a")),
                    *("--socket", self.socket, *self.options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        limit = time.monotonic() + START
        while True:
            with socket.socket(socket.AF_UNIX) as s:
                try:
                    s.connect(self.socket)
                    return
                except OSError:
                    pass
            if self.process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError("the daemon does not start:\n" + self.log())
            time.sleep(0.005)

    def log(self) -> str:
        """What it has logged so far."""
        return (self.folder / "log").read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, and waits for its end."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGSTOP, and waits until it has stopped."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def status(self) -> dict[str, Any]:
        """What ``kvlift status --json`` prints."""
        out = subprocess.run(
            [str(BINARY), "status", "--json", "--socket", self.socket],
            check=True,
            capture_output=True,
            timeout=START,
        )
        document: dict[str, Any] = json.loads(out.stdout)
        return document

    def close(self) -> None:
        """Ends it and removes its files."""
        if self.process is not None and self.process.poll() is None:
            self.go_on()
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.arena, ignore_errors=True)
