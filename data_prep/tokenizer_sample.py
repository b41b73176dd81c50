"""The sentences that a tokenizer is trained on: a sample by hash, the held-out documents left out."""

import hashlib
from collections.abc import Sequence

from data_prep.documents import document_hash, read_documents
from data_prep.errors import UserError
from data_prep.inputs import InputFile, InputSplit, ReadOptions, split_inputs
from data_prep.plan import held_out
from data_prep.tokenizer import MAX_SENTENCE_BYTES, BottomSample
from data_prep.workers import progress_bar, run_tasks

# SentencePiece leaves longer ones out of its training text without a word. This many characters always fit.
LONGEST_SENTENCE = MAX_SENTENCE_BYTES // 4


def sample_sentences(
    files: Sequence[InputFile],
    options: ReadOptions,
    *,
    eval_fraction: float,
    budget_bytes: int,
    split_bytes: int,
    workers: int,
) -> list[str]:
    """Different sentences with the smallest hashes, by ascending hash, up to `budget_bytes` of text.

    Raises:
        UserError: there is no text.
    """
    splits = split_inputs(files, split_bytes)
    sample = BottomSample(budget_bytes)
    bar = progress_bar(sum(split.end - split.start for split in splits), "B", "sample")
    todo = [(split, options, eval_fraction, budget_bytes) for split in splits]
    for _, limit, items in run_tasks(_sample_split, todo, workers, bar, amount=lambda result: result[0]):
        sample.merge(limit, items)
    sentences = [sentence for _, sentence in sample.items()]
    if not sentences:
        raise UserError(
            f"{', '.join(file.path for file in files[:3])}: no text to train on was found in the input; check --format "
            f"({', '.join(sorted({split.format for split in splits}))} was used), --eval_fraction and --sample_mb"
        )
    return sentences


def _sample_split(
    split: InputSplit, options: ReadOptions, eval_fraction: float, budget_bytes: int
) -> tuple[int, int, list[tuple[int, str]]]:
    sample = BottomSample(budget_bytes)
    for sentences in read_documents(split, options):
        if not held_out(document_hash(sentences), eval_fraction):
            for sentence in (sentence[:LONGEST_SENTENCE] for sentence in sentences):
                digest = hashlib.blake2b(sentence.encode(), digest_size=8).digest()
                sample.add(int.from_bytes(digest, "big"), sentence)
    return split.end - split.start, sample.limit, sample.items()
