"""Tokenizers: text to ids. SentencePiece and WordPiece behind one class; SentencePiece models are trained here."""

import hashlib
import heapq
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from data_prep.errors import UserError
from data_prep.shards import file_sha256, write_atomically
from data_prep.wordpiece import TOKENIZER_FILE, VOCABULARY_FILE, WordPieceBackend

MODEL_FILE = "sentencepiece.model"
DESCRIPTION_FILE = "tokenizer_description.json"
# In this order at ids 0 to 4. [MASK] is a control piece: the text "[MASK]" never becomes it by accident.
SPECIAL_PIECES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
# SentencePiece's vocabulary depends on the number of threads, so it is a constant and not a setting.
TRAINER_THREADS = 16
MAX_SENTENCE_BYTES = 1 << 16


class Tokenizer:
    """A tokenizer in its folder: a SentencePiece model, or BERT's WordPiece in a Hugging Face folder.

    Attributes:
        folder: where it lies.
        backend: what does the work.
        vocab_size: number of ids.
        special_ids: ids of "pad", "unk", "cls", "sep" and "mask".
        description: settings it was trained with (empty for a tokenizer from elsewhere).
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.backend = _open_backend(self.folder)
        self.vocab_size = self.backend.vocab_size
        self.special_ids = self.backend.special_ids
        self.description = self.backend.description

    @property
    def pad_id(self) -> int:
        """Id of [PAD]."""
        return self.special_ids["pad"]

    @property
    def unk_id(self) -> int:
        """Id of [UNK]."""
        return self.special_ids["unk"]

    @property
    def cls_id(self) -> int:
        """Id of [CLS]."""
        return self.special_ids["cls"]

    @property
    def sep_id(self) -> int:
        """Id of [SEP]."""
        return self.special_ids["sep"]

    @property
    def mask_id(self) -> int:
        """Id of [MASK]."""
        return self.special_ids["mask"]

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give the same ids, whatever files they were read from."""
        return self.backend.fingerprint

    def encode(self, sentences: Sequence[str]) -> list[np.ndarray]:
        """Ids of each sentence, int32 arrays, without special pieces; many sentences a call are fastest.

        The text "[MASK]" and the like is text here and never becomes a special id.
        """
        return self.backend.encode(sentences)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The pieces of ids: SentencePiece has `▁` before a word's first, WordPiece `##` before its others."""
        return self.backend.pieces([int(number) for number in ids])

    def files(self) -> dict[str, str]:
        """File name → sha256 of all that makes the ids; a shard set keeps a copy and checks it."""
        return {name: file_sha256(self.folder / name) for name in self.backend.file_names}

    def describe(self) -> dict:
        """What shards say about their tokenizer: sizes, special ids, file hashes."""
        return {"vocab_size": self.vocab_size, "special_ids": self.special_ids, "files": self.files()}


def _open_backend(folder: Path) -> "SentencePieceBackend | WordPieceBackend":
    """The tokenizer in the folder. One that we exported has both kinds of files; its ids are the model's."""
    if (folder / MODEL_FILE).is_file():
        return SentencePieceBackend(folder)
    if (folder / TOKENIZER_FILE).is_file() or (folder / VOCABULARY_FILE).is_file():
        return WordPieceBackend(folder, SPECIAL_PIECES)
    raise UserError(
        f"{folder / MODEL_FILE}: there is no tokenizer here, nor a {TOKENIZER_FILE} or {VOCABULARY_FILE}; train one with "
        f"`python data_prep/run.py tokenizer --input TEXT --output {folder}`"
    )


class SentencePieceBackend:
    """A SentencePiece model with BERT's special pieces.

    Attributes:
        file_names: the files that make the ids.
        description: settings it was trained with (empty for a model from elsewhere).
    """

    def __init__(self, folder: Path):
        self._model = folder / MODEL_FILE
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(self._model))
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"{self._model}: SentencePiece cannot read it ({error}); train the tokenizer again"
            ) from None
        self.vocab_size = self._processor.get_piece_size()
        self.special_ids = {name: self._special_id(name, piece) for name, piece in SPECIAL_PIECES.items()}
        self.description = self._read_description(folder / DESCRIPTION_FILE)
        self.file_names = [MODEL_FILE] + ([DESCRIPTION_FILE] if self.description else [])

    @property
    def model_bytes(self) -> bytes:
        """The model file's content."""
        return self._model.read_bytes()

    @property
    def fingerprint(self) -> str:
        """A hash of the model."""
        return file_sha256(self._model)

    def encode(self, sentences: Sequence[str]) -> list[np.ndarray]:
        """Ids of each sentence, int32 arrays, without special pieces."""
        return self._processor.encode_as_numpy(list(sentences), num_threads=1)

    def pieces(self, ids: list[int]) -> list[str]:
        """The pieces of ids, `▁` before a word's first."""
        return self._processor.id_to_piece(ids)

    def _read_description(self, path: Path) -> dict:
        if not path.is_file():
            return {}
        try:
            description = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: this is not JSON ({error}); train the tokenizer again") from None
        if not isinstance(description, dict):
            raise UserError(f"{path}: expected a JSON object; train the tokenizer again")
        if description.get("model_sha256", "") not in ("", self.fingerprint):
            raise UserError(
                f"{self._model}: it is not the model that {path.name} describes; train the tokenizer again"
            )
        return description

    def _special_id(self, name: str, piece: str) -> int:
        number = self._processor.piece_to_id(piece)
        if number == self._processor.unk_id() and name != "unk":
            raise UserError(
                f"{self._model}: it has no piece {piece}; train a tokenizer with the `tokenizer` command"
            )
        return number


