"""Checkpoints that are damaged, half deleted or not there: never believed, never a silent fresh start."""

import errno
import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_runs import _Engine, make_shards, make_tokenizer, random_model, tiny_config, write_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data_prep.errors import UserError
from data_prep.shards import ShardSet
from pretraining import checkpoint_writer, distributed, manifest
from pretraining.checkpoint import Checkpoints
from pretraining.loading import StartingPoint, recorded, starting_point
from pretraining.manifest import TrainState, read_manifest, write_manifest
from pretraining.metrics import Recorder
from pretraining.phase import phase_start

MODEL_STATES = "mp_rank_00_model_states.pt"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A tokenizer and shards of it."""
    home = tmp_path_factory.mktemp("checkpoint")
    make_shards(home, make_tokenizer(home))
    return home


@pytest.fixture
def run(home, tmp_path) -> Path:
    """A run folder with checkpoints of steps 4 and 8."""
    for step in (4, 8):
        write_run(tmp_path / "run", random_model(tiny_config()), home / "tokenizer", step)
    return tmp_path / "run"


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def alone(run: Path, say=print) -> Checkpoints:
    """The checkpoints of a run as one process sees them."""
    return Checkpoints(run, {}, 0, 1, lambda value: [value], say)


@pytest.mark.parametrize("option", ["init_from", "phase_from"])
@pytest.mark.parametrize("name", ["step-00000008.partial", "step-00000008.old", "step-8"])
def test_only_a_checkpoint_by_its_whole_name_lets_a_run_go_on(home, run, tmp_path, option, name):
    """What a kill or a user has left under another name is no checkpoint: the weights asked for are read."""
    output = tmp_path / "output"
    identity = {
        "model": tiny_config().to_dict(),
        "precision": "fp32",
        "train_batch_size": 7,
        option: "a hash",
    }
    path = write_run(output, random_model(tiny_config()), home / "tokenizer", 8, identity)
    output.joinpath("settings.json").write_text(json.dumps({"arguments": {option: str(run)}}))
    assert recorded(option, run, output) == (tiny_config().to_dict(), "a hash")
    path.rename(path.with_name(name))
    assert recorded(option, run, output) is None
    start = {"init_from": starting_point, "phase_from": phase_start}[option]
    found = start(run, ShardSet.open(home / "shards"), output, dropout=0.0, next_sentence=True)
    assert found.weights or found.checkpoint.path.name == "step-00000008"


def test_a_phase_starts_from_the_newest_by_number_and_whole_name(home, run, tmp_path):
    """Steps of nine digits come after those of eight, and a half written checkpoint is not taken for the newest."""

    def chosen() -> str:
        shard_set = ShardSet.open(home / "shards")
        return phase_start(run, shard_set, tmp_path, dropout=0.0, next_sentence=True).checkpoint.path.name

    for step in (99_999_999, 100_000_000):
        path = write_run(run, random_model(tiny_config()), home / "tokenizer", step)
    assert chosen() == "step-100000000"
    path.rename(path.with_name("step-100000001.partial"))
    assert chosen() == "step-99999999"


def test_no_run_begins_with_random_weights_instead_of_those_asked_for(monkeypatch):
    """A checkpoint that vanishes between the check and the start is an error that names the option, not a fresh start."""
    from pretraining.launch import _check_start

    monkeypatch.setattr(distributed, "gather_objects", lambda value: [value])
    arguments = SimpleNamespace(init_from=None, phase_from=Path("runs/first"))
    config = tiny_config()
    for start, refused in [
        (None, False),
        (StartingPoint(config, {"weight": 0}, "hash"), False),
        (StartingPoint(config, None, "hash", checkpoint="one"), False),
        (StartingPoint(config, None, "hash"), True),
    ]:
        preparation = SimpleNamespace(start=start, arguments=arguments, run_folder=Path("runs/second"))
        if refused:
            with pytest.raises(
                UserError, match="--phase_from runs/first: neither its weights nor a checkpoint"
            ):
                _check_start(preparation)
        else:
            _check_start(preparation)


def test_each_changed_byte_of_a_manifest_is_noticed(run):
    """A number that became another one, or a text, in checkpoint.json: named, passed over, and no traceback."""
    said = []
    path = folder_of(run, 8) / "checkpoint.json"
    whole = path.read_text()
    for old, new in [
        ('"consumed": 0', '"consumed": 5'),
        ('"step": 8', '"step": 9'),
        ('"step": 8', '"step": "8"'),
        ('"rollbacks": 0', '"rollbacks": -1'),
        ('"precision": "fp32"', '"precision": "bf16"'),
        ('"world_size": 1', '"world_size": 2'),
        ('"sha256": "', '"sha256": "0'),
    ]:
        assert whole.count(old)
        path.write_text(whole.replace(old, new, 1))
        assert alone(run, said.append).newest_whole().state.step == 4
        assert "step-00000008 is damaged" in said[-1] and "checkpoint.json" in said[-1]
    path.write_text(whole)
    assert alone(run).newest_whole().state.step == 8
    folder_of(run, 8).rename(folder_of(run, 9))
    assert alone(run, said.append).newest_whole().state.step == 4
    assert "it is of step 8, the folder is called step-00000009" in said[-1]


@pytest.mark.parametrize(
    "absent",
    [MODEL_STATES, "zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"],
)
def test_a_manifest_must_name_the_files_of_all_ranks(run, absent):
    """A checkpoint whose manifest, right in itself, lacks the model's file or that of a rank is not whole."""
    path = folder_of(run, 8)
    content, _ = read_manifest(path)
    entry = content["files"]["zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    second = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (path / second).write_bytes((path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").read_bytes())
    files = content["files"] | {second: entry}
    write_manifest(path, content | {"world_size": 2, "files": files})
    assert alone(run).newest_whole().state.step == 8
    del files[absent]
    write_manifest(path, content | {"world_size": 2, "files": files})
    assert alone(run).newest_whole().state.step == 4


