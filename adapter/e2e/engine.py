"""One engine, told what to do by lines of JSON on stdin; it answers with lines on stdout.

    engine.py '{"model": DIR, "transfer": {...} or null, "options": {...}}'

    {"ask": ["A", "B"], "tokens": 1500, "output": 16}   all at once
    {"reset": true}                                     as after new weights
    {"counters": true}                                  vLLM's metrics by name
    {"spoil": true}                                     no store is copied from here on

Everything that vLLM prints goes to stderr. The first answer says that it is ready.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any, TextIO


def document(name: str, tokens: int) -> list[int]:
    """Tokens of a document; "A+1200" has the first 1200 of A and its own rest."""
    head, plus, shared = name.partition("+")
    rng = random.Random(name)
    own = [rng.randrange(3, 512) for _ in range(tokens)]
    return document(head, int(shared)) + own[int(shared) :] if plus else own


class Clock:
    """The longest and all calls of some functions, in seconds."""

    def __init__(self) -> None:
        self.longest, self.of, self.total, self.calls = 0.0, "", 0.0, 0

    def watch(self, owner: Any, names: tuple[str, ...]) -> None:
        for name in names:
            if inner := getattr(owner, name, None):
                setattr(owner, name, self._timed(name, inner))

    def _timed(self, name: str, inner: Any) -> Any:
        def timed(*args: Any, **kw: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **kw)
            finally:
                took = time.perf_counter() - began
                self.calls += 1
                self.total += took
                if took > self.longest:
                    self.longest, self.of = took, name

        return timed

    def take(self) -> dict[str, Any]:
        out = {
            "longest_s": round(self.longest, 6),
            "longest": self.of,
            "total_s": round(self.total, 6),
            "calls": self.calls,
        }
        self.__init__()
        return out


MANAGER = (
    *("lookup", "prepare_load", "prepare_store", "complete_load", "complete_store"),
    *("on_new_request", "on_request_finished", "on_schedule_end", "touch"),
    *("take_events", "get_stats", "has_pending_work", "reset_cache"),
)


class Engine:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.manager, self.steps = Clock(), Clock()
        self._plan: Any = None  # the worker's own, once it was replaced
        if spec["transfer"]:  # of the scheduler in this process; another's is not seen
            from kvlift_vllm.manager import KvliftManager

            self.manager.watch(KvliftManager, MANAGER)
        from vllm import LLM, SamplingParams, TokensPrompt

        self._sampling, self._prompt = SamplingParams, TokensPrompt
        options = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 2560,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 8,
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": 64 << 20,
            "num_gpu_blocks_override": 90,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
        } | spec["options"]
        if spec["transfer"]:
            options["kv_transfer_config"] = spec["transfer"]
        self.llm = LLM(model=spec["model"], **options)
        self.steps.watch(self.llm.llm_engine, ("step",))

    def do(self, line: dict[str, Any]) -> dict[str, Any]:
        if "ask" in line:
            return self.ask(line["ask"], line["tokens"], line["output"])
        if "reset" in line:
            return {"reset": self._reset()}
        if "counters" in line:
            return self.counters()
        if "spoil" in line:
            return self.spoil(line["spoil"])
        raise ValueError(f"what is {line}?")

    def ask(self, names: list[str], tokens: int, output: int) -> dict[str, Any]:
        prompts = [self._prompt(prompt_token_ids=document(n, tokens)) for n in names]
        sampling = self._sampling(temperature=0, max_tokens=output, ignore_eos=True)
        began = time.perf_counter()
        out = self.llm.generate(prompts, sampling, use_tqdm=False)
        return {
            "seconds": round(time.perf_counter() - began, 4),
            "results": [
                {
                    "document": n,
                    "cached": o.num_cached_tokens or 0,
                    "output": list(o.outputs[0].token_ids),
                }
                for n, o in zip(names, out, strict=True)
            ],
            "manager": self.manager.take(),
            "steps": self.steps.take(),
        }

    def counters(self) -> dict[str, float]:
        return {
            m.name: m.value
            for m in self.llm.get_metrics()
            if isinstance(getattr(m, "value", None), int | float)
        }

    def spoil(self, on: bool) -> dict[str, bool]:
        """Lets every store of this process fail before it is copied, or none."""
        from kvlift_vllm import worker

        own = self._plan = self._plan or worker.plan

        def plan(*args: Any, whole: bool, **kw: Any) -> Any:
            if on and whole:
                raise RuntimeError("spoiled by the test")
            return own(*args, whole=whole, **kw)

        worker.plan = plan
        return {"spoil": on}

    def _reset(self) -> bool:
        try:
            return bool(self.llm.reset_prefix_cache(reset_connector=True))
        except TypeError:  # a release that resets both or neither
            return bool(self.llm.reset_prefix_cache())


def main(answers: TextIO) -> None:
    began = time.perf_counter()
    engine = Engine(json.loads(sys.argv[1]))
    ready = {"ready": round(time.perf_counter() - began, 2), "pid": os.getpid()}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.do(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    mine = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(mine)
