"""What calibration keeps of a stream of activations: per-channel ranges and one spread."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from quasar_lab.errors import UserError
from quasar_lab.structure import describe

# Rows of all batches on which scales are judged: more cost time and gain nothing measurable.
SPREAD_SAMPLE_ROWS = 128


@dataclass(frozen=True, slots=True, eq=False)
class ActivationStats:
    """What is known of the C channels of one linear's input x (algorithms: section 1).

    min, max: fp32[C], over all tokens; sigma: fp32 scalar, the largest over batches of the
    unbiased standard deviation of x - center (all tokens and channels of the batch together, the
    center being that of the tokens seen so far); sample: the inputs X0[N0, C] of the first batch;
    spread_sample: fp32[R, C], up to 128 rows drawn evenly from all batches; num_tokens: how many
    rows were seen.
    """

    min: Float32[Tensor, "C"]
    max: Float32[Tensor, "C"]
    sigma: Float32[Tensor, ""]
    sample: Float32[Tensor, "N0 C"]
    spread_sample: Float32[Tensor, "R C"]
    num_tokens: int

    @property
    def absmax(self) -> Float32[Tensor, "C"]:
        """a_j = max |x_j|."""
        return torch.maximum(self.min.abs(), self.max.abs())

    @property
    def center(self) -> Float32[Tensor, "C"]:
        """m_j = (max_j + min_j) / 2."""
        return (self.max + self.min) / 2

    @property
    def center_absmax(self) -> Float32[Tensor, "C"]:
        """c_j = max (x_j - m_j), half the range of the channel."""
        return (self.max - self.min) / 2

    @property
    def threshold(self) -> Float32[Tensor, ""]:
        """T = max_j c_j."""
        return self.center_absmax.max()

    @property
    def outlier_ratio(self) -> float:
        """The largest channel's absmax over the median channel's: 1 is flat, 100 is an outlier."""
        absmax = self.absmax
        return float(absmax.max() / absmax.median().clamp_min(1e-12))

    @classmethod
    def from_batches(
        cls, batches: Iterable[Tensor] | Tensor, *, max_sample_tokens: int | None = None
    ) -> "ActivationStats":
        """Statistics of `batches`, tensors [..., C] (a bare tensor counts as one batch).

        Raises UserError when there is no batch, a batch is empty or not finite, or C changes.
        """
        accumulator = Accumulator(max_sample_tokens)
        for index, batch in enumerate([batches] if isinstance(batches, Tensor) else batches):
            if not isinstance(batch, Tensor) or batch.ndim == 0:
                raise UserError(f"batch {index} is {describe(batch)}: pass tensors [..., channels]")
            accumulator.update(batch.detach(), where=f"batch {index}")
        return accumulator.result()


class Accumulator:
    """The running form of `ActivationStats`."""

    def __init__(self, max_sample_tokens: int | None) -> None:
        self.max_sample_tokens = max_sample_tokens
        self.num_tokens = 0
        self.generator = torch.Generator().manual_seed(0)

    def update(self, x: Float[Tensor, "*rows C"], *, where: str) -> None:
        if x.numel() == 0:
            raise UserError(f"{where}: no tokens in a batch of shape {list(x.shape)}")
        x = x.reshape(-1, x.shape[-1]).float()
        low, high = torch.aminmax(x, dim=0)
        # min and max propagate NaN and Inf, so C values tell about all of them
        if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
            raise UserError(
                f"{where}: NaN or Inf in the input, check the model's weights and dtype"
            )
        if self.num_tokens == 0:
            self.min, self.max = low, high
            self.sigma = torch.zeros((), device=x.device)
            self.sample = x[: self.max_sample_tokens].clone()
            self.spread_sample, self.keys = x[:0].clone(), torch.empty(0)
        elif len(low) != len(self.min):
            raise UserError(f"{where}: {len(low)} channels, earlier batches had {len(self.min)}")
        else:
            self.min, self.max = torch.minimum(self.min, low), torch.maximum(self.max, high)
        if x.numel() > 1:
            spread = (x - (self.max + self.min) / 2).std()
            self.sigma = torch.maximum(self.sigma, spread)
        self._draw(x)
        self.num_tokens += len(x)

    def _draw(self, x: Float32[Tensor, "rows C"]) -> None:
        """Keep the rows with the smallest of random keys: each row seen is as likely as another."""
        keys = torch.cat([self.keys, torch.rand(len(x), generator=self.generator)])
        kept = keys.argsort()[:SPREAD_SAMPLE_ROWS].sort().values
        self.keys = keys[kept]
        self.spread_sample = torch.cat([self.spread_sample, x])[kept.to(x.device)]

    def result(self) -> ActivationStats:
        if self.num_tokens == 0:
            raise UserError("no batches to take statistics of: pass at least one")
        return ActivationStats(
            self.min, self.max, self.sigma, self.sample, self.spread_sample, self.num_tokens
        )
