"""The five task families: where the prompts of a measurement come from.

Quasar reports its speedups over five kinds of text (Huang & Wen, arXiv 2603.01399): chat, code,
maths, instructions and summaries. How often a draft is right depends on the text, so a figure
means something only together with the prompts that it was measured on. They come from one of
three places, all in the same form:

- the prompts that this project wrote itself (`load_task(name)`, nothing to download),
- a question.jsonl file in the layout of MT-bench, Spec-Bench and EAGLE (`load_task(name, path=)`),
- the public benchmark on the Hugging Face Hub (`hub_tasks.load_hub_task(name)`,
  extra "hub").
"""

import json
import operator
import os
import reprlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quasar_lab.errors import UserError

# The built-in prompts resemble the benchmarks; they are not the benchmarks.
TASKS: dict[str, str] = {
    "mt_bench": "Chat (MT-bench style)",
    "humaneval": "Code (HumanEval style)",
    "gsm8k": "Maths (GSM8K style)",
    "alpaca": "Instructions (Alpaca style)",
    "cnn_dm": "Summaries (CNN/DM style)",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question of a task, with one or more user turns.

    `turns` are the user's messages in order (at least one, none blank); `reference` holds model
    answers, usually one a turn, or is empty. Both may be given as lists; `reference` also as one
    string, number or None. Raises UserError, one line that names the field, for anything else.
    """

    # "| Any": fields come from files of strangers and are checked below, with our own errors
    question_id: int | str | Any
    category: str | Any
    turns: tuple[str, ...] | Any
    reference: tuple[str, ...] | Any = ()

    def __post_init__(self) -> None:
        if isinstance(self.question_id, bool) or not isinstance(self.question_id, int | str):
            raise UserError(
                f"question_id must be a whole number or a string, got {_short(self.question_id)}"
            )
        if not isinstance(self.category, str):
            raise UserError(f"category must be a string, got {_short(self.category)}")
        if not isinstance(self.turns, list | tuple) or not self.turns:
            raise UserError(
                f"turns must be a list with at least one string, got {_short(self.turns)}"
            )
        for number, turn in enumerate(self.turns, 1):
            if not isinstance(turn, str) or not turn.strip():
                raise UserError(f"turn {number} must be a string with text, got {_short(turn)}")
        reference = _reference_texts(self.reference)
        for text in (str(self.question_id), self.category, *self.turns, *reference):
            # JSON can smuggle in half of a character pair, on which every tokenizer fails later
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise UserError(f"not valid Unicode (a lone surrogate) in {_short(text)}")
        object.__setattr__(self, "turns", tuple(self.turns))
        object.__setattr__(self, "reference", reference)


def load_task(name: object, limit: object = None, path: object = None) -> list[Prompt]:
    """The prompts of a task, always in the order of the file.

    name: a key of `TASKS`; with `path`, any label for the user's own questions.
    limit: take the first `limit` prompts (a whole number, at least 1); None takes all.
    path: a question.jsonl file to read instead of the built-in prompts: one JSON object a line
        with question_id, turns and optionally category and reference. A bad line is reported by
        a UserWarning "file:line: what is wrong" and left out, the others are kept.

    Raises UserError for an unknown name, a bad limit, a path that cannot be read and a file
    without a single good line.
    """
    count = checked_limit(limit)
    if path is None:
        path = data_folder() / "questions" / f"{checked_task_name(name)}.jsonl"
    return _read_question_file(path)[:count]


def load_calibration_texts(limit: object = None) -> list[str]:
    """The built-in calibration texts: 32 of 60 to 200 words, in kinds that take turns.

    They share nothing with the prompts, so that a scale is never tuned on what it is tested on.
    The first `limit` are taken (a whole number, at least 1; None for all).
    """
    count = checked_limit(limit)
    lines = (data_folder() / "calibration.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines][:count]


def conversation(prompt: Prompt, answers: Sequence[str] = ()) -> list[dict[str, str]]:
    """The chat messages that ask the next turn of `prompt`, given the answers so far.

    The model's own answers become the context of its next turn, as in MT-bench: with n answers
    the result holds n question-answer pairs and then the user's turn n + 1, in the form
    {"role": "user" | "assistant", "content": text} that chat templates take.

    Raises UserError when no turn is left to ask.
    """
    if isinstance(answers, str):
        raise UserError(f"answers must be a list of strings, got the string {_short(answers)}")
    if len(answers) >= len(prompt.turns):
        raise UserError(
            f"question {_short(prompt.question_id)} has {len(prompt.turns)} turn(s), "
            f"so at most {len(prompt.turns) - 1} answers can precede one; got {len(answers)}"
        )
    messages = []
    for turn, answer in zip(prompt.turns, answers, strict=False):
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": prompt.turns[len(answers)]})
    return messages


# --- reading question.jsonl -----------------------------------------------------------------


def _read_question_file(path: object) -> list[Prompt]:
    """All good questions of a file; warns about each bad line; UserError if none is good."""
    prompts: list[Prompt] = []
    problems: list[str] = []
    line_of_id: dict[str, int] = {}
    for line_number, line in _lines(path):
        try:
            prompt = _parse_question(line)
            # results are stored by question, as text: two of one id could not be told apart
            key = str(prompt.question_id)
            if key in line_of_id:
                raise UserError(
                    f"question_id {_short(prompt.question_id)} was already used on line "
                    f"{line_of_id[key]}; give each question its own"
                )
        except UserError as error:
            problems.append(f"{path}:{line_number}: {error}")
        else:
            line_of_id[key] = line_number
            prompts.append(prompt)
    if not prompts:
        reason = f"; {problems[0]}" if problems else " (the file is empty)"
        raise UserError(
            f"no usable question in {str(path)!r}{reason}; every line must be a JSON object "
            'such as {"question_id": 1, "category": "chat", "turns": ["Hello?"]}'
        )
    for problem in problems:
        warnings.warn(f"{problem}; line left out", UserWarning, stacklevel=3)
    return prompts


def _lines(path: object) -> Iterator[tuple[int, bytes]]:
    """The non-blank lines of a file with their numbers (from 1)."""
    hint = "give the path of a question.jsonl file"
    try:
        file = Path(os.fsdecode(path)).expanduser()  # type: ignore[arg-type]
        content = None if file.is_dir() else file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no file {str(path)!r}; {hint}") from None
    except (OSError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"cannot read {_short(path)} ({first_line(error)}); {hint}") from error
    if content is None:
        raise UserError(f"{str(path)!r} is a folder; {hint}")
    # Only \n ends a line: str.splitlines would also cut at U+2028 and others, which are
    # allowed inside a JSON string. The \r of Windows line ends is white space to JSON.
    for line_number, line in enumerate(content.split(b"\n"), 1):
        if line.removeprefix(b"\xef\xbb\xbf").strip():
            yield line_number, line


def _parse_question(line: bytes) -> Prompt:
    """One line of a question.jsonl file; UserError says what is wrong with it."""
    try:
        record = json.loads(line.decode("utf-8-sig"))  # -sig: a byte order mark is skipped
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text (byte {error.start + 1}); save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON ({error.msg}, column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond all bounds
        raise UserError(f"not readable as JSON ({first_line(error)})") from None
    if not isinstance(record, dict):
        raise UserError(f"must be a JSON object with question_id and turns, got {_short(record)}")
    for field in ("question_id", "turns"):
        if field not in record:
            raise UserError(f"the field {field!r} is missing")
    return Prompt(
        question_id=record["question_id"],
        category="" if record.get("category") is None else record["category"],
        turns=record["turns"],
        reference=record.get("reference", ()),
    )


def _reference_texts(reference: object) -> tuple[str, ...]:
    """Model answers as a tuple, from a list, one string or number, or None."""
    if reference is None or reference == "":
        return ()
    answers = reference if isinstance(reference, list | tuple) else [reference]
    for answer in answers:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise UserError(f"reference must be a string or a list of them, got {_short(answer)}")
    return tuple(str(answer) for answer in answers)


# --- checks and small helpers ---------------------------------------------------------------


def data_folder() -> Path:
    """data/: inside the package when installed from a wheel, beside it in a checkout."""
    installed = Path(__file__).parent / "data"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "data"


def checked_task_name(name: object) -> str:
    if not isinstance(name, str) or name not in TASKS:
        raise UserError(f"unknown task {_short(name)}; choose one of: {', '.join(TASKS)}")
    return name


def checked_limit(limit: object) -> int | None:
    if limit is None:
        return None
    try:
        count = operator.index(limit)  # type: ignore[arg-type]
    except TypeError:
        count = 0
    if isinstance(limit, bool) or count < 1:
        raise UserError(f"limit must be a whole number of at least 1 or None, got {_short(limit)}")
    return count


def _short(value: object) -> str:
    """A value on one line, cut in the middle when long."""
    return " ".join(reprlib.repr(value).split())


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
