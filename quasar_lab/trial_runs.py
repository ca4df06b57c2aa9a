"""Trials on a model that is there: some of its linears in W8A8, some of its layers not run at all.

Nothing is copied. Modules of the full-precision model run another forward for a while: a linear
that of a `W8A8Linear`, with the smoothing scales undone around it, or a layer one that returns what
it returned before. And a distribution over the vocabulary outweighs what it is made from by far, so
that of a text is never there as a whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from quasar_lab.folding import Fold
from quasar_lab.quantized_linear import W8A8Linear
from quasar_lab.structure import decoder_layers

# Of a token's distribution: the float32 copies that comparing two of them makes, and one to spare.
_COPIES = 4


class TrialRun:
    """A model's distributions over a text, made a few rows at a time from its last layer's output.

    linears: those of `model` that compute in W8A8 instead, with the fold they belong to.
    """

    def __init__(
        self,
        model: nn.Module,
        ids: Int64[Tensor, "1 S"],
        linears: Mapping[str, W8A8Linear] | None = None,
        fold: Fold | None = None,
    ) -> None:
        self.model: Any = model
        self.ids = ids
        self.linears, self.fold = linears or {}, fold or Fold()
        self.layers = list(decoder_layers(model).values())
        with in_w8a8(model, self.linears, self.fold):
            self.output = layer_output(model, ids, self.layers[-1])

    @property
    def chunks(self) -> Iterator[slice]:
        """Rows whose distributions take no more memory than a layer's weights."""
        layer = sum(p.nbytes for p in self.layers[-1].parameters())
        vocab = self.model.config.get_text_config().vocab_size
        size = max(1, layer // (_COPIES * 4 * vocab))
        for first in range(0, self.ids.shape[1], size):
            yield slice(first, first + size)

    @torch.no_grad()
    def log_softmax(self, rows: slice) -> Float[Tensor, "rows vocab"]:
        # through the model itself, which may do more than its output layer (Gemma's soft cap)
        if isinstance(self.output, Tensor):
            output: object = self.output[:, rows]
        else:
            output = (self.output[0][:, rows], *self.output[1:])
        with answered(self.layers, output), in_w8a8(self.model, self.linears, self.fold):
            logits = self.model(input_ids=self.ids[:, rows], use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


class _Reached(Exception):  # noqa: N818 - nothing is wrong
    """The layer has answered: nothing after it needs to run."""

    def __init__(self, output: Any) -> None:
        self.output = output


@torch.no_grad()
def layer_output(model: nn.Module, ids: Int64[Tensor, "1 S"], layer: nn.Module) -> Any:
    """What a decoder layer of the model returns for this text; those after it do not run."""

    def stop(module: nn.Module, args: tuple, output: object) -> None:
        raise _Reached(output)

    handle = layer.register_forward_hook(stop)
    try:
        model(input_ids=ids, use_cache=False)
    except _Reached as reached:
        reached.__traceback__ = None  # its frames would keep all that they hold alive
        return reached.output
    finally:
        handle.remove()


def kl_sums(expected: TrialRun, others: Sequence[TrialRun]) -> list[float]:
    """KL(expected || other) of each other run, summed over the tokens."""
    totals = [0.0] * len(others)
    for rows in expected.chunks:
        log_p = expected.log_softmax(rows)
        for index, other in enumerate(others):
            totals[index] += _kl(log_p, other.log_softmax(rows))
        del log_p  # not beside the next one
    return totals


def _kl(log_p: Float[Tensor, "rows vocab"], log_q: Float[Tensor, "rows vocab"]) -> float:
    """Summed over the rows, in the memory of log_q."""
    log_q.sub_(log_p)
    for difference, row in zip(log_q, log_p, strict=True):  # exp of all would be one more copy
        difference.mul_(row.exp())
    return -float(log_q.sum(-1).double().sum())


@contextmanager
def in_w8a8(model: nn.Module, linears: Mapping[str, W8A8Linear], fold: Fold) -> Iterator[None]:
    """Linears of `model` compute in W8A8 as these do, with the scales undone around each."""

    def forward(name: str, linear: W8A8Linear, x: Tensor) -> Tensor:
        if name in fold.multiply:
            x = x / fold.multiply[name].to(x)
        y = linear(x)
        if name in fold.divide:
            s = fold.divide[name].to(y)
            y = torch.cat([y[..., : -len(s)], y[..., -len(s) :] * s], dim=-1)
        return y

    with _forward_as(
        {
            model.get_submodule(name): partial(forward, name, linear)
            for name, linear in linears.items()
        }
    ):
        yield


def answered(modules: Sequence[nn.Module], output: object) -> AbstractContextManager[None]:
    """The modules return this instead of computing."""
    return _forward_as({module: lambda *args, **kwargs: output for module in modules})


@contextmanager
def _forward_as(forwards: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Each module runs another forward."""
    saved: list[Callable | None] = [module.__dict__.get("forward") for module in forwards]
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, before in zip(forwards, saved, strict=True):
            module.__dict__.pop("forward", None)
            if before is not None:
                module.__dict__["forward"] = before
