"""Answers rows of a file by vLLM, in a process of its own. In: one JSON object on stdin. Out: one on stdout's last line.

{"v2", "engine": arguments of LLM, "prompts": token ids, "sampling": arguments of SamplingParams, "version"} -> {"ids": of each
prompt a list of samples, "runner", "drafter", "steps", "drafted", "by_source": accepted tokens of each prompt's first sample by
draft source, "warnings"}.
"""

import json
import logging
import os
import sys

import numpy as np

from lookahead.engines.vllm import EXTENSION

TOLD: list[str] = []


class Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        TOLD.append(record.getMessage())


def main() -> None:
    asked = json.loads(sys.stdin.read())
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_PLUGINS="lookahead")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if asked.get("v2"):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        import tests.support.triton_on_cpu  # noqa: F401
    import vllm
    from vllm import LLM, SamplingParams

    logging.getLogger("lookahead").addHandler(Told(logging.WARNING))
    if "version" in asked:
        vllm.__version__ = asked["version"]
    common = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28, "max_model_len": 512}
    llm = LLM(**{**common, "worker_extension_cls": EXTENSION, **asked["engine"]})
    (counted,) = llm.collective_rpc("lookahead_answer", args=("count_accepted",))
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    answers = llm.generate(prompts, SamplingParams(**asked["sampling"]), use_tqdm=False)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    requests = getattr(drafter, "requests", None)
    found = {
        "ids": [[list(sample.token_ids) for sample in answer.outputs] for answer in answers],
        "runner": type(runner).__module__,
        "drafter": type(drafter).__name__,
        "warnings": TOLD,
    }
    if counted and requests is not None:
        texts = [(ids, list(answer.outputs[0].token_ids)) for ids, answer in zip(asked["prompts"], answers, strict=True)]
        packed = [(np.array(ids + answer, np.int32).tobytes(), len(ids)) for ids, answer in texts]
        (by_source,) = llm.collective_rpc("lookahead_answer", args=("accepted", packed))
        found.update({"steps": requests.steps, "drafted": requests.drafted, "by_source": by_source})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
