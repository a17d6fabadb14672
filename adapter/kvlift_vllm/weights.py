"""What tells one model's weights from another's.

Keys name tokens and not weights, so two models whose keys may be equal must not
share a namespace. What is found here becomes part of its identity.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

SAMPLES, SAMPLE_BYTES = 64, 4096  # blocks of a shard that are read, and their size
MAX_HEADER = 64 << 20  # bytes of a safetensors header
_SHARDS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")


def folder_of(model: str) -> Path | None:
    """Where a model's files lie: its own folder, or the only snapshot in the hub's cache.

    Of several snapshots nobody says which one is served, so that is None.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return None
    home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    snapshots = cache / ("models--" + model.replace("/", "--")) / "snapshots"
    try:
        found = [p for p in snapshots.iterdir() if p.is_dir()]
    except OSError:
        return None
    return found[0] if len(found) == 1 else None


def config_of(model: str) -> dict[str, Any] | None:
    """The model's config.json, the part about text where it has one; None without it."""
    folder = folder_of(model)
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def identity(model: str) -> str | None:
    """What the weights of a model are known by; None when nothing can be had.

    The hub's commit where the files lie in a snapshot of it, else a digest of
    the configuration and of each shard: its name, size, header and samples.
    The same files give the same text on every host.
    """
    folder = folder_of(model)
    if folder is None:
        return None
    commit = _SNAPSHOT.search(str(folder.absolute()) + "/")
    if commit:
        return "commit:" + commit[1]
    path = Path(model)
    shards = [path] if path.is_file() else []
    for pattern in () if shards else _SHARDS:
        shards += folder.glob(pattern)
    if not shards:
        return None
    digest = hashlib.sha256()
    try:
        config = folder / "config.json"
        digest.update(config.read_bytes() if config.is_file() else b"")
        for shard in sorted(set(shards)):
            _add_shard(digest, shard)
    except OSError:
        return None
    return "digest:" + digest.hexdigest()


def _add_shard(digest: Any, shard: Path) -> None:
    with shard.open("rb") as f:
        size = f.seek(0, os.SEEK_END)
        digest.update(f"\0{shard.name}\0{size}\0".encode())
        f.seek(0)
        first = f.read(8)
        header = (
            int.from_bytes(first, "little") if shard.suffix == ".safetensors" else 0
        )
        digest.update(first + f.read(min(header, MAX_HEADER)))
        blocks = size // SAMPLE_BYTES
        for i in range(min(SAMPLES, blocks)):
            f.seek(i * blocks // min(SAMPLES, blocks) * SAMPLE_BYTES)
            digest.update(f.read(SAMPLE_BYTES))
        f.seek(max(0, size - SAMPLE_BYTES))
        digest.update(f.read(SAMPLE_BYTES))
