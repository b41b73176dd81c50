"""The data preparation program, end to end: the same bytes whatever happens, and a sentence for what is wrong."""

import contextlib
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from corpora import files, make_documents, marker, write_corpus

from data_prep import run as program
from data_prep.documents import document_hash
from data_prep.errors import UserError, run_program
from data_prep.plan import held_out
from data_prep.run import main
from data_prep.shards import ShardSet
from data_prep.tokenizer import Tokenizer
from data_prep.workers import work_lock

DOCUMENTS = make_documents(460, seed=1)
FRACTION = 0.1
OPTIONS = ["--eval_fraction", str(FRACTION), "--split_mb", "0.008", "--bucket_mb", "0.008", "--seq_len", "32"]
HELD_OUT = {n for n, document in enumerate(DOCUMENTS) if held_out(document_hash(document), FRACTION)}


def write_input(folder: Path, documents: list[list[str]]) -> Path:
    """Two files, one in a folder below."""
    (folder / "more").mkdir(parents=True)
    write_corpus(folder / "a.txt", documents[:200])
    write_corpus(folder / "more/b.txt", documents[200:])
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a corpus of 460 documents in `text` and a tokenizer that was trained on it."""
    folder = tmp_path_factory.mktemp("data")
    write_input(folder / "text", DOCUMENTS)
    main(
        ["tokenizer", "--input", str(folder / "text"), "--output", str(folder / "tokenizer")]
        + ["--vocab_size", "400", "--eval_fraction", str(FRACTION), "--workers", "1"]
    )
    return folder


def shards(place: Path, output: Path, *options: str) -> list[str]:
    """The command line that makes shards of the corpus."""
    paths = ["--input", str(place / "text"), "--tokenizer", str(place / "tokenizer"), "--output", str(output)]
    return ["shards", *paths, *OPTIONS, "--workers", "1", *options]


@pytest.fixture(scope="module")
def reference(place) -> Path:
    """Shards of the corpus, made in this process."""
    main(shards(place, place / "reference"))
    return place / "reference"


def start(arguments: list[str], cwd: Path, **environment: str) -> subprocess.Popen:
    """Start the program as users do, in a session of its own so that its processes can be found."""
    return subprocess.Popen(
        [sys.executable, str(Path(program.__file__)), *arguments],
        cwd=cwd,
        env=os.environ | environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What runs in a shell's background ignores Ctrl-C, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen) -> str:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return output


def in_session(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


def wait_until(condition, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def sentence(arguments: list[str]) -> str:
    """The one line that the program prints for bad input; it exits with 2 and without a traceback."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = run_program(main, arguments)
    text = errors.getvalue()
    assert code == 2, text
    assert "Traceback" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert text.endswith(line + "\n")
    return line


# The same bytes


