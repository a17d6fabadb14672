"""kvlift's side inside vLLM: a scheduler's manager and a worker for each rank.

vLLM loads this package by name (``spec_module_path: kvlift_vllm``,
``spec_name: KvliftSpec``) in the API server, in the scheduler's process and in
every worker. So importing it needs neither a daemon nor a GPU, and the modules
below ``spec`` are imported when they are needed. Outside vLLM the protocol
(``wire``, ``connection``, ``mirror``, ``session``) can be imported alone.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ["KvliftSpec", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports vLLM only when the spec is asked for (PEP 562)."""
    if name == "KvliftSpec":
        from .spec import KvliftSpec

        return KvliftSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
