"""Runs scenarios with a real engine, or the matrix of releases and models.

    run.py [--short] [SCENARIO ...]
    run.py --matrix [--releases 0.32.0,...] [--models dense,...] [--tp 1,2]
    run.py --list

The binary is ./kvlift (KVLIFT_BINARY names another one). Logs stay in the folder that is
printed when something failed. Exit status 1 when anything did.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import environment
import matrix
import models
import scenarios
from rig import Failed, Setting, Stage

ROOT = Path(__file__).resolve().parents[2]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("scenario", nargs="*", choices=[*scenarios.ALL, []])
    p.add_argument(
        "--short", action="store_true", help="those that take a minute or two"
    )
    p.add_argument("--list", action="store_true", help="print the scenarios")
    p.add_argument("--matrix", action="store_true", help="releases by models instead")
    p.add_argument("--releases", default=",".join(environment.RELEASES))
    p.add_argument("--models", default=",".join(models.NAMES))
    p.add_argument("--tp", default="1,2")
    return p.parse_args()


def setting(work: Path) -> Setting:
    """Installs the adapter from the binary and names what the scenarios need."""
    kvlift = os.environ.get("KVLIFT_BINARY", str(ROOT / "kvlift"))
    package = work / "package"
    subprocess.run(
        [kvlift, "adapter", "install", str(package)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return Setting(
        python=str(environment.interpreter()),
        kvlift=kvlift,
        package=package,
        models=environment.cache() / "models",
        work=work,
    )


def one(s: Setting, name: str) -> bool:
    """Runs a scenario and prints what it saw, with the seconds since its beginning."""
    began = time.monotonic()
    try:
        with Stage(s) as stage:
            for saw in scenarios.ALL[name](stage):
                took = time.monotonic() - began
                print(f"ok   {name:14} {took:5.0f} s  {saw}", flush=True)
    except Failed as e:
        print(f"FAIL {name:14} {e}", flush=True)
        return False
    return True


def main() -> int:
    a = arguments()
    if a.list:
        for name, run in scenarios.ALL.items():
            print(f"{name:14} {(run.__doc__ or '').splitlines()[0]}")
        return 0
    # What a scenario has started ends with it, also when a time limit ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    work = Path(tempfile.mkdtemp(prefix="kvlift-e2e-"))
    s = setting(work)
    if a.matrix:
        cells = (a.releases.split(","), a.models.split(","), map(int, a.tp.split(",")))
        good = matrix.run(s, *map(list, cells))
    else:
        names = a.scenario or (scenarios.SHORT if a.short else scenarios.ALL)
        results = [one(s, name) for name in names]
        good = all(results)
        print(f"{sum(results)} of {len(results)} scenarios passed", flush=True)
    if good:
        shutil.rmtree(work)
        return 0
    print(f"logs: {work}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
