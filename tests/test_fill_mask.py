"""Filling masks: the text around them, the probabilities, the program and its complaints."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from corpora import make_documents
from small_runs import make_tokenizer, random_model, tiny_config, write_run

from data_prep.errors import UserError, run_program
from data_prep.tokenizer import Tokenizer
from pretraining.fill_mask import MaskedText, MaskFiller, main
from pretraining.huggingface import config_to_huggingface, to_huggingface


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    """A SentencePiece tokenizer."""
    return make_tokenizer(tmp_path_factory.mktemp("fill_mask"))


@pytest.fixture(scope="module")
def run(tokenizer_folder, tmp_path_factory) -> Path:
    """A run folder with one checkpoint; rows that only pad the vocabulary would win if they were asked."""
    model = random_model(tiny_config(), seed=1)
    with torch.no_grad():
        model.masked_lm_head.bias[300:] = 1000.0
    folder = tmp_path_factory.mktemp("fill_mask") / "run"
    write_run(folder, model, tokenizer_folder)
    return folder


def words_of(tokenizer: Tokenizer) -> tuple[str, str]:
    """A piece that is a whole word, without its ▁, and one that only goes on with a word."""
    pieces = tokenizer.pieces(range(5, tokenizer.vocab_size))
    whole = next(piece[1:] for piece in pieces if piece.startswith("▁") and len(piece) > 3)
    return whole, next(piece for piece in pieces if not piece.startswith("▁") and piece.isalpha())


def test_text_around_masks_is_as_in_running_text(tokenizer_folder):
    """Words behind a mask begin with ▁ only where a space is; masks stand at both ends and side by side."""
    tokenizer = Tokenizer(tokenizer_folder)
    whole, inner = words_of(tokenizer)
    expected = {
        "[MASK]": ["[MASK]"],
        "  [MASK]  ": ["[MASK]"],
        f"[MASK] {whole}": ["[MASK]", f"▁{whole}"],
        f"{whole} [MASK] {whole}": [f"▁{whole}", "[MASK]", f"▁{whole}"],
        f"{whole} [MASK].": [f"▁{whole}", "[MASK]", "."],
        f"{whole}[MASK]{inner} {whole}": [f"▁{whole}", "[MASK]", inner, f"▁{whole}"],
        "[MASK][MASK] [MASK].": ["[MASK]"] * 3 + ["."],
        f"{whole}\t[MASK]\u3000{whole}": [f"▁{whole}", "[MASK]", f"▁{whole}"],
        # Unknown characters are pieces too, also right behind a mask.
        "[MASK]☃.": ["[MASK]", "[UNK]", "."],
        "[MASK] ☃": ["[MASK]", "▁", "[UNK]"],
    }
    masked = MaskedText(tokenizer)
    for text, pieces in expected.items():
        assert tokenizer.pieces(masked.encode(text)) == pieces, text
    assert tokenizer.mask_id not in masked.encode("[mask]")


def test_wordpiece_goes_on_behind_a_mask(tmp_path):
    """WordPiece: what is glued to a mask has the pieces of a word's end, but for punctuation and ideographs, which
    are words of their own."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = ["un", "able", "##able", "ing", "##ing", "play", "x", "##x", ",", "##,", "学", "##学", "▁"]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *words]) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    tokenizer = Tokenizer(tmp_path)
    expected = {
        "un[MASK]able": ["un", "[MASK]", "##able"],
        "un [MASK] able": ["un", "[MASK]", "able"],
        "[MASK]ABLE, able": ["[MASK]", "##able", ",", "able"],
        "[MASK]ingable play": ["[MASK]", "##ing", "##able", "play"],
        "play[MASK][MASK],": ["play", "[MASK]", "[MASK]", ","],
        "[MASK]学able": ["[MASK]", "学", "able"],
        "[MASK]unable": ["[MASK]", "un", "##able"],
        "[MASK]zzz [MASK]": ["[MASK]", "[UNK]", "[MASK]"],
        "[MASK]": ["[MASK]"],
    }
    masked = MaskedText(tokenizer)
    assert {text: tokenizer.pieces(masked.encode(text)) for text in expected} == expected


def test_masking_any_piece_leaves_the_others(tokenizer_folder):
    """Write [MASK] over any piece of a sentence that shows in the text: all other ids stay what they were."""
    tokenizer = Tokenizer(tokenizer_folder)
    masked, seen = MaskedText(tokenizer), 0
    for line in (line for document in make_documents(20, seed=8) for line in document):
        ids = tokenizer.encode([line])[0].tolist()
        if tokenizer.unk_id in ids:
            continue
        pieces = tokenizer.pieces(ids)
        # A piece behind a bare ▁ cannot be told from one with its own ▁ in the text.
        for k in (k for k in range(1, len(ids)) if "▁" not in pieces[k - 1 : k + 1]):
            before, after = ("".join(part).replace("▁", " ") for part in (pieces[:k], pieces[k + 1 :]))
            text = before + " " * pieces[k].startswith("▁") + "[MASK]" + after
            assert masked.encode(text) == [*ids[:k], tokenizer.mask_id, *ids[k + 1 :]], text
            seen += 1
    assert seen > 1000


