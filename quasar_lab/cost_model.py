"""What a decoding step should take on a machine, and what speculation should bring there.

A step of M tokens reads every weight once and does 2 M operations with it (a multiply-add is two).
Part by part (layers, output layer, attention) it waits for whichever takes longer; what an engine
spends on starting a layer comes on top:

    t(M) = sum over parts of max(bytes / read rate, M operations / operation rate) + layers overhead

Where the two are about equal they do not overlap perfectly, and the corner is rounded (`together`).
With L tokens a verification step and r = t(verify) / t(plain), the speedup is S = L / r
(algorithms: section 9). Rates: a chip's data sheet (`data_sheets`), those measured on this machine
(`machine_probe`), or the reader's own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pandas as pd

from quasar_lab.checks import check_whole
from quasar_lab.errors import UserError
from quasar_lab.memory_wall import StepBytes
from quasar_lab.model_shapes import ModelShape
from quasar_lab.roofline import BYTES_PER_WEIGHT

_SCALE_BYTES = 4  # of an INT8 row
_GROUP, _GROUP_SCALE_BYTES = 128, 2  # weights rounded to 4 bits share a 16-bit scale in groups

# What a model can be priced in: the formats that are measured, and weights of 4 bits.
FORMAT_BYTES: Mapping[str, float] = MappingProxyType({"INT4": 0.5, **BYTES_PER_WEIGHT})

# How sharp the corner between reading and computing is: 1 would add them, infinity take the larger.
SHARPNESS = 3.0


def together(reading: float, computing: float) -> float:
    """Seconds of reading and computing side by side: the larger, or a quarter more if equal."""
    return float((reading**SHARPNESS + computing**SHARPNESS) ** (1 / SHARPNESS))


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast a machine reads and computes, for each format ("INT4", "INT8", "bf16", "fp32").

    read_rate: bytes a second; operation_rate: operations a second of products; attention_rate:
    those of the attention (None: as products in the cache's format); layer_seconds: what a step
    spends on a layer beside reading and computing.
    """

    name: str
    read_rate: Mapping[str, float]
    operation_rate: Mapping[str, float]
    attention_rate: float | None = None
    layer_seconds: float = 0.0

    def __post_init__(self) -> None:
        for what in ("read_rate", "operation_rate"):
            for kind, value in getattr(self, what).items():
                if kind not in FORMAT_BYTES:
                    known = ", ".join(FORMAT_BYTES)
                    raise UserError(f"{what} has the format {kind!r}: choose from {known}")
                if not value > 0:
                    raise UserError(f"{what} of {kind} is {value!r}: it must be positive")
        if not self.layer_seconds >= 0:
            raise UserError(f"layer_seconds is {self.layer_seconds!r}: it must not be negative")

    def rates(self, kind: str) -> tuple[float, float]:
        """(bytes, operations) a second of a format; UserError if it has none."""
        if kind not in self.read_rate or kind not in self.operation_rate:
            known = ", ".join(k for k in self.read_rate if k in self.operation_rate)
            raise UserError(f"{self.name} has no rates for {kind}: it has {known}")
        return self.read_rate[kind], self.operation_rate[kind]


def own_machine(
    gigabytes_per_second: float, tera_operations: Mapping[str, float], *, name: str = "your machine"
) -> Machine:
    """A machine from what a data sheet says: GB/s, and 1e12 operations a second of each format."""
    return Machine(
        name,
        dict.fromkeys(tera_operations, gigabytes_per_second * 1e9),
        {kind: value * 1e12 for kind, value in tera_operations.items()},
    )


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step reads and computes: the layers' linears, the output layer, the attention.

    layers, head, cache: formats of the layers' linears, the output layer, and keys and values.
    """

    shape: ModelShape
    layers: str = "INT8"
    head: str = "bf16"
    cache: str = "bf16"
    context: int = 0

    def __post_init__(self) -> None:
        for what in ("layers", "head", "cache"):
            if getattr(self, what) not in FORMAT_BYTES:
                known = ", ".join(FORMAT_BYTES)
                raise UserError(f"{what} is {getattr(self, what)!r}: choose from {known}")
        check_whole("context", self.context, low=0)

    def _weight_bytes(self, kind: str, weights: int, rows: int) -> int:
        scales = {"INT8": rows * _SCALE_BYTES, "INT4": weights // _GROUP * _GROUP_SCALE_BYTES}
        return int(weights * FORMAT_BYTES[kind]) + scales.get(kind, 0)

    @property
    def layer_bytes(self) -> int:
        return self._weight_bytes(self.layers, self.shape.layer_weights, self.shape.layer_rows)

    @property
    def head_bytes(self) -> int:
        return self._weight_bytes(self.head, self.shape.head_weights, self.shape.vocab)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all tokens in the cache."""
        shape = self.shape
        numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim * self.context
        return int(numbers * FORMAT_BYTES[self.cache])

    @property
    def bytes(self) -> StepBytes:
        """All that a step reads, as `memory_wall.bytes_per_step` counts it; norms are left out."""
        parts = ((self.layers, self.layer_bytes), (self.head, self.head_bytes))
        quantized = sum(size for kind, size in parts if kind in ("INT4", "INT8"))
        high_precision = self.layer_bytes + self.head_bytes - quantized
        return StepBytes(quantized, high_precision, self.cache_bytes)

    @property
    def attention_operations(self) -> int:
        """q kᵀ and the mixture of values, for one token."""
        shape = self.shape
        return 4 * shape.layers * shape.heads * shape.head_dim * self.context


