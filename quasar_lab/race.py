"""The four cells as a race: each is given the next step when its own clock is the one behind.

Run at the same time, methods would fight for cores and memory, and all would look slow. Here one
step runs at a time, always of the lane that has decoded for the shortest time so far. Seen on the
lanes' own clocks they run side by side, each on the whole machine; watched live, the fast ones pull
ahead as they would.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd

from quasar_lab.decoding import GenerationRun
from quasar_lab.engines import build_target
from quasar_lab.errors import UserError
from quasar_lab.loading import LanguageModel
from quasar_lab.methods import FOUR_CELLS, FULL, INT8, METHODS, DraftSettings
from quasar_lab.sampling import SamplingConfig
from quasar_lab.targets import Target
from quasar_lab.tasks import conversation, load_task
from quasar_lab.trace import Step

# what a reader chooses -> the method whose drafter it is
DRAFTERS = {
    "n-gram": "quasar",
    "suffix": "suffix",
    "layer-skip": "layer_skip",
    "adaptive n-gram": "adaptive",
}


@dataclass(frozen=True, slots=True)
class RaceSettings:
    """task: whose first prompt is answered; drafter: one of DRAFTERS; seed: of sampled races."""

    task: str = "mt_bench"
    drafter: str = "n-gram"
    num_draft_tokens: int = 5
    temperature: float = 0.0
    max_new_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if self.drafter not in DRAFTERS:
            raise UserError(f"drafter is {self.drafter!r}: choose from {', '.join(DRAFTERS)}")
        load_task(self.task, 1)
        SamplingConfig(temperature=self.temperature, seed=self.seed)
        self.draft_settings()

    def draft_settings(self) -> DraftSettings:
        most = self.num_draft_tokens
        return DraftSettings(most, max_adaptive_tokens=most)


@dataclass
class Lane:
    """One runner of the race. pieces: its text, and whether each piece was an accepted draft."""

    label: str
    run: GenerationRun
    tokenizer: Any
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    progress: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    _shown: int = 0  # characters in pieces

    def advance(self) -> None:
        """One step."""
        step = self.run.step()
        self.seconds += step.seconds
        self.drafted += len(step.draft_tokens)
        self.accepted += step.num_accepted
        self.progress.append((self.seconds, len(self.run.tokens)))
        self._write(step)

    def _write(self, step: Step) -> None:
        own = len(step.tokens) - step.num_accepted
        for hidden, was_draft in ((own, True), (0, False)):
            count = len(self.run.tokens) - hidden
            text = self.tokenizer.decode(self.run.tokens[:count], skip_special_tokens=True)
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # half a character: wait for the rest
            if len(text) > self._shown:
                self.pieces.append((text[self._shown :], was_draft))
                self._shown = len(text)

    @property
    def tokens_per_second(self) -> float:
        """On this lane's own clock; NaN before the first step."""
        return len(self.run.tokens) / self.seconds if self.seconds else float("nan")

    @property
    def mean_acceptance_length(self) -> float:
        """L so far; NaN before the first step."""
        steps = len(self.run.steps)
        return len(self.run.tokens) / steps if steps else float("nan")


class Race:
    """Lanes of the four cells for one model; races can follow each other.

    model: what `load` gave; quantized: its INT8 form. max_length: tokens of prompt and answer. The
    lanes share the weights and have a KV cache each.
    """

    def __init__(self, model: LanguageModel, quantized: Any, *, max_length: int = 2048) -> None:
        self.model = model
        self._models = {FULL: model.model, INT8: quantized}
        self._build = partial(build_target, max_length=max_length)
        self._targets: dict[str, Target] = {
            name: self._build(self._models[METHODS[name].precision]) for name in FOUR_CELLS
        }

    def lanes(self, settings: RaceSettings) -> list[Lane]:
        """At the start: the prompt is read, nothing is written."""
        prompt = self.model.encode_chat(conversation(load_task(settings.task, 1)[0]))
        make_drafter = METHODS[DRAFTERS[settings.drafter]].make_drafter
        draft = settings.draft_settings()
        lanes = []
        for name in FOUR_CELLS:
            method, drafter, label = METHODS[name], None, METHODS[name].label
            if method.make_drafter is not None and make_drafter is not None:
                drafter = make_drafter(draft, self._models[method.precision], self._build)
                if settings.drafter != "n-gram":  # Quasar is the one with n-grams
                    label = label.replace("n-gram", settings.drafter).removesuffix(" (Quasar)")
            run = GenerationRun(
                self._targets[name],
                prompt,
                drafter=drafter,
                sampling=SamplingConfig(temperature=settings.temperature, seed=settings.seed),
                max_new_tokens=settings.max_new_tokens,
            )
            lanes.append(Lane(label, run, self.model.tokenizer))
        return lanes


def run_race(
    lanes: list[Lane],
    on_step: Callable[[Lane], object] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Until all lanes have finished or `should_stop` says so, which is asked before each step."""
    while running := [lane for lane in lanes if not lane.run.finish_reason]:
        if should_stop is not None and should_stop():
            for lane in running:
                lane.run.stop()
            return
        behind = min(running, key=lambda lane: lane.seconds)
        behind.advance()
        if on_step is not None:
            on_step(behind)


def race_table(lanes: list[Lane]) -> pd.DataFrame:
    """One row a lane: tokens, seconds, tokens/s, times plain, L, share of drafts accepted."""
    plain = lanes[0].tokens_per_second
    return pd.DataFrame(
        {
            "tokens": [len(lane.run.tokens) for lane in lanes],
            "seconds": [lane.seconds for lane in lanes],
            "tokens/s": [lane.tokens_per_second for lane in lanes],
            "times plain": [lane.tokens_per_second / plain for lane in lanes],
            "L": [lane.mean_acceptance_length for lane in lanes],
            "drafts accepted": [
                lane.accepted / lane.drafted if lane.drafted else float("nan") for lane in lanes
            ],
        },
        index=[lane.label for lane in lanes],
    )