def test_probabilities_are_those_of_transformers(run, tokenizer_folder):
    """Every mask's fillers and probabilities are those of transformers' BertForMaskedLM, over the real vocabulary."""
    filler = MaskFiller(run)
    tokenizer, pretrained = Tokenizer(tokenizer_folder), filler.pretrained
    config = transformers.BertConfig(**config_to_huggingface(pretrained.config))
    theirs = transformers.BertForPreTraining(config).eval()
    theirs.load_state_dict(to_huggingface(pretrained.state_dict, pretrained.config), strict=False)
    theirs.tie_weights()
    sentence = f"{words_of(tokenizer)[0]} [MASK], [MASK] {words_of(tokenizer)[0]}."
    ids = [tokenizer.cls_id, *MaskedText(tokenizer).encode(sentence), tokenizer.sep_id]
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).prediction_logits[0]
    masks = filler.fill(sentence, top_k=1000)
    assert len(masks) == 2
    for position, fillers in zip(np.flatnonzero(np.equal(ids, tokenizer.mask_id)), masks, strict=True):
        assert len(fillers) == 300
        expected = logits[position].double().softmax(-1).sort(descending=True)
        assert [filler.probability for filler in fillers] == pytest.approx(expected.values.tolist(), abs=1e-6)
        assert [filler.id for filler in fillers[:20]] == expected.indices[:20].tolist()
        assert tokenizer.pieces([f.id for f in fillers]) == [f.piece for f in fillers]
        assert sum(filler.probability for filler in fillers) == pytest.approx(1)


def stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_program_reads_arguments_and_stdin(run, capsys, monkeypatch):
    """From the command line and from stdin, run folder and checkpoint alike, the same fillers come out."""
    sentences = ["a [MASK] b", "[MASK] and [MASK]."]
    assert main([str(run), *sentences, "--json", "--top_k", "3"]) == 0
    printed = capsys.readouterr().out
    answers = [json.loads(line) for line in printed.splitlines()]
    assert [answer["sentence"] for answer in answers] == sentences
    assert [[len(fillers) for fillers in answer["masks"]] for answer in answers] == [[3], [3, 3]]
    stdin(monkeypatch, b"a [MASK] b\n\n  [MASK] and [MASK].")
    assert main([str(run / "checkpoints" / "step-00000005"), "--json", "--top_k", "3"]) == 0
    assert capsys.readouterr().out == printed
    assert main([str(run), sentences[0]]) == 0
    lines = capsys.readouterr().out.splitlines()
    best = answers[0]["masks"][0][0]
    assert lines[0] == sentences[0] and len(lines) == 6
    assert lines[1].split() == [f"{best['probability']:.2%}", best["piece"]]


def test_bad_input_is_one_sentence(run, tmp_path, capsys, monkeypatch):
    """No mask, too long a text, empty stdin, bytes that are not UTF-8, no model: one sentence and exit code 2."""

    def refused(*argv: str) -> str:
        assert run_program(main, list(argv)) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("error: ") and "Traceback" not in printed
        return printed

    assert "sentence 2: found no [MASK] in 'b'" in refused(str(run), "a [MASK]", "b")
    assert "sentence 1: 82 tokens" in refused(str(run), "[MASK]" * 80)
    assert "sentence 1: found no [MASK] in ''" in refused(str(run), "")
    assert "is not UTF-8" in refused(str(run), "[MASK] \udcff")
    stdin(monkeypatch, b" \n\n")
    assert "stdin: found no sentence" in refused(str(run))
    stdin(monkeypatch, b"[MASK]\nnothing\n")
    assert "line 2 of stdin: found no [MASK]" in refused(str(run))
    stdin(monkeypatch, b"[MASK] \xff\n")
    assert "line 1 of stdin: byte 8 is not UTF-8" in refused(str(run))
    assert "found nothing there; expected a run folder" in refused(str(tmp_path / "nothing"), "[MASK]")


def test_weights_without_a_head_are_refused(run, tokenizer_folder, tmp_path):
    """A model without a masked-LM head, or with a smaller vocabulary than its tokenizer, is refused, not guessed."""
    from safetensors.torch import save_file

    config = tiny_config()
    weights = to_huggingface(random_model(config).state_dict(), config)
    encoder = {name: tensor for name, tensor in weights.items() if name.startswith("bert.")}
    (tmp_path / "config.json").write_text(json.dumps(config_to_huggingface(config)))
    save_file(encoder, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no masked-LM head"):
        MaskFiller(tmp_path)
    write_run(tmp_path / "run", random_model(tiny_config(vocab_size=200)), tokenizer_folder)
    with pytest.raises(UserError, match="300 pieces and the model of checkpoint .* only 200"):
        MaskFiller(tmp_path / "run")
