"""BERT's WordPiece, read from Hugging Face's folders: tokenizer.json or vocab.txt, and tokenizer_config.json."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from data_prep.errors import UserError
from data_prep.shards import canonical_json

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
VOCABULARY_FILE = "vocab.txt"
# What transformers' BertTokenizer does where tokenizer_config.json does not say.
_BERT_NORMALIZER = {
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}
_BERT_MODEL = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
# These classes of transformers take tokenizer.json as it is; BertTokenizer takes the vocabulary alone from it.
_PLAIN_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class WordPieceBackend:
    """A WordPiece vocabulary with BERT's normalisation and splitting into words.

    Attributes:
        file_names: the files that make the ids.
        vocabulary: the pieces of the vocabulary itself, by id.
        added_tokens: what is matched before the text is cut into words: dicts with "id", "content" and flags, by id.
        normalizer, model: settings under the names that tokenizer.json has for them.
        special_pieces: the pieces that are "pad", "unk", "cls", "sep" and "mask".
        description: empty; nothing says what it was trained on.
    """

    def __init__(self, folder: Path, special_pieces: dict[str, str]):
        """Read the folder; `special_pieces` are the names of special pieces where it gives none."""
        names = (TOKENIZER_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE)
        saved, config, special = (_read_json(folder / name) for name in names)
        self._source = folder / (VOCABULARY_FILE if saved is None else TOKENIZER_FILE)
        self.file_names = [self._source.name] + [name for name in names[1:] if (folder / name).is_file()]
        self.description: dict = {}
        try:
            self.special_pieces = _special_pieces({**(special or {}), **(config or {})}, special_pieces)
            self._read_settings(folder / CONFIG_FILE, saved, config)
            self.vocabulary = self._read_vocabulary(saved)
            self.added_tokens = self._read_added_tokens(saved or {}, config or {})
            self._pieces = self._all_pieces()
            self.special_ids = {
                name: self._pieces.index(piece) for name, piece in self.special_pieces.items()
            }
            self._tokenizer = self._build()
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise UserError(
                f"{folder}: {', '.join(self.file_names)} are not as transformers writes them ({error!r}); get them again"
            ) from None
        self._check_special_pieces()

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens counted."""
        return len(self._pieces)

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides about ids, whatever files it came from."""
        content = [self.vocabulary, self.added_tokens, self.normalizer, self.model, self.special_pieces]
        return hashlib.sha256(canonical_json(content).encode()).hexdigest()

    def encode(self, sentences: Sequence[str]) -> list[np.ndarray]:
        """Ids of each sentence, int32 arrays, without special pieces."""
        encodings = self._tokenizer.encode_batch_fast(list(sentences), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The pieces of ids, `##` before what continues a word."""
        return [self._pieces[number] for number in ids]

    def _read_settings(self, path: Path, saved: dict | None, config: dict | None) -> None:
        self._check_kind(saved)
        as_it_is = self._takes_tokenizer_json(path, saved, config)
        self.normalizer = self._read_normalizer(saved) if as_it_is else _bert_normalizer(config)
        model = saved["model"] if as_it_is else {}
        self.model = {name: model.get(name, value) for name, value in _BERT_MODEL.items()}

    def _check_kind(self, saved: dict | None) -> None:
        if saved is None:
            return
        model = saved.get("model")
        kind = (
            model.get("type", "BPE" if "merges" in model else "WordPiece")
            if isinstance(model, dict)
            else None
        )
        if kind != "WordPiece":
            raise UserError(
                f"{self._source}: its model is {kind}, and only WordPiece is read from this file; give a folder with BERT's "
                "WordPiece or with a sentencepiece.model"
            )

    def _takes_tokenizer_json(self, path: Path, saved: dict | None, config: dict | None) -> bool:
        if config is None:
            if saved is None:
                raise UserError(
                    f"{path}: it is not there, and {VOCABULARY_FILE} alone does not say whether case is folded; write "
                    '{"do_lower_case": true} or {"do_lower_case": false} into it'
                )
            return True
        name = str(config.get("tokenizer_class") or "BertTokenizer").removesuffix("Fast")
        if name not in ("BertTokenizer", *_PLAIN_CLASSES) or (name != "BertTokenizer" and saved is None):
            raise UserError(
                f"{path}: tokenizer_class is {config['tokenizer_class']}; expected BertTokenizer, or PreTrainedTokenizerFast "
                f"with a {TOKENIZER_FILE}"
            )
        return name != "BertTokenizer"

    def _read_normalizer(self, saved: dict) -> dict:
        for part, kind in (("normalizer", "BertNormalizer"), ("pre_tokenizer", "BertPreTokenizer")):
            found = (saved.get(part) or {}).get("type")
            if found != kind:
                raise UserError(f"{self._source}: its {part} is {found}; expected BERT's, {kind}")
        return {name: saved["normalizer"].get(name, value) for name, value in _BERT_NORMALIZER.items()}

    def _read_vocabulary(self, saved: dict | None) -> list[str]:
        if saved is None:
            # transformers drops white space at the ends of a line too.
            pieces = [line.rstrip() for line in _read_text(self._source).removesuffix("\n").split("\n")]
            ids = {piece: number for number, piece in enumerate(pieces)}
        else:
            ids = saved["model"].get("vocab")
            if not isinstance(ids, dict):
                raise UserError(f"{self._source}: model.vocab is not an object of pieces and ids")
            pieces = sorted(ids, key=lambda piece: ids[piece])
        if sorted(ids.values()) != list(range(len(pieces))):
            raise UserError(
                f"{self._source}: {len(pieces):,} pieces do not have the ids 0 to {len(pieces) - 1:,}, each once; "
                "remove what stands there twice"
            )
        return pieces

    def _read_added_tokens(self, saved: dict, config: dict) -> list[dict]:
        known = {piece: number for number, piece in enumerate(self.vocabulary)}
        listed = [
            token | {"id": int(number)} for number, token in config.get("added_tokens_decoder", {}).items()
        ]
        by_content = {token["content"]: token for token in [*listed, *saved.get("added_tokens", [])]}
        for piece in self.special_pieces.values():
            plain = {"content": piece, "id": known.get(piece, -1), "normalized": False}
            by_content[piece] = by_content.get(piece, plain) | {"special": True}
        tokens = []
        for content, token in by_content.items():
            number = known.get(content, token["id"])
            flags = {flag: bool(token.get(flag, False)) for flag in _FLAGS}
            tokens.append({"id": number, "content": content, **flags})
        return sorted(tokens, key=lambda token: (token["id"], token["content"]))

    def _all_pieces(self) -> list[str]:
        pieces = list(self.vocabulary)
        for token in self.added_tokens:
            if token["id"] == len(pieces):
                pieces.append(token["content"])
            elif not (0 <= token["id"] < len(pieces) and pieces[token["id"]] == token["content"]):
                raise UserError(
                    f"{self._source}: it has no piece {token['content']}; a BERT tokenizer needs "
                    f"{', '.join(self.special_pieces.values())}"
                    if token["id"] < 0
                    else f"{self._source}: the added token {token['content']!r} has the id {token['id']}, which is not the next"
                )
        return pieces

    def _build(self) -> Tokenizer:
        # The workers are processes; threads below them would only compete with each other.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        ids = {piece: number for number, piece in enumerate(self.vocabulary)}
        tokenizer = Tokenizer(models.WordPiece(vocab=ids, unk_token=self.special_pieces["unk"], **self.model))
        tokenizer.normalizer = normalizers.BertNormalizer(**self.normalizer)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        for token in self.added_tokens:
            tokenizer.add_tokens([AddedToken(token["content"], **{flag: token[flag] for flag in _FLAGS})])
        tokenizer.encode_special_tokens = True  # as what they look like, not as special ids
        return tokenizer

    def _check_special_pieces(self) -> None:
        special = set(self.special_ids.values())
        for piece, ids in zip(self.special_ids, self.encode(list(self.special_pieces.values())), strict=True):
            if special & set(ids.tolist()) - {self.special_ids["unk"]}:
                raise UserError(
                    f"{self._source}: the special piece {self.special_pieces[piece]} is a word that text can contain; "
                    "choose one in brackets, like [MASK]"
                )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: it is not UTF-8 at byte {error.start}; get the file again") from None


def _read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise UserError(f"{path}: this is not JSON ({error}); get the file again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object; get the file again")
    return content


def _special_pieces(config: dict, defaults: dict[str, str]) -> dict[str, str]:
    found = {name: config.get(f"{name}_token") or piece for name, piece in defaults.items()}
    return {name: piece["content"] if isinstance(piece, dict) else piece for name, piece in found.items()}


def _bert_normalizer(config: dict) -> dict:
    names = {
        "handle_chinese_chars": "tokenize_chinese_chars",
        "strip_accents": "strip_accents",
        "lowercase": "do_lower_case",
    }
    return _BERT_NORMALIZER | {
        ours: config[theirs] for ours, theirs in names.items() if config.get(theirs) is not None
    }
