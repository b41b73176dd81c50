"""Command-line types and help that all programs share."""

import argparse
from pathlib import Path


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults behind every option that has one, examples as they were written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def _number(text: str, kind: type, expected: str, right) -> int | float:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not right(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value


def positive_int(text: str) -> int:
    """A whole number from 1."""
    return _number(text, int, "a whole number above 0", lambda value: value > 0)


def whole_number(text: str) -> int:
    """A whole number from 0."""
    return _number(text, int, "a whole number from 0", lambda value: value >= 0)


def positive_float(text: str) -> float:
    """A number above 0."""
    return _number(text, float, "a number above 0", lambda value: 0 < value < float("inf"))


def non_negative_float(text: str) -> float:
    """A number from 0."""
    return _number(text, float, "a number from 0", lambda value: 0 <= value < float("inf"))


def share(text: str) -> float:
    """A number from 0 to 1."""
    return _number(text, float, "a share from 0 to 1", lambda value: 0 <= value <= 1)


def probability(text: str) -> float:
    """A number from 0 to below 1."""
    return _number(text, float, "a probability from 0 to below 1", lambda value: 0 <= value < 1)


def local_folder(text: str) -> Path:
    """A folder on a disk to read from; what looks like a URL is none."""
    advice = "all ranks read shards at random places: copy the folder to a disk that every node sees, or to each node's own"
    return _no_url(text, f"{advice}, and give its path")


def output_folder(text: str) -> Path:
    """A folder on a disk to write to; what looks like a URL is none."""
    advice = "a run locks its folder, renames in it and appends to its files: give the path of one on a disk"
    return _no_url(text, f"{advice} that every node sees, and copy it afterwards")


def _no_url(text: str, advice: str) -> Path:
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is a URL, and {advice}")
    return Path(text)
