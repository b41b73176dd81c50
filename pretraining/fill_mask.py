"""Fill the [MASK]s of sentences with what a trained model holds for likely.

    python pretraining/fill_mask.py runs/base-zero2 "자연어 처리는 [MASK] 분야에서 중요하다."
    python pretraining/fill_mask.py exported --top_k 3 --json < sentences.txt

MODEL is a run folder (its newest whole checkpoint), a checkpoint folder or a Hugging Face folder. Fillers are
pieces as the tokenizer has them: a SentencePiece piece that begins a word has ▁ before it, a WordPiece piece
that goes on with one has ##.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.errors import UserError, run_program
from data_prep.options import Help, positive_int

if TYPE_CHECKING:  # torch takes a second to import, --help none
    from data_prep.tokenizer import Tokenizer
    from pretraining.loading import Pretrained
    from pretraining.model import BertForPreTraining

MASK = "[MASK]"
WORD_START = "▁"
CONTINUATION = "##"
# Stands for the mask where the text behind it is tokenized: no vocabulary has it, so it is always a piece alone.
PLACEHOLDER = "\U0010fffd"


@dataclass(frozen=True)
class Filler:
    """A piece in the place of a mask, and its probability among all pieces of the vocabulary."""

    piece: str
    id: int
    probability: float


def main(argv: list[str] | None = None) -> int:
    """Fill masks; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="pretraining/fill_mask.py", description=__doc__, formatter_class=Help
    )
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="run folder, checkpoint folder or Hugging Face folder")
    add("sentences", nargs="*", metavar="SENTENCE", help="with [MASK] in it; without any, lines of stdin")
    add("--top_k", type=positive_int, default=5, help="fillers for each mask")
    add("--json", action="store_true", help="print a JSON object per sentence")
    arguments = parser.parse_args(argv)
    given = _given_sentences(arguments.sentences)
    filler = MaskFiller(arguments.model)
    for place, sentence in given or _stdin_sentences():
        _print_fillers(sentence, filler.fill(sentence, arguments.top_k, place), arguments.json)
    return 0


def _given_sentences(sentences: list[str]) -> list[tuple[str, str]]:
    """Sentences of the command line with their place for messages, checked before the model is loaded."""
    given = [(f"sentence {number}", sentence) for number, sentence in enumerate(sentences, 1)]
    for place, sentence in given:
        _check_sentence(sentence, place)
    return given


def _stdin_sentences() -> Iterator[tuple[str, str]]:
    """Lines of stdin that are not blank, with their place for messages; each is answered as it comes."""
    empty = True
    for number, line in enumerate(sys.stdin.buffer, 1):
        place = f"line {number} of stdin"
        try:
            sentence = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{place}: byte {error.start + 1} is not UTF-8; convert the text to UTF-8"
            ) from None
        if sentence:
            empty = False
            yield place, sentence
    if empty:
        raise UserError(
            f"stdin: found no sentence; give sentences with {MASK} as arguments, or as lines of stdin"
        )


def _check_sentence(sentence: str, place: str) -> None:
    if MASK not in sentence:
        raise UserError(
            f"{place}: found no {MASK} in {sentence!r}; write {MASK} where a piece is to be filled in"
        )
    try:
        sentence.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{place}: the text {sentence!r} is not UTF-8; convert it to UTF-8") from None


def _print_fillers(sentence: str, masks: list[list[Filler]], as_json: bool) -> None:
    if as_json:
        content = {"sentence": sentence, "masks": [[vars(filler) for filler in fillers] for fillers in masks]}
        print(json.dumps(content, ensure_ascii=False), flush=True)
        return
    print(sentence)
    for number, fillers in enumerate(masks, 1):
        if len(masks) > 1:
            print(f"  {MASK} {number}")
        for filler in fillers:
            print(f"  {filler.probability:8.2%}  {filler.piece}")
    sys.stdout.flush()


