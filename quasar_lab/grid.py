"""What a benchmark runs: every method on every prompt, at every setting, each once.

A `Grid` names the runs before one of them is made, so that an interrupted benchmark knows what is
missing, and several machines know who does what.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quasar_lab.errors import UserError
from quasar_lab.methods import DRAFT_COLUMNS, DraftSettings, Method, Variant
from quasar_lab.sampling import SamplingConfig
from quasar_lab.tasks import Prompt

Key = tuple[Any, ...]
_KEY = ("task", "question_id", "turn", "temperature", "seed", "method", *DRAFT_COLUMNS)


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured once for each variant: one turn of one prompt at one setting."""

    task: str
    prompt: Prompt
    turn: int
    temperature: float
    seed: int


def key_of(cell: Cell, variant: Variant) -> Key:
    """What tells one run from all others."""
    where = (cell.task, cell.prompt.question_id, cell.turn, cell.temperature, cell.seed)
    return (*where, *variant.columns().values())


def key_of_row(row: Mapping[str, Any]) -> Key:
    """The same of a row that was stored."""
    return tuple(row[name] for name in _KEY)


@dataclass(frozen=True)
class Grid:
    """Prompts x methods x temperatures x seeds x drafts.

    prompts: task name -> prompts; seeds: sampled runs take each, greedy ones the first; drafts:
    each drafting method runs with each of them. Raises UserError for anything that is empty.
    """

    prompts: Mapping[str, Sequence[Prompt]]
    methods: Sequence[Method]
    temperatures: Sequence[float]
    seeds: Sequence[int]
    drafts: Sequence[DraftSettings]

    def __post_init__(self) -> None:
        if not any(self.prompts.values()):
            raise UserError("there are no prompts to run: name at least one task")
        for name in ("temperatures", "seeds", "drafts"):
            values = list(dict.fromkeys(getattr(self, name)))  # a run that is named twice runs once
            if not values:
                raise UserError("temperatures, seeds and drafts must not be empty: pass at least "
                                "one of each")  # fmt: skip
            object.__setattr__(self, name, values)
        for temperature in self.temperatures:
            for seed in self.seeds:
                SamplingConfig(temperature=temperature, seed=seed)

    def cells(self) -> list[Cell]:
        """In the order in which they run; the turns of a prompt follow each other."""
        return [
            Cell(task, prompt, turn, float(temperature), seed)
            for task, prompts in self.prompts.items()
            for prompt in prompts
            for temperature in self.temperatures
            for seed in (self.seeds if temperature > 0 else self.seeds[:1])
            for turn in range(len(prompt.turns))
        ]

    def variants(self) -> list[Variant]:
        return [
            Variant(method, draft)
            for method in self.methods
            for draft in (self.drafts if method.make_drafter else [None])
        ]

    def runs(self) -> list[Key]:
        """The key of each run, in the order in which the rows are returned."""
        return [key_of(cell, variant) for cell in self.cells() for variant in self.variants()]

    def settings(self) -> dict[str, Any]:
        """In plain JSON values; the prompts as a number and a digest of their texts."""
        return {
            "methods": [method.name for method in self.methods],
            "tasks": {task: _digest(prompts) for task, prompts in self.prompts.items()},
            "temperatures": [float(temperature) for temperature in self.temperatures],
            "seeds": list(self.seeds),
            "drafts": [asdict(draft) for draft in self.drafts],
        }

    def share(self, index: int, count: int) -> "Grid":
        """Part `index` (from 1) of `count`: every count-th prompt, with all that is run on it.

        A prompt is never split, so that each ratio is one machine's. Raises UserError for a share
        that would be empty.
        """
        numbered = [(task, prompt) for task, some in self.prompts.items() for prompt in some]
        mine = numbered[index - 1 :: count] if 1 <= index <= count else []
        if not mine:
            raise UserError(
                f"shard {index}/{count} of {len(numbered)} prompts: choose from 1/n to n/n with n "
                f"at most {len(numbered)}"
            )
        tasks = dict.fromkeys(task for task, _ in mine)
        return replace(
            self, prompts={task: [p for name, p in mine if name == task] for task in tasks}
        )


def _digest(prompts: Sequence[Prompt]) -> str:
    texts = json.dumps([[str(prompt.question_id), *prompt.turns] for prompt in prompts])
    return f"{len(prompts)} prompts, {hashlib.sha256(texts.encode()).hexdigest()[:16]}"