def test_a_whole_optimizer_has_no_file_of_its_own(run):
    """Without ZeRO the model's file is all of a checkpoint; another number of files than the manifest says is not whole."""
    path = folder_of(run, 8)
    content, _ = read_manifest(path)
    assert content["whole_optimizer"] is False
    model_only = {MODEL_STATES: content["files"][MODEL_STATES]}
    for whole, files, step in (
        (True, model_only, 8),
        (True, content["files"], 4),
        (False, model_only, 4),
        (True, {}, 4),
    ):
        write_manifest(path, content | {"world_size": 3, "whole_optimizer": whole, "files": files})
        assert alone(run).newest_whole().state.step == step


def test_a_writer_without_memory_publishes_nothing(home, run, monkeypatch):
    """A thread that ends by any error, not only of the disk's, ends the save; the older checkpoints stay."""

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(checkpoint_writer, "_write", fail)
    with pytest.raises(UserError, match=r"could not be written \(MemoryError\)"):
        write_run(run, random_model(tiny_config()), home / "tokenizer", 12)
    assert not folder_of(run, 12).exists() and alone(run).newest_whole().state.step == 8


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_file_that_cannot_be_read_is_passed_over(run, monkeypatch, number):
    """A broken sector in the newest checkpoint: its file is named, and the run goes on from the one before."""
    said, real = [], manifest.file_sha256

    def read(path: Path) -> str:
        if path == folder_of(run, 8) / MODEL_STATES:
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    monkeypatch.setattr(manifest, "file_sha256", read)
    assert alone(run, said.append).newest_whole().state.step == 4
    assert f"{MODEL_STATES} cannot be read ({os.strerror(number)})" in said[-1]


def test_what_cannot_be_deleted_does_not_end_a_run(run, monkeypatch):
    """A folder that NFS keeps is said and left, without its manifest, so that it is never gone back to."""
    said = []
    busy = OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(busy))
        alone(run, said.append).prune(8, keep=1)
    assert len(said) == 1 and "step-00000004" in said[0] and "could not be deleted" in said[0]
    assert not (folder_of(run, 4) / "checkpoint.json").exists()
    with pytest.raises(UserError, match="none of its 2 checkpoints is whole"):
        (folder_of(run, 8) / MODEL_STATES).unlink()
        alone(run, said.append).newest_whole()


def test_a_manifest_that_cannot_be_deleted_does_not_end_a_run(run, monkeypatch):
    """A disk that has become read-only below the old checkpoint: it is said, and the checkpoint stays whole."""
    said = []
    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only"))
        )
        alone(run, said.append).prune(8, keep=1)
    assert len(said) == 1 and alone(run).newest_whole(before=8).state.step == 4


def test_a_damaged_checkpoint_is_not_counted_as_kept(home, run):
    """--keep 2 keeps two that are whole; one that is written anew after it was damaged counts again."""

    def write(step: int) -> None:
        checkpoints.save(_Engine(random_model(tiny_config())), TrainState(0, 384, 256, "", step=step))
        checkpoints.finish()
        checkpoints.prune(step, keep=2)

    def steps() -> list[int]:
        return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))

    (folder_of(run, 8) / MODEL_STATES).write_bytes(b"damaged")
    checkpoints = alone(run)
    assert checkpoints.newest_whole().state.step == 4
    write(7)
    assert steps() == [4, 7, 8]
    checkpoints._damaged.add("step-00000007")
    write(9)
    assert steps() == [4, 7, 8, 9]
    write(8)
    checkpoints.prune(9, keep=2)
    assert steps() == [8, 9]


