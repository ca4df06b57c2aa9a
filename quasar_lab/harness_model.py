"""A model of the lab as lm-eval sees one: log-likelihoods and generations of its requests.

Imports lm-eval; `accuracy` imports this module only when it is used.
"""

from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from torch import Tensor

from quasar_lab.decoding import generate
from quasar_lab.drafting import NGramDrafter
from quasar_lab.engines import build_target
from quasar_lab.errors import UserError
from quasar_lab.loading import LanguageModel
from quasar_lab.perplexity import token_log_likelihoods
from quasar_lab.progress import ProgressBar
from quasar_lab.sampling import SamplingConfig

_DEFAULT_NEW_TOKENS = 256


class HarnessModel(TemplateLM):
    """Full precision or W8A8: whatever `language_model.model` is.

    Answers that lm-eval wants generated are drafted by n-grams, which changes how fast they come
    and not how they are distributed. One request at a time.
    """

    def __init__(self, language_model: LanguageModel, label: str = "model") -> None:
        super().__init__()
        self.tokenizer = language_model.tokenizer
        self._language_model, self._label = language_model, label
        self._model: Any = language_model.model
        self._target = build_target(self._model)
        config = self._model.config.get_text_config()
        self.max_length = getattr(config, "max_position_embeddings", None) or 2048

    @property
    def eot_token_id(self) -> int:
        token = self.tokenizer.eos_token_id
        if token is None:
            raise UserError(
                f"the tokenizer of {self._language_model.name} has no end-of-text token"
            )
        return token

    @property
    def tokenizer_name(self) -> str:
        """Part of lm-eval's cache key."""
        return self._language_model.name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        # as lm-eval's own wrapper: a chat template writes special tokens itself
        return self.tokenizer(string, add_special_tokens=bool(add_special_tokens))["input_ids"]

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """log p of each continuation after its context, and whether greedy decoding gives it."""
        return super().loglikelihood(requests, disable_tqdm=True)  # the bar below is enough

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        results = []
        with ProgressBar(len(requests), f"{self._label}: likelihoods", unit="request") as bar:
            for _texts, context, continuation in requests:
                ids = torch.tensor((context + continuation)[-self.max_length :])
                scored = min(len(continuation), len(ids) - 1)
                output = self._model(
                    ids[None].to(self._model.device), use_cache=False, logits_to_keep=scored + 1
                )
                log_p = torch.log_softmax(output.logits[0, :-1].double(), dim=-1).cpu()
                wanted = ids[-scored:]
                likelihood = float(log_p.gather(1, wanted[:, None]).sum())
                results.append((likelihood, bool((log_p.argmax(dim=-1) == wanted).all())))
                bar.step(f"{self._label}: likelihoods")
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, read after the end-of-text token."""
        results = []
        for request in requests:
            ids = torch.tensor([self.eot_token_id, *self.tok_encode(request.args[0])])
            results.append(float(token_log_likelihoods(self._model, ids).sum()))
        return results

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to but without the first stop string."""
        answers = []
        with ProgressBar(len(requests), f"{self._label}: answers", unit="answer") as bar:
            for request in requests:
                context, options = request.args
                answers.append(self._answer(context, dict(options)))
                bar.step(f"{self._label}: answers")
        return answers

    def _answer(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else [text for text in until if text]
        budget = options.get("max_gen_toks", _DEFAULT_NEW_TOKENS)
        room = self.max_length - budget
        if room < 1:
            raise UserError(
                f"the task asks for {budget} new tokens, the model's context has {self.max_length}"
            )
        temperature = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
        generation = generate(
            self._target,
            self._prompt(context)[-room:],
            drafter=NGramDrafter(),
            sampling=SamplingConfig(temperature=temperature),
            max_new_tokens=budget,
            stop_strings=tuple(until),
            tokenizer=self.tokenizer,
        )
        text = generation.text(self.tokenizer)
        for stop in until:
            text = text.split(stop)[0]
        return text

    def _prompt(self, context: str) -> Tensor:
        return torch.tensor(self.tok_encode(context) or [self.eot_token_id])
