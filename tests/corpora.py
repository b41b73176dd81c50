"""Small made-up corpora, the same in every run."""

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data_prep.instances import TokenDocuments

SYLLABLES = [first + vowel + last for first in "bdfgklmnprst" for vowel in "aeiou" for last in ("", "n", "s")]


def marker(number: int) -> str:
    """A word that only document `number` holds."""
    return f"q{number:04d}z"


def make_documents(
    number: int, seed: int = 0, sentences: tuple[int, int] = (1, 14), words: tuple[int, int] = (3, 14)
) -> list[list[str]]:
    """Documents of sentences of frequent and rare made-up words; every sentence bears its document's marker."""
    draw = random.Random(seed)
    vocabulary = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 3))) for _ in range(400)]
    weights = [1 / (rank + 2) for rank in range(len(vocabulary))]
    documents = []
    for document in range(number):
        lines = []
        for _ in range(draw.randint(*sentences)):
            line = draw.choices(vocabulary, weights, k=draw.randint(*words))
            line.insert(draw.randrange(len(line) + 1), marker(document))
            lines.append(" ".join(line).capitalize() + ".")
        documents.append(lines)
    return documents


def write_corpus(path: Path, documents: Iterable[list[str]]) -> Path:
    """Write documents in the format `sentences`: a sentence a line, a blank line between documents."""
    path.write_text("\n\n".join("\n".join(document) for document in documents) + "\n", encoding="utf-8")
    return path


def token_documents(lengths: list[list[int]], seed: int = 0, dtype=np.uint32) -> TokenDocuments:
    """Documents of sentences of so many tokens; a token's id is its place, so every token is known again."""
    sentence_tokens = [tokens for document in lengths for tokens in document]
    hashes = np.random.default_rng(seed).integers(0, 1 << 64, (len(lengths), 2), dtype=np.uint64)
    return TokenDocuments.from_lengths(
        np.arange(sum(sentence_tokens)).astype(dtype),
        np.array(sentence_tokens),
        np.array([len(document) for document in lengths]),
        hashes[np.argsort(hashes[:, 0])],
    )


def files(folder: Path) -> dict[str, bytes]:
    """Relative name → content of every file below a folder, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