def test_what_all_ranks_refuse_is_said_once(run):
    """Other settings, and no whole checkpoint, are errors that the ranks agree on: rank 0 says them for all."""
    checkpoints = alone(run)
    with pytest.raises(distributed.AgreedError, match="other settings"):
        checkpoints.check_identity(checkpoints.newest_whole())
    for step in (4, 8):
        (folder_of(run, step) / MODEL_STATES).unlink()
    with pytest.raises(distributed.AgreedError, match="none of its 2 checkpoints is whole"):
        checkpoints.newest_whole()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_the_first_rank_cannot_use_ends_all_ranks(tmp_path, monkeypatch, rank):
    """--output is a file, or its disk is full: the same sentence on all ranks, as an error that they agree on."""
    from pretraining import launch

    (tmp_path / "file").write_text("not a folder")
    world = SimpleNamespace(rank=rank, world_size=2)
    theirs = (f"{tmp_path / 'file'}: the run folder cannot be used", "host")
    monkeypatch.setattr(distributed, "gather_objects", lambda value: [value or theirs, None])
    with (
        pytest.raises(distributed.AgreedError, match="file: the run folder cannot be used"),
        ExitStack() as lock,
    ):
        launch._take_folder(tmp_path / "file", world, lock)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(
        distributed, "gather_objects", lambda value: [value or ("No space left", "host"), None]
    )
    for name in ("_write_settings", "_keep_tokenizer", "Recorder"):
        with monkeypatch.context() as patch, pytest.raises(distributed.AgreedError, match="No space left"):
            for other in ("_write_settings", "_keep_tokenizer", "Recorder"):
                patch.setattr(launch, other, lambda *_: None)
            patch.setattr(launch, name, lambda *_: (_ for _ in ()).throw(full))
            preparation = SimpleNamespace(run_folder=tmp_path / "run", shard_set=None)
            launch._on_first_rank(
                world,
                tmp_path,
                lambda prepared=preparation: launch._open_books(prepared, world, "", [], None),
            )


@pytest.mark.parametrize("saved", [None, 5])
def test_curves_of_a_run_that_died_before_it_saved(tmp_path, saved):
    """What was drawn before a kill is taken back: all of it without a checkpoint, in a later phase too; else what is beyond."""
    recorder = Recorder(tmp_path, None)
    for step in range(4, 8):  # as a second phase that began at step 3
        recorder.record(step, {"train/loss": 1.0})
    recorder.close()
    recorder = Recorder(tmp_path, saved)
    again = range((saved or 8) + 1, (saved or 8) + 4)
    for step in again:
        recorder.record(step, {"train/loss": 2.0})
    recorder.close()
    expected = [(step, 1.0) for step in range(4, (saved or 3) + 1)] + [(step, 2.0) for step in again]
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [(line["step"], line["train/loss"]) for line in lines] == expected
    curve = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in curve] == expected


def test_a_second_phase_that_goes_on_is_checked_as_at_its_start(home, run, tmp_path):
    """--no_next_sentence is refused if the first phase had next sentences, whether or not this one has a checkpoint."""
    output = tmp_path / "output"
    values = {"precision": "fp32", "train_batch_size": 7, "phase_from": "a hash"}
    write_run(
        output,
        random_model(tiny_config()),
        home / "tokenizer",
        8,
        values | {"model": tiny_config().to_dict()},
    )
    for settings in ("{}", json.dumps({"arguments": {"phase_from": str(run)}})):
        output.joinpath("settings.json").write_text(settings)
        shard_set = ShardSet.open(home / "shards")
        with pytest.raises(UserError, match="trained with next sentences; leave --no_next_sentence out"):
            phase_start(run, shard_set, output, dropout=0.0, next_sentence=False)
        assert phase_start(run, shard_set, output, dropout=0.5, next_sentence=True).config == tiny_config(
            hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5
        )


@pytest.mark.parametrize(
    ("resume", "max_steps", "said"),
    [("never", 9, "--resume is never"), ("auto", 7, "--max_steps 7: the run is at step 8 already")],
)
def test_what_does_not_fit_the_checkpoint_is_said_once(run, monkeypatch, resume, max_steps, said):
    """--resume never and too few --max_steps are errors that all ranks agree on, before any model is made."""
    from pretraining import launch

    monkeypatch.setattr(distributed, "gather_objects", lambda value: [value])
    monkeypatch.setattr(launch, "gather_objects", lambda value: [value])
    monkeypatch.setattr(launch, "identity", lambda _: alone(run).newest_whole().manifest["identity"])
    preparation = SimpleNamespace(
        arguments=SimpleNamespace(resume=resume), shard_set=None, run_folder=run, max_steps=max_steps
    )
    with pytest.raises(distributed.AgreedError, match=said):
        launch._build(preparation, SimpleNamespace(rank=0, world_size=1), None, 0.0)
