"""Predict with a fine-tuned model: one JSON object per text, with the label and the probability of each label.

python fine_tuning/predict.py runs/sst2 "a charming and often affecting journey" "bleak"
python fine_tuning/predict.py runs/sst2 < sentences.txt
python fine_tuning/predict.py runs/sst2 --jsonl < reviews.jsonl
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from data_prep.errors import UserError, run_program
from data_prep.inputs import LineError
from data_prep.options import Help
from data_prep.rows import parse_json_line
from fine_tuning.examples import field_text

# Lines that are read before they are predicted together.
CHUNK = 512
STDIN = "standard input"


def main(argv: list[str] | None = None) -> int:
    """Predict; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="fine_tuning/predict.py", description=__doc__, formatter_class=Help, allow_abbrev=False
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="what fine_tuning/run.py wrote, or its model folder")
    add("texts", nargs="*", metavar="TEXT", help="texts; without any, each line of standard input is one")
    add(
        "--jsonl",
        action="store_true",
        help="lines of standard input are JSON objects with the text in a field",
    )
    add(
        "--text_column", metavar="NAME", help="that field (default: the column that the model was trained on)"
    )
    arguments = parser.parse_args(argv)
    if arguments.texts and arguments.jsonl:
        raise UserError("--jsonl is for lines of standard input: leave it out, or give no texts")
    # From here on it takes seconds: torch is imported.
    import torch

    from fine_tuning.model_folder import Predictor

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    predictor = Predictor(arguments.folder, device)
    field = arguments.text_column or predictor.description.text_columns[0]
    texts = arguments.texts or _lines(sys.stdin.buffer, field if arguments.jsonl else None)
    for chunk in _chunks(texts):
        for probabilities in predictor.probabilities([chunk]):
            label = max(probabilities, key=probabilities.get)
            print(json.dumps({"label": label, "probabilities": probabilities}, ensure_ascii=False))
        sys.stdout.flush()
    return 0


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(texts)
    while chunk := list(itertools.islice(iterator, CHUNK)):
        yield chunk


def _lines(stream: BinaryIO, field: str | None) -> Iterator[str]:
    """The text of each line; with `field`, of the JSON object in each line."""
    for number, raw in enumerate(stream, start=1):
        place = f"{STDIN}, line {number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise UserError(f"{place}: the text is not valid UTF-8; convert it first") from None
        if field is None:
            yield line
        elif not line.isspace() and line:
            yield _json_text(line, number, field, place)


def _json_text(line: str, number: int, field: str, place: str) -> str:
    try:
        row = parse_json_line(line, number, [field])
    except LineError as error:
        raise UserError(f"{place}: {error}") from None
    return field_text(row.field(field), field, place)


if __name__ == "__main__":
    sys.exit(run_program(main))