class BottomSample:
    """The sentences with the smallest hashes whose text fits a budget.

    The sample is a function of the set of sentences alone: neither their order nor the number of workers that
    looked at them matters, and merging samples of parts gives the sample of the whole. Repeated sentences
    count once.
    """

    def __init__(self, budget_bytes: int):
        self.budget_bytes = budget_bytes
        self._bytes = 0
        self._heap: list[tuple[int, str]] = []  # negated hashes: the largest hash is on top
        self._hashes: set[int] = set()
        self._limit = 1 << 64

    def add(self, hashed: int, sentence: str) -> None:
        """Offer a sentence with its 64-bit hash."""
        if hashed >= self._limit or hashed in self._hashes:
            return
        heapq.heappush(self._heap, (-hashed, sentence))
        self._hashes.add(hashed)
        self._bytes += len(sentence.encode())
        while self._bytes > self.budget_bytes:
            negated, dropped = heapq.heappop(self._heap)
            # Without this limit a short sentence could slip in behind a dropped one, and order would matter.
            self._limit = -negated
            self._hashes.discard(-negated)
            self._bytes -= len(dropped.encode())

    def merge(self, limit: int, items: Iterable[tuple[int, str]]) -> None:
        """Take over another sample: its limit and its items."""
        self._limit = min(self._limit, limit)
        kept = [item for item in self._heap if -item[0] < self._limit]
        if len(kept) < len(self._heap):
            self._heap = kept
            heapq.heapify(self._heap)
            self._hashes = {-item[0] for item in kept}
            self._bytes = sum(len(item[1].encode()) for item in kept)
        for hashed, sentence in items:
            self.add(hashed, sentence)

    def items(self) -> list[tuple[int, str]]:
        """(hash, sentence) by ascending hash."""
        return sorted((-negated, sentence) for negated, sentence in self._heap)

    @property
    def limit(self) -> int:
        """Every sentence with a smaller hash is in the sample."""
        return self._limit


def train_tokenizer(sentences: Iterator[str], folder: Path, description: dict) -> None:
    """Train a SentencePiece unigram model and write the tokenizer folder.

    Args:
        sentences: training text; the same sentences in the same order give the same bytes.
        folder: where to write.
        description: settings; "vocab_size", "character_coverage" and "normalization" are used here.
    Raises:
        UserError: the text does not support a vocabulary of that size.
    """
    if description["vocab_size"] <= len(SPECIAL_PIECES):
        raise UserError(
            f"--vocab_size {description['vocab_size']}: the special pieces alone are {len(SPECIAL_PIECES)}; ask for more"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences,
            model_writer=model,
            model_type="unigram",
            vocab_size=description["vocab_size"],
            character_coverage=description["character_coverage"],
            normalization_rule_name=description["normalization"],
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece=SPECIAL_PIECES["pad"],
            unk_piece=SPECIAL_PIECES["unk"],
            bos_piece=SPECIAL_PIECES["cls"],
            eos_piece=SPECIAL_PIECES["sep"],
            control_symbols=[SPECIAL_PIECES["mask"]],
            unk_surface=SPECIAL_PIECES["unk"],
            max_sentence_length=MAX_SENTENCE_BYTES,
            input_sentence_size=0,
            shuffle_input_sentence=False,
            num_threads=TRAINER_THREADS,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(_training_failure(str(error), description["vocab_size"])) from None
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / MODEL_FILE, model.getvalue())
    # Written last and with the model's hash: a kill in between leaves no tokenizer that passes for another.
    description = description | {"model_sha256": hashlib.sha256(model.getvalue()).hexdigest()}
    content = json.dumps(description, indent=1, sort_keys=True) + "\n"
    write_atomically(folder / DESCRIPTION_FILE, content.encode())


def _training_failure(message: str, vocab_size: int) -> str:
    too_high = re.search(r"value\s*<=\s*(\d+)", message)
    if too_high:
        return f"--vocab_size {vocab_size}: the text supports at most {too_high[1]}; ask for {too_high[1]} or less, or give more text"
    too_low = re.search(r"required_chars\.\s*\d+ vs (\d+)", message)
    if too_low:
        return (
            f"--vocab_size {vocab_size}: the characters of this text alone need {too_low[1]}; "
            f"ask for more than {too_low[1]} or lower --character_coverage"
        )
    return f"SentencePiece could not train a tokenizer on this text: {message.strip()}"