class MaskFiller:
    """A model with its tokenizer, ready to fill masks.

    Raises:
        UserError: the model cannot be read, or has no masked-LM head.
    """

    def __init__(self, path: Path):
        from pretraining.huggingface import absent_heads
        from pretraining.loading import load_pretrained

        self.pretrained = load_pretrained(path)
        if "masked_lm_head" in absent_heads(self.pretrained.state_dict):
            raise UserError(
                f"{path}: these weights have no masked-LM head, so they cannot fill masks; "
                "train one: python pretraining/run.py --init_from FOLDER"
            )
        self.tokenizer = self.pretrained.open_tokenizer()
        self._encode = MaskedText(self.tokenizer).encode
        self._model = _build_model(self.pretrained)

    def fill(self, sentence: str, top_k: int = 5, place: str = "the sentence") -> list[list[Filler]]:
        """The likeliest fillers of each mask, the best first; masks are filled independently of each other.

        Raises:
            UserError: the sentence has no mask, or is too long for the model.
        """
        import torch

        _check_sentence(sentence, place)
        inner = self._encode(sentence)
        longest = self.pretrained.config.max_position_embeddings
        if len(inner) + 2 > longest:
            raise UserError(
                f"{place}: {len(inner) + 2:,} tokens with [CLS] and [SEP], but the model has {longest:,} positions; "
                "shorten the text"
            )
        ids = torch.tensor([self.tokenizer.cls_id, *inner, self.tokenizer.sep_id])
        positions = (ids == self.tokenizer.mask_id).nonzero().flatten()
        with torch.inference_mode():
            hidden = self._model.bert(ids, torch.zeros_like(ids), torch.arange(len(ids)), [len(ids)])
            logits = self._model.masked_lm_logits(hidden, positions)[:, : self.tokenizer.vocab_size]
            best = logits.double().softmax(-1).topk(min(top_k, self.tokenizer.vocab_size))
        return [
            [Filler(*filler) for filler in zip(self.tokenizer.pieces(row), row, probabilities, strict=True)]
            for row, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


def _build_model(pretrained: "Pretrained") -> "BertForPreTraining":
    import torch

    from pretraining.model import BertForPreTraining

    with torch.device("meta"):
        model = BertForPreTraining(pretrained.config)
    model.load_state_dict(pretrained.state_dict, strict=False, assign=True)
    return model.eval()


class MaskedText:
    """Tokenizes text with [MASK]s in it so that the rest has the pieces that it has in running text.

    Tokenizers begin each text with a new word. Behind a mask that is wrong: in "un[MASK]able," neither "able"
    nor "," begins one.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        from data_prep.wordpiece import WordPieceBackend

        self._tokenizer = tokenizer
        pieces = tokenizer.pieces(range(tokenizer.vocab_size))
        self._ids = {piece: number for number, piece in enumerate(pieces)}
        self._is_wordpiece = isinstance(tokenizer.backend, WordPieceBackend)

    def encode(self, text: str) -> list[int]:
        """Ids of a text without [CLS] and [SEP]; each [MASK] is one id."""
        first, *others = text.split(MASK)
        ids = self._plain(first)
        for other in others:
            ids += [self._tokenizer.mask_id, *self._behind_mask(other)]
        return ids

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode([text])[0].tolist()

    def _behind_mask(self, text: str) -> list[int]:
        plain = self._plain(text)
        if not plain or text[0].isspace():
            return plain
        return (
            self._continued_word(text, plain) if self._is_wordpiece else self._behind_placeholder(text, plain)
        )

    def _behind_placeholder(self, text: str, plain: list[int]) -> list[int]:
        """SentencePiece: what follows the placeholder, which begins the word in the mask's stead."""
        unknown = self._tokenizer.unk_id
        rest = self._plain(PLACEHOLDER + text)[len(self._plain(PLACEHOLDER)) :]
        # Unknown characters side by side are one piece, in which the placeholder took part.
        begins = (
            plain[1] if self._tokenizer.pieces(plain[:1]) == [WORD_START] and len(plain) > 1 else plain[0]
        )
        return [unknown, *rest] if begins == unknown else rest

    def _continued_word(self, text: str, plain: list[int]) -> list[int]:
        """WordPiece: the pieces of the first word as those of a word's end, found from the left, longest first."""
        if plain[0] == self._tokenizer.unk_id or self._plain("x" + text) == self._plain("x") + plain:
            return plain  # punctuation and ideographs are words of their own wherever they stand
        pieces = self._tokenizer.pieces(plain)
        count = 1
        while count < len(pieces) and pieces[count].startswith(CONTINUATION):
            count += 1
        word = "".join(piece.removeprefix(CONTINUATION) for piece in pieces[:count])
        ids = []
        while word:
            known = (end for end in range(len(word), 0, -1) if CONTINUATION + word[:end] in self._ids)
            end = next(known, None)
            if end is None:
                return plain
            ids.append(self._ids[CONTINUATION + word[:end]])
            word = word[end:]
        return ids + plain[count:]


if __name__ == "__main__":
    sys.exit(run_program(main))
