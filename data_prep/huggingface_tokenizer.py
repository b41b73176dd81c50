"""A tokenizer as Hugging Face's libraries read it: the same ids for the same text, special pieces around it."""

import json
from pathlib import Path

from data_prep.charsmap import SEPARATORS, escaped, replace_pattern, same_normalization
from data_prep.errors import UserError
from data_prep.shards import write_atomically
from data_prep.tokenizer import SPECIAL_PIECES, SentencePieceBackend, Tokenizer
from data_prep.wordpiece import CONFIG_FILE, TOKENIZER_FILE, VOCABULARY_FILE, WordPieceBackend

# AutoTokenizer takes tokenizer.json as it is for this class. For BertTokenizer, transformers 5 takes the vocabulary
# alone from it, makes the rest anew, and would cut a SentencePiece vocabulary's text with WordPiece.
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
_SPACE = "▁"


def write_huggingface_tokenizer(tokenizer: Tokenizer, folder: str | Path, *, max_length: int) -> None:
    """Write the folder that `transformers.AutoTokenizer.from_pretrained` reads, and `Tokenizer` too.

    AutoTokenizer gives the ids of `tokenizer.encode` with `[CLS] … [SEP]` around them, `[CLS] A [SEP] B [SEP]` with token
    types 0 and 1 for pairs; there the text "[MASK]" is the mask. The ids can differ where two segmentations are equally good:
    orders of the same pieces in runs like `-----`, and, rarely, sums of scores that differ less than SentencePiece's
    32 bits can hold in a long line (`tokenizers` adds in 64).
    The same tokenizer gives the same bytes.

    Args:
        tokenizer: what to write.
        folder: where to; made if it is not there. A config.json may stand beside.
        max_length: most tokens that the model takes, special pieces counted.
    Raises:
        UserError: the SentencePiece model is of a kind that has no equal there.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    backend = tokenizer.backend
    if isinstance(backend, WordPieceBackend):
        content, config = _wordpiece(backend), _bert_settings(backend)
        vocabulary = "".join(f"{piece}\n" for piece in backend.vocabulary)
        write_atomically(folder / VOCABULARY_FILE, vocabulary.encode())
        special_pieces = backend.special_pieces
    else:
        content, config, special_pieces = _unigram(backend, tokenizer), {}, SPECIAL_PIECES
        for name in backend.file_names:
            write_atomically(folder / name, (tokenizer.folder / name).read_bytes())
    content = content | {"post_processor": _template(special_pieces, tokenizer.special_ids)}
    config = {
        "tokenizer_class": _TOKENIZER_CLASS,
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": piece for name, piece in special_pieces.items()},
        **config,
    }
    for name, value in ((TOKENIZER_FILE, content), (CONFIG_FILE, config)):
        write_atomically(folder / name, (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode())


def _tokenizer(**parts: dict | list | None) -> dict:
    return {"version": "1.0", "truncation": None, "padding": None, **parts}


def _wordpiece(backend: WordPieceBackend) -> dict:
    model = {
        "type": "WordPiece",
        "unk_token": backend.special_pieces["unk"],
        **backend.model,
        "vocab": {piece: number for number, piece in enumerate(backend.vocabulary)},
    }
    return _tokenizer(
        added_tokens=backend.added_tokens,
        normalizer={"type": "BertNormalizer", **backend.normalizer},
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": backend.model["continuing_subword_prefix"], "cleanup": True},
        model=model,
    )


def _bert_settings(backend: WordPieceBackend) -> dict:
    """For programs that name the class BertTokenizer themselves."""
    return {
        "do_lower_case": backend.normalizer["lowercase"],
        "strip_accents": backend.normalizer["strip_accents"],
        "tokenize_chinese_chars": backend.normalizer["handle_chinese_chars"],
    }


def _template(special_pieces: dict[str, str], special_ids: dict[str, int]) -> dict:
    """`[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`."""
    cls, sep = special_pieces["cls"], special_pieces["sep"]

    def special(piece: str, segment: int) -> dict:
        return {"SpecialToken": {"id": piece, "type_id": segment}}

    single = [special(cls, 0), {"Sequence": {"id": "A", "type_id": 0}}, special(sep, 0)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}, special(sep, 1)],
        "special_tokens": {
            piece: {"id": piece, "ids": [special_ids[name]], "tokens": [piece]}
            for name, piece in (("cls", cls), ("sep", sep))
        },
    }


def _unigram(backend: SentencePieceBackend, tokenizer: Tokenizer) -> dict:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(backend.model_bytes)
    path = tokenizer.folder / backend.file_names[0]
    _check_model(model, path)
    special_ids = set(tokenizer.special_ids.values())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    try:
        normalization = same_normalization(
            model.normalizer_spec.precompiled_charsmap, set().union(*(piece.piece for piece in model.pieces))
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "split": False}
    return _tokenizer(
        added_tokens=[{"id": n, "content": model.pieces[n].piece, **flags} for n in sorted(special_ids)],
        normalizer={
            "type": "Sequence",
            "normalizers": normalization + _hidden_special_pieces(model) + _folded_spaces(),
        },
        # "first", not "always": what follows "[MASK]" begins a word only behind a space, as in training.
        pre_tokenizer=metaspace | {"prepend_scheme": "first"},
        decoder=metaspace | {"prepend_scheme": "always"},
        model={
            "type": "Unigram",
            "unk_id": tokenizer.unk_id,
            "vocab": _scored_pieces(model),
            "byte_fallback": False,
        },
    )


def _check_model(model, path: Path) -> None:
    kinds = model.SentencePiece.Type
    spec, trainer = model.normalizer_spec, model.trainer_spec
    allowed = {kinds.NORMAL, kinds.UNKNOWN, kinds.CONTROL}
    reasons = {
        "it is not a unigram model": trainer.model_type != trainer.UNIGRAM,
        "it has pieces for bytes, user-defined or unused ones": {piece.type for piece in model.pieces}
        - allowed,
        "it does not fold and escape spaces with one in front": not (
            spec.add_dummy_prefix and spec.remove_extra_whitespaces and spec.escape_whitespaces
        ),
        f"it has {_SPACE} at the end of words": trainer.treat_whitespace_as_suffix,
        "some of its pieces have characters that are no pieces": _hidden_characters(model),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(
                f"{path}: it cannot be written as a Hugging Face tokenizer with the same ids, as {reason}"
            )


def _hidden_characters(model) -> set[str]:
    """Characters that the model knows inside of larger pieces only.

    Where there are none, the unknown characters of a text are the same in all segmentations, and what each costs,
    which `_scored_pieces` changes, does not matter.
    """
    pieces = {piece.piece for piece in model.pieces if piece.type == model.SentencePiece.Type.NORMAL}
    return set().union(*pieces) - pieces


def _scored_pieces(model) -> list[list]:
    """Pieces and scores, special ones so low that any other segmentation into known pieces is better.

    SentencePiece never finds special pieces in text, but `tokenizers` would: the text "［ＭＡＳＫ］" is "[MASK]" once
    it is normalised, and only before that are added tokens looked for.
    """
    normal = model.SentencePiece.Type.NORMAL
    worst = min(piece.score for piece in model.pieces if piece.type == normal)
    never = worst * (1 + max(len(piece.piece) for piece in model.pieces if piece.type != normal))
    return [[piece.piece, piece.score if piece.type == normal else never] for piece in model.pieces]


def _hidden_special_pieces(model) -> list[dict]:
    """Special pieces in normalised text with one unknown character written as another unknown one.

    Unknown characters cost more than the special piece, so its score does not hide a piece that has one.
    """
    normal = model.SentencePiece.Type.NORMAL
    known = {piece.piece for piece in model.pieces if piece.type == normal}
    steps = []
    for piece in model.pieces:
        place = next((n for n, character in enumerate(piece.piece) if character not in known), None)
        if piece.type != normal and place is not None:
            before, after = escaped(piece.piece[:place]), escaped(piece.piece[place + 1 :])
            pattern = f"(?<={before}){escaped(piece.piece[place])}(?={after})"
            steps.append(replace_pattern(pattern, next(mark for mark in SEPARATORS if mark not in known)))
    return steps


def _folded_spaces() -> list[dict]:
    """Spaces as SentencePiece has them: one for many, none at the ends, `▁` in the text itself like any character.

    A space in front stays: it stands for the `▁` that is put there otherwise.
    """
    patterns = {" {2,}": " ", rf"[ {_SPACE}]+\z": "", rf"\A{_SPACE}": f" {_SPACE}"}
    return [replace_pattern(pattern, content) for pattern, content in patterns.items()]
