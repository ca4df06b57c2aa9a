"""Steps of a decoder as CUDA graphs: recorded once for each shape, then started with one call.

A step is hundreds of kernels of a few microseconds; starting them one by one takes longer than they
run. A graph starts them all, if everything is where it was when it was recorded: so the ids and
positions of a step are written into fixed places, and the attention always reads a whole number of
blocks of the cache, with what is not there yet masked out. Nothing waits for the GPU.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quasar_lab.int8_gemm.triton_backend import counters_of_graph

# A prompt's pieces are no steps: they have arithmetic enough to hide their starts.
MAX_TOKENS = 32
_BLOCK = 512

# (ids [M], positions [M], tokens of the cache to read, logits wanted) -> logits
Step = Callable[[Tensor, Tensor, int, int], Tensor]
# records what a function does and returns what repeats it, and the function's result
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]


def capture_cuda(
    run: Callable[[], Tensor], device: torch.device
) -> tuple[Callable[[], object], Tensor]:
    """Record on a stream of its own, after a run that compiles, tunes and makes handles."""
    collects = gc.isenabled()
    gc.disable()  # a compiled kernel that is collected meanwhile is unloaded, which ends a capture
    try:
        with torch.cuda.device(device):  # streams and graphs are of the current one
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with (
                    torch.cuda.stream(stream),  # also restores the stream if the capture fails
                    counters_of_graph(device) as counters,
                ):
                    run()
                    with torch.cuda.graph(graph, stream=stream):
                        result = run()
            finally:
                torch.cuda.current_stream().wait_stream(stream)
    finally:
        if collects:
            gc.enable()
    return partial(_replay, graph, counters), result


def _replay(graph: Any, counters: Tensor) -> None:
    """counters: what the graph's kernels count with, kept as long as the graph."""
    graph.replay()


@dataclass(frozen=True, slots=True)
class _Recorded:
    ids: Tensor
    positions: Tensor
    replay: Callable[[], object]
    logits: Tensor


class GraphedSteps:
    """Replays `step` for each number of tokens; `reason` says why it does not, if so.

    step: must depend on nothing but its arguments and on memory that stays in its place.
    max_length: tokens that the cache holds. A capture that fails is not tried again: from then on
    the step itself runs, with the same result.
    """

    def __init__(
        self, step: Step, max_length: int, device: torch.device, capture: Capture | None = None
    ) -> None:
        self._step, self._max_length, self._device = step, max_length, device
        self._capture = capture or partial(capture_cuda, device=device)
        self._recorded: dict[tuple[int, int, int], _Recorded] = {}
        self.reason = ""

    def run(self, tokens: Tensor, start: int, num_logits: int) -> Tensor:
        """Logits [num_logits, V] of a step of tokens [M] that follow `start` tokens."""
        key = (len(tokens), num_logits, self._context(tokens, start))
        recorded = self._recorded.get(key)
        if recorded is None and not self.reason:
            recorded = self._record(tokens, start, key)
        if recorded is None:
            return self.run_without_graph(tokens, start, num_logits)
        self._fill(recorded.ids, recorded.positions, tokens, start)
        recorded.replay()
        return recorded.logits.clone()  # the next replay writes into the same place

    def run_without_graph(self, tokens: Tensor, start: int, num_logits: int) -> Tensor:
        """The same step, kernel by kernel: what a graph must reproduce."""
        positions = torch.arange(start, start + len(tokens), device=self._device)
        context = self._context(tokens, start)
        return self._step(tokens.to(self._device), positions, context, num_logits)

    def _context(self, tokens: Tensor, start: int) -> int:
        """Whole blocks of the cache that a step reads."""
        end = start + len(tokens)
        return min(-(-end // _BLOCK) * _BLOCK, self._max_length)

    def _fill(self, ids: Tensor, positions: Tensor, tokens: Tensor, start: int) -> None:
        ids.copy_(tokens, non_blocking=True)
        torch.arange(start, start + len(tokens), out=positions)

    def _record(self, tokens: Tensor, start: int, key: tuple[int, int, int]) -> _Recorded | None:
        count, num_logits, context = key
        ids = torch.empty(count, dtype=torch.long, device=self._device)
        positions = torch.empty_like(ids)
        # the run before the recording is a real one: it must write what the step will write
        self._fill(ids, positions, tokens, start)
        try:
            replay, logits = self._capture(lambda: self._step(ids, positions, context, num_logits))
        except Exception as error:  # any kernel or library may refuse to be recorded
            self.reason = f"{type(error).__name__}: {error}".splitlines()[0]
            return None
        self._recorded[key] = _Recorded(ids, positions, replay, logits)
        return self._recorded[key]