def test_reference_has_enough_tasks(place, reference):
    """What the tests below compare comes from more than 20 tokenize tasks and more than 20 buckets."""
    manifest = ShardSet.open(reference).manifest
    tasks = sum(-(-file["bytes"] // manifest["settings"]["split_bytes"]) for file in manifest["inputs"])
    assert tasks == 26
    assert len(manifest["splits"]["train"]["shards"]) > 20
    assert len(manifest["splits"]["eval"]["shards"]) > 1
    assert [file["name"] for file in manifest["inputs"]] == ["a.txt", "more/b.txt"]


def test_workers_and_environment_change_nothing(place, reference, tmp_path):
    """4 workers, another working folder, PYTHONHASHSEED and OMP_NUM_THREADS give a folder that is byte-identical
    to that of one worker."""
    arguments = shards(place, tmp_path / "deep/four", "--workers", "4")
    finish(start(arguments, Path("/"), PYTHONHASHSEED="2", OMP_NUM_THREADS="5"))
    assert files(tmp_path / "deep/four") == files(reference)


def test_order_of_documents_changes_nothing(place, reference, tmp_path):
    """A copy of the corpus elsewhere whose files hold the same documents in another order gives the same bytes."""
    first, second = DOCUMENTS[:200], DOCUMENTS[200:]
    random.Random(0).shuffle(first)
    second.reverse()
    write_input(tmp_path / "text", first + second)
    shutil.copytree(place / "tokenizer", tmp_path / "tokenizer")
    main(shards(tmp_path, tmp_path / "out"))
    assert files(tmp_path / "out") == files(reference)


def test_mixed_relative_and_absolute_inputs(place, reference, tmp_path, monkeypatch):
    """Relative and absolute inputs may be mixed, and one file named twice counts once."""
    monkeypatch.chdir(place / "text/more")
    arguments = shards(place, tmp_path / "out")
    arguments[2:3] = ["b.txt", str(place / "text/a.txt"), "../a.txt"]
    main(arguments)
    assert files(tmp_path / "out") == files(reference)


def test_killed_again_and_again(place, reference):
    """After six SIGKILLs at random moments of both stages, each restart in another working folder with paths
    relative to it, two workers give the same bytes, and a killed command leaves no worker that goes on writing."""
    chance = random.Random(time.time_ns())
    output = place / "killed"
    folders = [place / "text", place / "text/more"]
    tasks, tars = 26, len(list(reference.glob("*.tar")))
    goals = sorted(chance.sample(range(1, tasks), 3)) + sorted(
        chance.sample(range(tasks + 1, tasks + tars - 2), 3)
    )

    def begin(attempt: int) -> subprocess.Popen:
        folder = folders[attempt % 2]
        near = Path(os.path.relpath(place, folder))
        arguments = shards(near, near / "killed", "--workers", "2")
        return start(arguments, folder, PYTHONHASHSEED=str(attempt), OMP_NUM_THREADS="1")

    def finished() -> int:
        return len(list(output.glob(".work/tokens*"))) + len(list(output.glob("*.tar")))

    for attempt, goal in enumerate(goals):
        process = begin(attempt)
        assert wait_until(lambda goal=goal, process=process: finished() >= goal or process.poll() is not None)
        time.sleep(chance.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (output / "manifest.json").exists()
        if attempt % 2:
            assert wait_until(lambda process=process: not in_session(process.pid), 20), "workers go on"
        process.stdout.close()
        process.stderr.close()
    finish(begin(len(goals)))
    assert files(output) == files(reference)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the program catches it."""


def test_killed_at_every_write(place, tmp_path, monkeypatch):
    """Killed again and again before or after a rename or the removal of the work folder, each time as another
    process, the command goes on where it was, and nothing but the result is left."""
    options = ["--split_mb", "0.05", "--bucket_mb", "0.06"]
    main(shards(place, tmp_path / "whole", *options))
    rename, remove, getpid = os.replace, shutil.rmtree, os.getpid
    chance = random.Random(0)
    kill = {"left": 0, "before": False}

    def or_die(action):
        def run(*arguments, **options):
            kill["left"] -= 1
            if kill["left"] < 0 and kill["before"]:
                raise Killed
            action(*arguments, **options)
            if kill["left"] < 0:
                raise Killed

        return run

    attempts = 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", or_die(rename))
        patch.setattr(shutil, "rmtree", or_die(remove))
        while attempts < 200:
            attempts += 1
            kill.update(left=chance.randrange(3), before=attempts % 2 == 1)
            patch.setattr(os, "getpid", lambda attempts=attempts: getpid() + attempts)
            with contextlib.suppress(Killed):
                main(shards(place, tmp_path / "out", *options))
                break
    assert 10 < attempts < 200
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    ShardSet.open(tmp_path / "out").close()


@pytest.mark.parametrize("half_removed", [False, True])
def test_killed_while_the_work_folder_is_removed(place, reference, tmp_path, half_removed):
    """Killed between the manifest and the end of the removal of the work folder, a rerun removes what is left."""
    shutil.copytree(reference, tmp_path / "out")
    main(shards(place, tmp_path / "plan", "--only", "plan"))
    shutil.move(tmp_path / "plan/.work", tmp_path / "out/.work")
    (tmp_path / "out/.work/tokens-000007.safetensors").write_bytes(b"left")
    if half_removed:
        (tmp_path / "out/.work/plan.json").unlink()
    main(shards(place, tmp_path / "out"))
    assert files(tmp_path / "out") == files(reference)


def test_interrupt_says_how_to_go_on(place, tmp_path):
    """Ctrl-C ends all processes with code 130, one sentence and no traceback, of workers neither."""
    for attempt in range(10):
        output = tmp_path / f"out{attempt}"
        process = start(shards(place, output, "--workers", "2"), tmp_path)
        assert wait_until(lambda folder=output: next(folder.glob(".work/tokens*"), None))
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        if process.returncode:  # else the signal came when all was done
            break
    assert process.returncode == 130
    assert "the same command goes on from here" in errors
    assert "Traceback" not in errors
    assert wait_until(lambda: not in_session(process.pid), 20)


def test_array_elements_give_the_same_bytes(place, reference, tmp_path):
    """The stages as job arrays of three processes at once, each with a part, give the same bytes; a stage that
    begins before the one before it is done says so, and all of them may run again when the work is finished."""
    output = tmp_path / "out"

    def stage(name: str, part: str = "0/1") -> list[str]:
        return shards(place, output, "--only", name, "--part", part)

    assert "--only plan" in sentence(stage("tokenize"))
    main(stage("plan"))
    main(stage("tokenize", "2/3"))
    assert "tokenize task 0 is not done yet" in sentence(stage("instances"))
    for name, before in (("tokenize", "plan"), ("instances", "tokenize")):
        for process in [start(stage(name, f"{part}/3"), tmp_path) for part in range(3)]:
            assert f"{name}: done" in finish(process), before
        if name == "tokenize":
            assert "shard is not done yet" in sentence(stage("manifest"))
    main(stage("manifest"))
    assert files(output) == files(reference)
    for name in ("plan", "tokenize", "instances", "manifest"):
        main(stage(name))
    assert files(output) == files(reference)


# One folder, one work


def test_a_rerun_of_finished_work_does_nothing(place, reference, capsys):
    """The same command in a finished folder says so within seconds and touches no file."""
    before = {path: path.stat().st_mtime_ns for path in reference.rglob("*")}
    started = time.monotonic()
    main(shards(place, reference))
    assert time.monotonic() - started < 5
    assert "these shards are finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in reference.rglob("*")} == before


OTHER_SETTINGS = [
    (["--seq_len", "64"], r"instances\.seq_len: 32 there, 64 now"),
    (["--short_seq_prob", "0.2"], r"instances\.short_seq_prob: 0\.1 there, 0\.2 now"),
    (["--duplicates", "3"], r"instances\.duplicates: 1 there, 3 now"),
    (["--seed", "7"], r"instances\.seed: 0 there, 7 now"),
    (["--masked_lm_prob", "0.2"], r"masked_lm_prob: 0\.15 there, 0\.2 now"),
    (["--max_predictions", "3"], r"max_predictions: None there, 3 now"),
    (["--eval_fraction", "0.05"], r"eval_fraction: 0\.1 there, 0\.05 now"),
    (["--split_mb", "1"], r"split_bytes: 8000 there, 1000000 now"),
    (["--bucket_mb", "1"], r"bucket_bytes: 8000 there, 1000000 now"),
    (["--language", "ko"], r"read\.language: en there, ko now"),
    (["--text_field", "body"], r"read\.text_field: text there, body now"),
    (["--format", "documents"], r"read\.format: auto there, documents now"),
]


@pytest.mark.parametrize(
    "options, words", OTHER_SETTINGS, ids=lambda value: value[0] if isinstance(value, list) else ""
)
def test_other_settings_never_mix_in(place, reference, tmp_path, options, words):
    """Another setting in a folder is refused with its name and both values: where the work is unfinished, for
    an element of an array, and where it is finished."""
    before = files(reference)
    main(shards(place, tmp_path, "--only", "plan"))
    for arguments in (
        shards(place, tmp_path, *options),
        shards(place, tmp_path, *options, "--only", "tokenize"),
        shards(place, reference, *options),
    ):
        assert re.search(words, sentence(arguments))
    assert files(reference) == before


def test_another_tokenizer_or_input_never_mixes_in(place, reference, tmp_path):
    """Another tokenizer and another list of files are refused by name, unfinished and finished."""
    write_input(tmp_path / "text", DOCUMENTS)
    write_corpus(tmp_path / "text/c.txt", DOCUMENTS[:9])
    shutil.copytree(place / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "tokenizer/tokenizer_description.json").write_text('{"eval_fraction": 0.1}\n')
    main(shards(place, tmp_path / "out", "--only", "plan"))
    for output in (tmp_path / "out", reference):
        arguments = shards(place, output)
        assert "tokenizer.files.tokenizer_description.json" in sentence(
            [str(tmp_path / "tokenizer") if word == str(place / "tokenizer") else word for word in arguments]
        )
        assert "c.txt" in sentence(
            [str(tmp_path / "text") if word == str(place / "text") else word for word in arguments]
            if output == reference
            else [*arguments, "--input", str(place / "text"), str(tmp_path / "text/c.txt")]
        )


@pytest.mark.parametrize("change", ["grown", "touched", "gone"])
def test_changed_input_is_refused(place, tmp_path, change):
    """A file that grows, is written again or vanishes after the plan was made is refused with its name, by an
    array element and by the whole command."""
    text = write_input(tmp_path / "text", DOCUMENTS[:240])
    shutil.copytree(place / "tokenizer", tmp_path / "tokenizer")
    main(shards(tmp_path, tmp_path / "out", "--only", "plan"))
    changed = text / "more/b.txt"
    if change == "grown":
        write_corpus(changed, DOCUMENTS[200:250])
    elif change == "touched":
        os.utime(changed, ns=(1, 1))
    else:
        changed.unlink()
    for arguments in (["--only", "tokenize"], []):
        assert str(changed) in sentence(shards(tmp_path, tmp_path / "out", *arguments))


def test_two_commands_at_once_are_refused(place, tmp_path):
    """A second whole command in a folder is refused while one works there; elements of an array work together,
    and a whole command waits for none of them."""
    main(shards(place, tmp_path, "--only", "plan"))
    with work_lock(tmp_path, shared=False):
        for options in ([], ["--only", "tokenize"], ["--only", "manifest"]):
            assert "another command is working here" in sentence(shards(place, tmp_path, *options))
    with work_lock(tmp_path, shared=True):
        main(shards(place, tmp_path, "--only", "tokenize", "--part", "0/20"))
        assert "another command is working here" in sentence(shards(place, tmp_path))
    main(shards(place, tmp_path, "--only", "tokenize", "--part", "0/20"))


def test_leftover_shards_are_not_taken_over(place, reference, tmp_path):
    """Shards without manifest and plan are refused rather than mixed with new ones."""
    shutil.copy(reference / "train-000000.tar", tmp_path)
    assert "train-000000.tar: a shard without a manifest" in sentence(shards(place, tmp_path))


def test_results_of_another_plan_are_made_again(place, reference, tmp_path):
    """Token files and shards that bear another plan's fingerprint are never used: whoever takes the plan away by
    hand gets the shards of the new settings, and a stage alone says what is missing."""
    main(shards(place, tmp_path, "--only", "plan", "--seed", "5"))
    main(shards(place, tmp_path, "--only", "tokenize", "--seed", "5"))
    main(shards(place, tmp_path, "--only", "instances", "--seed", "5"))
    for path in [tmp_path / ".work/plan.json", *tmp_path.glob("*.tar")]:
        path.rename(tmp_path / f".work/{path.name}.old")
    main(shards(place, tmp_path, "--only", "plan"))
    for path in tmp_path.glob(".work/*.tar.old"):
        path.rename(tmp_path / path.stem)
    assert "tokenize task 0 is not done" in sentence(shards(place, tmp_path, "--only", "instances"))
    main(shards(place, tmp_path, "--only", "tokenize"))
    assert "train-000000.tar: this shard is not done" in sentence(
        shards(place, tmp_path, "--only", "manifest")
    )
    main(shards(place, tmp_path))
    assert files(tmp_path) == files(reference)


# What is in the shards


def texts(folder: Path, split: str) -> list[tuple[str, str, int]]:
    """A, B and label of every instance, A and B as the text their pieces spell."""
    shard_set = ShardSet.open(folder)
    tokenizer = Tokenizer(shard_set.tokenizer_folder)
    found = []
    for number in range(len(shard_set.block_offsets(split)) - 1):
        block = shard_set.read_block(split, number)
        for i, label in enumerate(block.next_sentence_labels):
            pieces = tokenizer.pieces(block.tokens[block.offsets[i] : block.offsets[i + 1]])
            cut = int(block.segment_a[i])
            a, b = ("".join(part).replace("▁", " ").lower() for part in (pieces[1 : cut - 1], pieces[cut:-1]))
            found.append((a, b, int(label)))
    shard_set.close()
    return found


def documents_in(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"q(\d{4})z", text)}


def test_held_out_documents_are_only_in_evaluation(reference):
    """By a word that each document has of its own: training instances, A and B, show the documents that are not
    held out, evaluation instances the held-out ones, random next too; both show all but those few whose word was
    always cut off, and count them all."""
    manifest = ShardSet.open(reference).manifest
    for split, expected in (("eval", HELD_OUT), ("train", set(range(len(DOCUMENTS))) - HELD_OUT)):
        shown = texts(reference, split)
        seen = set().union(*(documents_in(a) | documents_in(b) for a, b, _ in shown))
        assert seen <= expected
        assert len(seen) > 0.98 * len(expected)
        assert manifest["splits"][split]["counts"]["documents"] == len(expected)
        assert set().union(*(documents_in(b) for _, b, label in shown if label)) <= expected
        assert sum(label for *_, label in shown) > len(shown) / 4


def test_labels_tell_the_document_of_b(reference):
    """Wherever both words can be read, label 0 has A and B of one document and label 1 of two."""
    seen = {0: 0, 1: 0}
    for a, b, label in texts(reference, "train"):
        if documents_in(a) and documents_in(b):
            seen[label] += 1
            assert len(documents_in(a)) == len(documents_in(b)) == 1
            assert (documents_in(a) == documents_in(b)) == (label == 0)
    assert min(seen.values()) > 300


def test_no_training_document_is_in_two_shards(reference):
    """Buckets are apart: a shard's documents, and with them its random next sentences, are in no other shard."""
    shard_set = ShardSet.open(reference)
    counts = [content["counts"]["documents"] for content in shard_set.manifest["splits"].values()]
    assert sum(counts) == len(DOCUMENTS)
    tokenizer = Tokenizer(shard_set.tokenizer_folder)
    seen: set[int] = set()
    sizes = [len(shard["blocks"]) for shard in shard_set.manifest["splits"]["train"]["shards"]]
    block = 0
    for size in sizes:
        shown = set()
        for number in range(block, block + size):
            pieces = tokenizer.pieces(shard_set.read_block("train", number).tokens)
            shown |= documents_in("".join(pieces).lower())
        block += size
        assert not shown & seen
        seen |= shown
    shard_set.close()


def test_duplicates_are_dropped_and_counted(place, tmp_path, capsys):
    """A document that comes again, in another file, with other spacing or other sentence ends, is used once, the
    rest is counted, and the shard is the same as without it."""
    again = [
        DOCUMENTS[3],
        DOCUMENTS[3],
        [line.replace(" ", "  ") for line in DOCUMENTS[150]],
        [" ".join(DOCUMENTS[7])],
    ]
    shown = []
    for name, documents in (("once", DOCUMENTS[:240]), ("again", DOCUMENTS[:240] + again)):
        write_input(tmp_path / name / "text", documents)
        shutil.copytree(place / "tokenizer", tmp_path / name / "tokenizer")
        output = tmp_path / name / "out"
        main(shards(tmp_path / name, output, "--bucket_mb", "1", "--split_mb", "0.05"))
        content = ShardSet.open(output).manifest["splits"]
        shown.append({name: data for name, data in files(output).items() if name.endswith(".tar")})
        dropped = sum(split["counts"]["duplicate_documents"] for split in content.values())
        assert dropped == (len(again) if name == "again" else 0)
        assert sum(split["counts"]["documents"] for split in content.values()) == 240
    assert len(shown[0]) == 2
    assert shown[0] == shown[1]
    report = capsys.readouterr().out
    assert sum(map(int, re.findall(r"\((\d+) duplicate documents dropped\)", report))) == len(again)


def test_without_evaluation(place, tmp_path):
    """With --eval_fraction 0 all documents train, and the evaluation split is there and empty."""
    main(shards(place, tmp_path, "--eval_fraction", "0", "--bucket_mb", "1"))
    manifest = ShardSet.open(tmp_path).manifest
    assert manifest["splits"]["eval"]["shards"] == []
    assert manifest["splits"]["train"]["counts"]["documents"] == len(DOCUMENTS)
    assert "--split eval" in sentence(["inspect", str(tmp_path), "--split", "eval"])


def test_file_names_may_hold_any_bytes(place, tmp_path):
    """Files whose names are Korean or no UTF-8 at all are read and listed like others."""
    text = write_input(tmp_path / "text", DOCUMENTS[:240])
    (text / "a.txt").rename(text / "말뭉치.txt")
    os.rename(os.fsencode(text / "more/b.txt"), os.fsencode(text) + b"/caf\xe9.txt")
    shutil.copytree(place / "tokenizer", tmp_path / "tokenizer")
    main(shards(tmp_path, tmp_path / "out"))
    names = [file["name"] for file in ShardSet.open(tmp_path / "out").manifest["inputs"]]
    assert sorted(map(os.fsencode, names)) == [b"caf\xe9.txt", "말뭉치.txt".encode()]
    main(["verify", str(tmp_path / "out")])


# Looking at shards


def printed_instances(text: str) -> list[tuple[str, list[str]]]:
    """Label and pieces, A then B, of the instances that `inspect` printed."""
    pattern = r"next sentence: (\w+)\n.*\n  A: (.*)\n  B: (.*)\n"
    return [(label, a.split(" ") + b.split(" ")) for label, a, b in re.findall(pattern, text)]


@pytest.mark.parametrize("split, start", [("train", 0), ("train", 500), ("eval", 3)])
def test_inspect_shows_the_arrays(reference, capsys, split, start):
    """The instances that inspect prints have the pieces, labels, shown and hidden tokens of the arrays."""
    main(["inspect", str(reference), "--split", split, "--start", str(start), "--instances", "6"])
    output = capsys.readouterr().out
    shard_set = ShardSet.open(reference)
    tokenizer = Tokenizer(shard_set.tokenizer_folder)
    offsets = shard_set.block_offsets(split)
    instances = printed_instances(output)
    assert len(instances) == 6
    for number, (label, pieces) in enumerate(instances, start):
        index = int(np.searchsorted(offsets, number, side="right")) - 1
        block, row = shard_set.read_block(split, index), number - int(offsets[index])
        tokens = block.tokens[block.offsets[row] : block.offsets[row + 1]]
        masks = slice(*block.masked_lm_offsets[row : row + 2].tolist())
        expected = tokenizer.pieces(tokens)
        for position, shown in zip(
            block.masked_lm_positions[masks], tokenizer.pieces(block.masked_lm_inputs[masks]), strict=True
        ):
            expected[position] = f"{shown}⟨{expected[position]}⟩"
        assert pieces == expected
        assert label == ("random" if block.next_sentence_labels[row] else "actual")
        assert f"{len(tokens)} tokens, {masks.stop - masks.start} to predict" in output
    shard_set.close()


@pytest.mark.parametrize("seq_len", [8, 32])
def test_inspect_shows_lengths_and_padding(place, tmp_path, capsys, seq_len):
    """The printed histogram holds every training instance once, and the share of padding, of predictions and of
    random next are those of the arrays, for the shortest sequences too."""
    main(shards(place, tmp_path, "--bucket_mb", "1", "--seq_len", str(seq_len), "--short_seq_prob", "0.5"))
    capsys.readouterr()
    main(["inspect", str(tmp_path), "--instances", "0"])
    output = capsys.readouterr().out
    shard_set = ShardSet.open(tmp_path)
    blocks = [shard_set.read_block("train", n) for n in range(len(shard_set.block_offsets("train")) - 1)]
    lengths = np.concatenate([np.diff(block.offsets) for block in blocks])
    rows = re.findall(r"^ +(\d+)–(\d+) +([\d,]+) ", output, re.MULTILINE)
    covered = [n for low, high, _ in rows for n in range(int(low), int(high) + 1)]
    assert covered == list(range(1, seq_len + 1))
    for low, high, count in rows:
        assert int(low) <= int(high)
        assert int(count.replace(",", "")) == ((int(low) <= lengths) & (lengths <= int(high))).sum()
    padding = 1 - lengths.sum() / (len(lengths) * seq_len)
    assert f"padding to {seq_len} would be {padding:.1%} of all positions" in output
    masked = sum(len(block.masked_lm_positions) for block in blocks) / lengths.sum()
    random_next = np.concatenate([block.next_sentence_labels for block in blocks]).mean()
    assert f"{masked:.1%} to predict, {random_next:.1%} random next" in output
    shard_set.close()


def test_verify_program(reference, tmp_path, capsys):
    """verify counts the shards of an intact folder and exits with 2 and the file's name for a damaged one."""
    assert run_program(main, ["verify", str(reference)]) == 0
    number = len(list(reference.glob("*.tar")))
    assert f"{number} shards, manifest and tokenizer are as they were written" in capsys.readouterr().out
    shutil.copytree(reference, tmp_path / "copy")
    path = tmp_path / "copy/eval-000001.tar"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert str(path) in sentence(["verify", str(tmp_path / "copy")])


def test_a_share_is_still_held_out_after_a_split(place, tmp_path):
    """Rows that `split` took away for a score take nothing from --eval_fraction: of what is left for training, shards
    hold out as much as of any text (to 4 standard errors), and no text of the score is in them."""
    texts = [" ".join(document) for document in make_documents(1500, seed=7, sentences=(1, 3))]
    (tmp_path / "rows.csv").write_text("text\n" + "".join(f"{text}\n" for text in texts))
    fractions = ["--dev_fraction", "0.1", "--test_fraction", "0.1"]
    main(["split", "--input", str(tmp_path / "rows.csv"), "--output", str(tmp_path / "split"), *fractions])
    train = str(tmp_path / "split/train.csv")
    main(
        shards(
            place,
            tmp_path / "out",
            "--input",
            train,
            "--eval_fraction",
            "0.05",
            "--bucket_mb",
            "1",
            "--split_mb",
            "1",
        )
    )
    manifest = ShardSet.open(tmp_path / "out").manifest
    held, trained = (manifest["splits"][split]["counts"]["documents"] for split in ("eval", "train"))
    assert held + trained == Path(train).read_text().count("\n") - 1 < 1300
    assert abs(held / (held + trained) - 0.05) < 4 * sqrt(0.05 * 0.95 / (held + trained))


# What is wrong is said in a sentence


@pytest.mark.parametrize("command", ["split", "tokenizer", "shards", "inspect", "verify"])
def test_help_explains_every_option(command, capsys):
    """Every option and argument of every command has a help text, and --help prints it."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    (commands,) = [action for action in program._parser()._actions if action.choices]
    actions = commands.choices[command]._actions
    assert len(actions) > 1
    for action in actions:
        assert action.help and len(action.help) > 10, action.dest
        assert action.help.split(" (")[0][:30] in printed


@pytest.mark.parametrize(
    "options",
    [
        ["--eval_fraction", "2"],
        ["--split_mb", "inf"],
        ["--split_mb", "nan"],
        ["--bucket_mb", "0"],
        ["--workers", "0"],
    ]
    + [["--seed", "x"], ["--duplicates", "1.5"], ["--only", "all"]],
    ids=" ".join,
)
def test_impossible_numbers_are_refused(place, tmp_path, capsys, options):
    """An option outside its range exits with 2 and names the option."""
    with pytest.raises(SystemExit) as caught:
        main(shards(place, tmp_path / "out", *options))
    assert caught.value.code == 2
    assert options[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        (["--seq_len", "4"], "--seq_len 4: an instance has 8 to 65,535 tokens"),
        (["--seq_len", "65536"], "--seq_len 65536"),
        (["--part", "3/3", "--only", "tokenize"], "--part 3/3: I goes from 0 to N-1"),
        (["--part", "1", "--only", "tokenize"], "--part 1: expected I/N"),
        (["--part", "0/2"], "only the stages `tokenize` and `instances` have parts"),
        (["--tokenizer", "/nowhere"], "/nowhere/sentencepiece.model: there is no tokenizer here"),
        (["--input", "/nowhere.txt"], "/nowhere.txt"),
        (["--eval_fraction", "0.2"], "was trained with --eval_fraction 0.1"),
        (["--format", "pdf"], "pdf"),
        (["--output", "/proc/version"], "/proc/version: File exists"),
        (["--output", "/proc/version/below"], "Not a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_are_a_sentence(place, tmp_path, options, words):
    """What is wrong on the command line is one sentence with exit code 2."""
    assert words in sentence(shards(place, tmp_path / "out", *options))


def held_out_fraction(documents: list[list[str]], number: int) -> float:
    """A fraction that holds out exactly so many of the documents."""
    values = sorted(int.from_bytes(document_hash(document)[8:], "big") / 2.0**64 for document in documents)
    return (([0.0] + values)[number] + values[number]) / 2


@pytest.mark.parametrize(
    "name, words",
    [
        ("one document", "1 different documents for training (1 in all)"),
        ("one document twice", "1 different documents for training (1 in all)"),
        ("blank lines", "no text was found"),
        ("empty file", "no text was found"),
        ("no files", "the folder holds no files"),
        ("nothing held out", "0 of 30 documents would be held out"),
        ("one held out", "1 of 30 documents would be held out"),
        ("all held out", "0 different documents for training (30 in all)"),
    ],
)
def test_too_little_text_is_a_sentence(place, tmp_path, name, words):
    """A corpus without two documents for training, or two for evaluation, is one sentence with what to do."""
    few = DOCUMENTS[:30]
    fraction = {"nothing held out": held_out_fraction(few, 0), "one held out": held_out_fraction(few, 1)}
    options = {"all held out": 1.0} | fraction
    text = tmp_path / "text"
    text.mkdir()
    documents = {"one document": DOCUMENTS[:1], "one document twice": DOCUMENTS[:1] * 2}.get(name, few)
    if name in ("blank lines", "empty file"):
        (text / "empty.txt").write_text("\n \n" if name == "blank lines" else "")
    elif name != "no files":
        write_corpus(text / "corpus.txt", documents)
    shutil.copytree(place / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "tokenizer/tokenizer_description.json").unlink()
    arguments = shards(tmp_path, tmp_path / "out", "--eval_fraction", str(options.get(name, 0.0)))
    line = sentence(arguments)
    assert words in line
    assert str(text) in line or "--eval_fraction" in line


def test_exit_code_and_stderr_of_the_program(place, tmp_path):
    """Started as users start it, the program exits with 2, prints the sentence last and no traceback, also where
    a worker process found what is wrong."""
    text = write_input(tmp_path / "text", DOCUMENTS)
    with open(text / "more/b.txt", "ab") as file:
        file.write(b"caf\xe9\n")
    shutil.copytree(place / "tokenizer", tmp_path / "tokenizer")
    process = start(shards(tmp_path, tmp_path / "out", "--workers", "2"), tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith(f"error: {text}/more/b.txt, line")


def test_a_killed_worker_is_a_sentence(place, tmp_path):
    """When a worker is killed from outside, as the kernel does when memory is short, the program says so, and the
    same command goes on."""
    process = start(shards(place, tmp_path / "out", "--workers", "2"), tmp_path)
    assert wait_until(lambda: len(list((tmp_path / "out").glob(".work/tokens*"))) > 1)
    workers = [
        pid for pid in in_session(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "a worker process was killed" in errors
    assert "Traceback" not in errors


# Real text


def real_text(shared_data: Path, folder: Path, name: str) -> list[str]:
    """Input options of a real corpus: an English one of articles, or the beginning of a Korean one of reviews."""
    if name == "wikitext":
        path = shared_data / "pretrain_en_wikitext2/wikitext-2-raw.valid.gz"
        return ["--input", str(path), "--format", "documents", "--document_start", "^ = [^=].* = $"]
    reviews = (shared_data / "pretrain_ko_nsmc/nsmc_raw_reviews_by_movie.txt").read_text(encoding="utf-8")
    (folder / "reviews.txt").write_text(reviews[: reviews.index("\n\n", 400_000)], encoding="utf-8")
    return ["--input", str(folder / "reviews.txt"), "--language", "ko"]


@pytest.mark.parametrize("name", ["wikitext", "reviews"])
def test_statistics_on_real_text(shared_data, tmp_path, name):
    """On English articles and Korean reviews 15 % are predicted, shown 80/10/10, half are random next, and hardly
    a piece is unknown; all within 5 standard errors."""
    common = [*real_text(shared_data, tmp_path, name), "--eval_fraction", "0.1", "--workers", "1"]
    main(
        [
            "tokenizer",
            *common,
            "--output",
            str(tmp_path / "tokenizer"),
            "--vocab_size",
            "3000",
            "--sample_mb",
            "0.6",
        ]
    )
    main(
        ["shards", *common, "--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "out")]
        + ["--duplicates", "2", "--bucket_mb", "0.5"]
    )
    shard_set = ShardSet.open(tmp_path / "out")
    tokenizer = Tokenizer(shard_set.tokenizer_folder)
    read, counts = shard_set.manifest["read"], shard_set.manifest["splits"]["train"]["counts"]
    blocks = [shard_set.read_block("train", n) for n in range(len(shard_set.block_offsets("train")) - 1)]
    labels = np.concatenate([block.next_sentence_labels for block in blocks])
    shown = np.concatenate([block.masked_lm_inputs for block in blocks])
    hidden = np.concatenate(
        [
            block.tokens[
                np.repeat(block.offsets[:-1], np.diff(block.masked_lm_offsets)) + block.masked_lm_positions
            ]
            for block in blocks
        ]
    )
    assert read["documents"] == counts["documents"] + shard_set.manifest["splits"]["eval"]["counts"][
        "documents"
    ] + sum(split["counts"]["duplicate_documents"] for split in shard_set.manifest["splits"].values())
    assert read["unknown_tokens"] / read["tokens"] < 0.01
    assert counts["documents"] > 40
    assert counts["instances"] == len(labels) > 2000
    assert abs(counts["masked_tokens"] / counts["tokens"] - 0.15) < 0.005
    assert abs(labels.mean() - 0.5) < 5 * sqrt(0.25 / len(labels))
    assert not np.isin(
        hidden, [tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id]
    ).any()
    for share, expected in (
        ((shown == tokenizer.mask_id).mean(), 0.8),
        ((shown == hidden).mean(), 0.1),
        (((shown != hidden) & (shown != tokenizer.mask_id)).mean(), 0.1),
    ):
        assert abs(share - expected) < 5 * sqrt(expected * (1 - expected) / len(shown)) + 0.1 / 2995
    shard_set.close()


def test_markers_are_words_of_one_document():
    """The tests above stand on it: a marker is in every sentence of its document and in no other."""
    for number, document in enumerate(DOCUMENTS):
        assert all(documents_in(line.lower()) == {number} for line in document)
        assert marker(number) in document[0].lower()


def test_user_errors_are_not_caught_elsewhere():
    """run_program turns a UserError into a line and exit code 2, and lets a programmer's error through."""

    def fails(argv):
        raise UserError("a sentence")

    def breaks(argv):
        raise ValueError("a bug")

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        assert run_program(fails) == 2
    assert errors.getvalue() == "error: a sentence\n"
    with pytest.raises(ValueError, match="a bug"):
        run_program(breaks)