def step_work(
    model: Any,
    layers: str = "INT8",
    head: str = "bf16",
    cache: str | None = None,
    *,
    context: int = 0,
) -> StepWork:
    """The work of a step of a model: a `ModelShape`, a Hugging Face config or model.

    layers, head, cache: formats of the layers' linears, of the output layer, and of keys and values
    (None: the output layer's, or bf16 beside an INT8 one). context: tokens in the KV cache.
    Raises UserError for an unknown format or a model without a shape.
    """
    if cache is None:
        cache = "bf16" if head == "INT8" else head
    return StepWork(ModelShape.of(model), layers, head, cache, context)


def step_parts(work: StepWork, machine: Machine, tokens: int = 1) -> dict[str, float]:
    """Seconds of the parts of a step: layers, output layer, attention, and the overhead."""
    check_whole("tokens", tokens)
    shape = work.shape

    def part(kind: str, num_bytes: int, operations: int, rate: float | None = None) -> float:
        reads, computes = machine.rates(kind)
        return together(num_bytes / reads, tokens * operations / (rate or computes))

    return {
        "layers": part(work.layers, work.layer_bytes, 2 * shape.layer_weights),
        "output layer": part(work.head, work.head_bytes, 2 * shape.head_weights),
        "attention": part(
            work.cache, work.cache_bytes, work.attention_operations, machine.attention_rate
        ),
        "overhead": shape.layers * machine.layer_seconds,
    }


def predict_step(work: StepWork, machine: Machine, tokens: int = 1) -> float:
    """Seconds of a step of so many tokens."""
    return sum(step_parts(work, machine, tokens).values())


def expected_tokens(acceptance: float, draft_tokens: int) -> float:
    """L: tokens a verification step emits when each draft is accepted with this chance.

    1 + a + ... + a^k (Leviathan et al. 2023, arXiv 2211.17192, equation 1).
    """
    if not 0 <= acceptance <= 1:
        raise UserError(f"acceptance is {acceptance!r}: it must be a chance from 0 to 1")
    count = check_whole("draft_tokens", draft_tokens, 0) + 1
    return float(sum(acceptance**i for i in range(count)))


def predict_speedups(
    plain: StepWork,
    verify: StepWork,
    machine: Machine,
    acceptance: float,
    draft_tokens: Iterable[int] = range(17),
    *,
    draft_seconds: float = 0.0,
) -> pd.DataFrame:
    """One row for each number of drafted tokens k, 0 being the verifier without drafts.

    plain, verify: the work of the plain step that speedups refer to and of the verifying step.
    acceptance: chance that a draft is accepted; draft_seconds: drafting, a step.

    Returns columns L, plain_ms, verify_ms, r, speedup (L / r) and break_even_acceptance, from which
    on this k is faster than no drafts (NaN: never).
    """
    plain_seconds = predict_step(plain, machine)
    alone = predict_step(verify, machine)
    rows = {}
    for k in draft_tokens:
        seconds = predict_step(verify, machine, k + 1) + (draft_seconds if k else 0.0)
        length = expected_tokens(acceptance, k)
        rows[k] = {
            "L": length,
            "plain_ms": plain_seconds * 1e3,
            "verify_ms": seconds * 1e3,
            "r": seconds / plain_seconds,
            "speedup": length / (seconds / plain_seconds),
            "break_even_acceptance": break_even_acceptance(seconds / alone, k),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("draft_tokens")


def break_even_acceptance(step_ratio: float, draft_tokens: int) -> float:
    """The chance of acceptance from which on k drafts pay for a step that costs so many others.

    Solves expected_tokens(a, k) = step_ratio; NaN where even a = 1 would not do.
    """
    if step_ratio <= 1:
        return 0.0
    if step_ratio > draft_tokens + 1:
        return float("nan")
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if expected_tokens(middle, draft_tokens) < step_ratio:
            low = middle
        else:
            high = middle
    return high


def break_even_draft_length(speedups: pd.DataFrame) -> int:
    """The longest draft that is no slower than none, 0 if all are (rows of `predict_speedups`)."""
    pays = speedups.index[speedups["speedup"] >= speedups.loc[0, "speedup"]]
    return int(max(pays))
