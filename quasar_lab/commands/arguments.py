"""Argument types that several commands share."""

import argparse


def ngram_range(text: str) -> tuple[int, int]:
    """ "1:3" -> (1, 3); "3" -> (1, 3)."""
    parts = text.split(":")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r}: give MIN:MAX, e.g. 1:3, or MAX alone")
    return (1, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def names(text: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def named_path(text: str) -> tuple[str, str]:
    """ "mine=question.jsonl" -> ("mine", "question.jsonl")."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=FILE, e.g. mine=question.jsonl")
    return name, path
