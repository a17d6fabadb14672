"""What an engine's cache looks like: its groups, its namespace, what fits.

Everything is worked out of vLLM's OffloadingConfig, which scheduler and workers
get alike, so that every process of an engine says the same. Nothing here needs
vLLM itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .slots import pages
from .weights import config_of, identity
from .wire import PAGE_SIZE

FORMAT = 1  # of the bytes in a slot: another one is another namespace
DOCUMENT = 32_768  # tokens of a document, where the longest is not known

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
_STATE = re.compile(r"\.(linear_attn|mamba|mixer|short_conv|ssm|kda)(?:\.|$)")
_TYPES = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunked",
}


@dataclass(frozen=True)
class Group:
    """A KV-cache group. Its position is its place in the engine's list."""

    id: int  # the model's number of it, which keys end with
    kind: str  # full, window or state
    chunk_tokens: int  # of one key
    window_chunks: int  # that a load needs; 0 for full
    certain: bool  # whether the kind is known, and not full for want of better


def groups_of(config: Any) -> list[Group]:
    """The groups of an OffloadingConfig, in its order.

    Kinds come from vLLM where it says them (0.33), else from the setting
    ``kvlift_groups``, else from the model's config.json.
    """
    said = config.extra_config.get("kvlift_groups")
    if not isinstance(said, list) or len(said) != len(config.groups):
        said = None
    model: dict[str, Any] | None = None
    if said is None and not _told(config.groups[0]):
        model = config_of(config.model.name)
    out = []
    for i, g in enumerate(config.groups):
        chunk = g.tokens_per_block * config.cache.blocks_per_chunk
        if _told(g):
            window = g.sliding_window_size_in_chunks
            kind, n, certain = _windowed(g, window), window or 0, True
        elif said is not None:
            kind, n, certain = _setting(said[i])
        else:
            kind, n, certain = _guess(g.layer_names, chunk, model, len(config.groups))
        out.append(Group(int(getattr(g, "group_id", i)), kind, chunk, n, certain))
    return out


def _told(group: Any) -> bool:
    return hasattr(group, "sliding_window_size_in_chunks")


def _windowed(group: Any, window: int | None) -> str:
    if window is None:
        return "full"
    return "state" if any(_STATE.search(n) for n in group.layer_names) else "window"


def _setting(said: Any) -> tuple[str, int, bool]:
    """One element of ``kvlift_groups``; what makes no sense is an unsure full."""
    kind = said.get("kind") if isinstance(said, dict) else None
    window = said.get("window_chunks", 0) if isinstance(said, dict) else 0
    if kind in ("full", "state"):
        return kind, 0, True
    if kind in ("window", "draft") and isinstance(window, int) and window > 0:
        return kind, window, True
    return "full", 0, False


