"""Perplexity on a text: the cheapest look at what quantisation costs a model.

exp of the mean negative log-likelihood of a token, each read after up to `window` - 1 tokens. Needs
nothing but the model; for tasks with answers see `accuracy`.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from quasar_lab.errors import UserError
from quasar_lab.token_batches import unpadded

DEFAULT_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class Perplexity:
    """perplexity = exp(nats_per_token), over `tokens` predicted tokens."""

    perplexity: float
    nats_per_token: float
    tokens: int


def perplexity(
    model: Any, ids: Int64[Tensor, "S"], *, window: int | None = None, stride: int | None = None
) -> Perplexity:
    """How well `model` predicts the tokens of a text.

    Args:
        model: a Hugging Face causal model, full precision or quantised.
        ids: the tokens of the text, at least two; all but the first are predicted, each once.
        window: tokens in one forward; None: 1,024, or the model's context where that is shorter.
        stride: tokens that each further window adds; None: half a window. A smaller one gives
            every token more context and costs more forwards.

    Raises UserError for a text that is too short and for a window or stride out of range.
    """
    likelihoods = token_log_likelihoods(model, ids, window=window, stride=stride)
    nats = -float(likelihoods.mean())
    return Perplexity(math.exp(nats), nats, len(likelihoods))


@torch.no_grad()
def token_log_likelihoods(
    model: Any, ids: Int64[Tensor, "S"], *, window: int | None = None, stride: int | None = None
) -> Float64[Tensor, "P"]:
    """log p of each token after the first, in nats; arguments and errors as in `perplexity`."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = min(DEFAULT_WINDOW, limit or DEFAULT_WINDOW)
    window = longest if window is None else window
    if window < 2 or (limit is not None and window > limit):
        raise UserError(f"window is {window}: choose from 2 to {limit or 'the context length'}")
    stride = max(1, window // 2) if stride is None else stride
    if not 1 <= stride < window:
        raise UserError(f"stride is {stride}: choose from 1 to {window - 1}, below the window")
    if len(ids) < 2:
        raise UserError(f"the text has {len(ids)} token(s): at least 2 are needed to predict one")
    parts = []
    done = 1  # tokens whose likelihood is known, counting the first, which has none
    while done < len(ids):
        end = min(len(ids), window if done == 1 else done + stride)
        [chunk] = unpadded(ids[max(0, end - window) : end], 0, model)
        new = end - done
        logits = model(chunk.to(model.device), use_cache=False, logits_to_keep=new + 1).logits[0]
        log_p = torch.log_softmax(logits[:-1].double(), dim=-1).cpu()
        parts.append(log_p.gather(1, chunk[0, -new:, None].cpu())[:, 0])
        done = end
    return torch.cat(parts)


def read_text(path: str | Path) -> str:
    """A UTF-8 text file with something in it; UserError otherwise."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not text.strip():
        raise UserError(f"{path} is empty: give a text file")
    return text