def _guess(
    names: Sequence[str], chunk: int, model: dict[str, Any] | None, groups: int
) -> tuple[str, int, bool]:
    """Kind, window and whether that is certain, from the names and types of layers."""
    if names and all(_STATE.search(n) for n in names):
        return "state", 0, True
    if model is None:  # most models are dense
        return "full", 0, groups == 1
    types = model.get("layer_types")
    window = model.get("sliding_window")
    if not window or model.get("use_sliding_window") is False:
        window = 0
    if not isinstance(types, list):
        return "full", 0, not window
    kinds = set()
    for name in names:
        layer = _LAYER.search(name)
        at = int(layer[1]) if layer else -1
        kinds.add(_TYPES.get(str(types[at]), "?") if 0 <= at < len(types) else "?")
    if kinds == {"window"} and isinstance(window, int) and window > 0:
        return "window", -(-window // chunk), True
    tokens = model.get("attention_chunk_size")
    if kinds == {"chunked"} and isinstance(tokens, int) and tokens > 0:
        return "window", -(-tokens // chunk), True
    return "full", 0, "full" in kinds


def suffixes(groups: Sequence[Group]) -> dict[bytes, int]:
    """The end of a key (its group's id, big-endian) for each group's position."""
    return {g.id.to_bytes(4, "big"): i for i, g in enumerate(groups)}


def namespace(config: Any) -> dict[str, Any]:
    """The description of whose bytes may be exchanged (docs/adapter.md).

    Anything that differs in it is another namespace. The bytes of each rank are
    not in it: the daemon compares them itself. Where ``weights_id`` names the
    weights it names the model, too, whatever folder they lie in at this boot; a
    digest of the configuration then keeps models of one name apart.
    """
    said = config.extra_config.get("weights_id")
    p, cache = config.parallel, config.cache
    one_stage = p.pp_size == 1  # else each rank has layers of its own
    return {
        "identity": {
            "format": FORMAT,
            "model": str(said) if said else config.model.name,
            "config": _digest(config.model.name) if said else "",
            "weights": weights(config) or "",
            "dtype": config.model.dtype,
            "layout": getattr(config, "kv_cache_layout", None) or "",
            "layers": [list(g.layer_names) for g in config.groups] if one_stage else [],
            "tokens_per_block": [g.tokens_per_block for g in config.groups],
            "blocks_per_chunk": cache.blocks_per_chunk,
            "tokens_per_hash": cache.tokens_per_hash,
            "tp": p.tp_size,
            "pp": p.pp_size,
            "pcp": p.pcp_size,
            "dcp": p.dcp_size,
        },
        "groups": [
            {
                "name": f"g{g.id}",
                "kind": g.kind,
                "chunk_tokens": g.chunk_tokens,
                "window_chunks": g.window_chunks,
            }
            for g in groups_of(config)
        ],
    }


def _digest(model: str) -> str:
    """A digest of a model's config.json; empty where there is none to read."""
    found = config_of(model)
    if found is None:
        return ""
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def weights(config: Any) -> str | None:
    """What the engine's weights are known by: the setting, else what is found."""
    said = config.extra_config.get("weights_id")
    return f"id:{said}" if said else identity(config.model.name)


def engine_id(config: Any) -> str:
    """vLLM's engine id, which manager and ranks share, in at most 95 bytes."""
    text = str(config.engine_id)
    if 0 < len(text.encode()) <= 95:
        return text
    return "sha256-" + hashlib.sha256(text.encode()).hexdigest()


def socket_of(extra: Mapping[str, Any]) -> str:
    """Where the daemon listens: the setting, else the default of this user."""
    said = extra.get("kvlift_socket")
    if said:
        return str(said)
    if os.geteuid() == 0:
        return "/run/kvlift/default.sock"
    run = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    return os.path.join(run, "kvlift", "default.sock")


def deadline_of(extra: Mapping[str, Any]) -> float:
    """Seconds that a step waits for a reserve: the setting, 0.1 to 1,000 ms, else 5 ms."""
    try:
        said = float(extra.get("kvlift_deadline_ms", 5))
    except (TypeError, ValueError):
        said = 5.0
    return min(max(said, 0.1), 1000.0) / 1000


def longest(config: Any) -> int:
    """Tokens of the longest prompt, as far as is known (0.33): else of a document."""
    said = int(getattr(config.model, "max_model_len", 0))
    known = (config_of(config.model.name) or {}).get("max_position_embeddings")
    return said or (min(DOCUMENT, known) if isinstance(known, int) else DOCUMENT)


def describe(
    groups: Sequence[Group],
    parts: Sequence[Sequence[int]],
    arena_bytes: int,
    tokens: int,
) -> str:
    """One line: what an arena holds of such a cache, in tokens, documents and GiB.

    parts are the bytes of each rank in one chunk, for each group; a document has
    so many tokens.
    """
    total, said = 0, []
    for g, ranks in zip(groups, parts, strict=True):
        slot = PAGE_SIZE * sum(pages(p) for p in ranks)
        chunks = tokens // g.chunk_tokens
        if g.kind == "state":
            chunks = min(chunks, 1)
        elif g.window_chunks:
            chunks = min(chunks, g.window_chunks)
        total += chunks * slot
        kind = g.kind if g.certain else "full (not known)"
        window = f" of {g.window_chunks} chunks" if kind == "window" else ""
        said.append(
            f"g{g.id} {kind}{window}: {g.chunk_tokens:,} tokens in {_bytes(slot)}, "
            f"{_bytes(chunks * slot)} a document"
        )
    held = arena_bytes / total if total else 0.0
    return (
        f"{_bytes(arena_bytes)} hold {int(held * tokens):,} tokens in {held:,.1f} "
        f"documents of {tokens:,} ({_bytes(total)} each); " + "; ".join(said)
    )


def _bytes(n: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n / 1024:.1f} KiB"
