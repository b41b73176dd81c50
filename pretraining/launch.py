"""Start the ranks, build or load everything, train, and leave a status behind."""

import json
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch

from data_prep.counter_rng import Stream, key
from data_prep.errors import UserError
from data_prep.shards import TOKENIZER_FOLDER, ShardSet, file_sha256, sync, write_atomically
from data_prep.workers import work_lock
from pretraining import distributed
from pretraining.arguments import Preparation, identity
from pretraining.checkpoint import Checkpoints
from pretraining.data import TrainingBatches
from pretraining.distributed import (
    AgreedError,
    World,
    accumulate_in_fp32,
    gather_objects,
    import_deepspeed,
    raise_together,
)
from pretraining.lamb import Lamb
from pretraining.manifest import Checkpoint, TrainState, newest_step
from pretraining.metrics import ProgressLine, Recorder, write_status
from pretraining.model import BertForPreTraining, initialize_sinusoidal
from pretraining.optimizer import choose_optimizer, parameter_groups
from pretraining.order import DEFAULT_LANES, DEFAULT_WINDOW, Order
from pretraining.phase import load_phase, next_phase
from pretraining.repartition import load
from pretraining.slices import fill_partitions
from pretraining.stop import StopFlag
from pretraining.trainer import RunSettings, Trainer
from pretraining.trouble import FOLDER as TROUBLE_FOLDER
from pretraining.trouble import TroubleError, go_back
from pretraining.unsharded import Unsharded

EXIT_USER_ERROR = 2
EXIT_STOPPED = 75
T = TypeVar("T")


def launch(preparation: Preparation, stop: StopFlag, started: float) -> int:
    """Train on this rank; returns the exit code.

    Args:
        preparation: what was checked.
        stop: whether to stop early.
        started: time.monotonic() of the program's start.
    """
    world = distributed.start()
    folder = preparation.run_folder
    trainer, is_ours = None, False

    def leave_status(state: str, reason: str) -> None:
        if world.rank == 0 and is_ours:
            step = trainer.state.step if trainer else newest_step(folder)
            skipped = trainer.state.skipped_ranges if trainer else []
            try:
                write_status(folder, state, reason, step, skipped)
            except OSError as problem:
                print(f"{folder}: its status could not be written ({problem})", flush=True)

    lock = ExitStack()
    try:
        _take_folder(folder, world, lock)
        is_ours = True
        finished = False
        # A signal during start-up should not wait for a large model to be built and loaded.
        if not any(gather_objects(stop.raised())):
            trainer = _build(preparation, world, stop, started)
            leave_status("running", "")
            finished = _train(preparation, trainer, leave_status)
        if finished:
            leave_status("finished", f"{preparation.max_steps} steps are done")
            if world.rank == 0:
                stop.clear()  # made during the last step, it would stop the run if it is prolonged
                _say_end(preparation, trainer.state)
            return 0
        reason = stop.reason or "another rank was asked to stop"
        leave_status("stopped", reason)
        if world.rank == 0:
            stop.clear()
            step = trainer.state.step if trainer else newest_step(folder)
            print(f"stopped by {reason}; the same command goes on from step {step:,}", flush=True)
        return EXIT_STOPPED
    except UserError as error:
        leave_status("failed", str(error))
        if isinstance(error, AgreedError) and world.rank:
            return EXIT_USER_ERROR
        raise
    except Exception as error:
        leave_status("failed", f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    except KeyboardInterrupt:
        leave_status("failed", "interrupted twice; what came after the last checkpoint is lost")
        raise
    finally:
        stop.ignore()
        lock.close()
        distributed.shutdown()


def _take_folder(folder: Path, world: World, lock: ExitStack) -> None:
    """Lock the run folder for this run, or end on all ranks if another run is at work in it."""
    _on_first_rank(world, folder, lambda: lock.enter_context(work_lock(folder, shared=False)))


def _on_first_rank(world: World, folder: Path, action: Callable[[], T]) -> T | None:
    """Do on rank 0 what needs the run folder; a collective call, and None on the other ranks.

    Raises:
        AgreedError: it has failed, on all ranks, since those left alone would end with an error of the network's.
    """
    result = problem = None
    if world.rank == 0:
        try:
            result = action()
        except UserError as error:
            problem = error
        except OSError as error:
            problem = UserError(
                f"{folder}: the run folder cannot be used ({error}); make room or mend that, and run the same command "
                "again, or give another --output"
            )
    raise_together(problem)
    return result


def _train(preparation: Preparation, trainer: Trainer, leave_status: Callable[[str, str], None]) -> bool:
    """Train to the end, going back to a checkpoint when there is trouble; False if a stop was asked for."""
    while True:
        with closing(_batches(preparation, trainer.world, trainer.state)) as batches:
            try:
                return trainer.run(batches)
            except TroubleError as error:
                trouble = error
        said = go_back(trainer, trouble, preparation.run_folder, preparation.arguments.max_rollbacks)
        leave_status("running", said)
        if trainer.recorder:
            trainer.recorder.note("trouble", said, trainer.state.global_step)
            trainer.progress.say(said)


def _build(preparation: Preparation, world: World, stop: StopFlag, started: float) -> Trainer:
    """Make the engine, load the newest checkpoint if there is one, and set the trainer up."""
    arguments, shard_set, folder = preparation.arguments, preparation.shard_set, preparation.run_folder
    ranks = world.rank, world.world_size
    checkpoints = Checkpoints(folder, identity(preparation), *ranks, gather_objects, print)
    _on_first_rank(world, folder, checkpoints.remove_partial)
    checkpoint = checkpoints.newest_whole()
    if checkpoint:
        if arguments.resume == "never":
            raise AgreedError(
                f"{checkpoint.path}: there is a checkpoint, and --resume is never; choose another --output"
            )
        checkpoints.check_identity(checkpoint)
        state = checkpoint.state
        if state.step > preparation.max_steps:
            raise AgreedError(
                f"--max_steps {preparation.max_steps:,}: the run is at step {state.step:,} already; give more, or "
                "another --output"
            )
    else:
        _check_start(preparation)
        state = TrainState(arguments.seed, DEFAULT_LANES, DEFAULT_WINDOW, shard_set.manifest_sha256)
    engine, optimizer_name = _make_engine(preparation, world)
    earlier = preparation.start and preparation.start.checkpoint
    if checkpoint:
        load(engine, checkpoint, *ranks)
    elif earlier:
        state = next_phase(earlier, state)
        keep = {
            "keep_moments": arguments.phase_optimizer == "keep",
            "keep_step": arguments.phase_step == "keep",
        }
        load_phase(engine, earlier, world, **keep)
    going_on = _going_on(preparation, world, checkpoint) if checkpoint else []
    resumed_step = state.global_step if checkpoint else None
    recorder = _on_first_rank(
        world, folder, lambda: _open_books(preparation, world, optimizer_name, going_on, resumed_step)
    )
    progress = None
    if recorder:
        progress = ProgressLine(preparation.max_steps, state.step)
        _say_start(preparation, world, going_on, started)
        recorder.note("run", f"started at step {state.step} on {world.world_size} ranks", state.global_step)
    return Trainer(
        engine, world, _run_settings(preparation), state, checkpoints, shard_set, recorder, progress, stop
    )


def _open_books(
    preparation: Preparation, world: World, optimizer_name: str, going_on: list[str], resumed_step: int | None
) -> Recorder:
    """Write into the run folder what explains it, and open its metrics."""
    folder = preparation.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    _write_settings(preparation, world, optimizer_name, going_on)
    _keep_tokenizer(preparation.shard_set, folder / TOKENIZER_FOLDER)
    return Recorder(folder, resumed_step)


def _check_start(preparation: Preparation) -> None:
    """Refuse to begin with random weights where others were asked for; a collective call.

    They are not read if a rank has seen a checkpoint of the run, which can be gone when the ranks meet.
    """
    start, arguments, problem = preparation.start, preparation.arguments, None
    if start and not start.weights and not start.checkpoint:
        option = "init_from" if arguments.init_from else "phase_from"
        problem = UserError(
            f"--{option} {getattr(arguments, option)}: neither its weights nor a checkpoint were read, since "
            f"{preparation.run_folder} had a checkpoint to go on from, which is no longer there; run the same command "
            "again, or give another --output"
        )
    raise_together(problem)


def _run_settings(preparation: Preparation) -> RunSettings:
    arguments, lowered = preparation.arguments, preparation.lowered
    return RunSettings(
        seed=arguments.seed,
        seq_len=preparation.seq_len,
        train_batch_size=lowered.train_batch_size,
        micro_batch_size=lowered.micro_batch_size,
        micro_batch_tokens=lowered.micro_batch_tokens,
        max_micro_steps=lowered.max_micro_steps,
        spike_factor=arguments.spike_factor,
        schedule=preparation.schedule,
        max_steps=preparation.max_steps,
        log_interval=arguments.log_interval,
        diagnostics_interval=arguments.diagnostics_interval,
        save_interval=arguments.save_interval,
        eval_interval=arguments.eval_interval,
        eval_instances=arguments.eval_instances,
        keep=arguments.keep,
        keep_every=arguments.keep_every,
    )


def _batches(preparation: Preparation, world: World, state: TrainState) -> TrainingBatches:
    lowered, shard_set = preparation.lowered, preparation.shard_set
    return TrainingBatches(
        Order(shard_set.block_offsets("train"), state.seed, state.lanes, state.window),
        shard_set,
        consumed=state.consumed,
        train_batch_size=lowered.train_batch_size,
        rank=world.rank,
        world_size=world.world_size,
        max_instances=lowered.micro_batch_size,
        max_tokens=lowered.micro_batch_tokens,
        masking=preparation.arguments.masking,
        policy=preparation.mask_policy,
        seed=state.seed,
        skipped_ranges=state.skipped_ranges,
        pin=world.device.type == "cuda",
    )


def _make_engine(preparation: Preparation, world: World):
    """Initialise model, optimizer and DeepSpeed engine; returns the engine and what the optimizer is."""
    lowered = preparation.lowered
    torch.manual_seed(key(preparation.arguments.seed, Stream.INITIALISATION))
    model = BertForPreTraining(preparation.config)
    if preparation.arguments.position_init == "sinusoidal":
        initialize_sinusoidal(model.bert.embeddings.position_embeddings, preparation.config.initializer_range)
    if preparation.start and preparation.start.weights:
        model.load_state_dict(preparation.start.weights, strict=False)
        preparation.start.weights.clear()  # they would stay in memory for the whole run
    choice = choose_optimizer(lowered.optimizer, lowered.optimizer_device)
    groups = parameter_groups(model, lowered.optimizer.weight_decay)
    optimizer = choice.build(groups, lowered.optimizer)
    is_fp32 = lowered.precision == "fp32"
    originals = {} if is_fp32 else {id(p): p.detach().clone() for p in model.parameters()}
    deepspeed = import_deepspeed()
    # Its warning is of optimizers that do not know the partitions.
    deepspeed.utils.logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=lowered.engine_config,
        dist_init_required=False,
    )
    if originals:
        fill_partitions(engine.optimizer, originals)
    if not engine.zero_optimization():
        engine.optimizer = Unsharded(optimizer, lowered.gradient_clipping)
    elif isinstance(optimizer, Lamb):
        optimizer.shard(engine.optimizer)
    if lowered.max_micro_steps > 1:
        accumulate_in_fp32(engine)
    return engine, f"{choice.name}: {choice.why}"


def _going_on(preparation: Preparation, world: World, checkpoint: Checkpoint) -> list[str]:
    """What the user is told about a run that goes on."""
    state, now, before = checkpoint.state, world.world_size, checkpoint.world_size
    was = "" if now == before else f" (was on {before})"
    lines = [
        f"going on from step {state.step:,} on {now} rank{'s' * (now > 1)}{was}, {state.consumed:,} instances read"
    ]
    if state.skipped_ranges:
        lines.append(_left_out(state))
    config = preparation.config
    if was and (config.hidden_dropout_prob or config.attention_probs_dropout_prob):
        lines.append("dropout is drawn per rank: on another number of ranks the run goes on with other draws")
    return lines


def _write_settings(preparation: Preparation, world: World, optimizer_name: str, going_on: list[str]) -> None:
    """settings.json: everything that the run was started with, so that its folder explains itself."""
    content = {
        "arguments": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(preparation.arguments).items()
        },
        "model": preparation.config.to_dict(),
        "deepspeed": preparation.lowered.engine_config,
        "train_batch_size": preparation.lowered.train_batch_size,
        "precision": preparation.lowered.precision,
        "optimizer": {"type": preparation.lowered.optimizer.algorithm, "kernel": optimizer_name}
        | preparation.lowered.optimizer.model_dump(),
        "schedule": preparation.schedule.model_dump(),
        "written_in": json.loads(preparation.arguments.deepspeed_config.read_text(encoding="utf-8-sig")),
        "notes": [*preparation.notes, *going_on],
        "world_size": world.world_size,
        "device": str(world.device),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "numpy", "webdataset")},
        "commit": _commit(),
    }
    write_atomically(
        preparation.run_folder / "settings.json", (json.dumps(content, indent=1) + "\n").encode()
    )


def _keep_tokenizer(shard_set: ShardSet, folder: Path) -> None:
    """Copy the shards' tokenizer into the run folder: its checkpoints can then be used without the shards."""
    files = shard_set.manifest["tokenizer"]["files"]
    if folder.is_dir() and {path.name: file_sha256(path) for path in folder.iterdir()} == files:
        return
    partial = folder.with_name(f".{folder.name}.partial")
    for leftover in (partial, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    for name in files:
        write_atomically(partial / name, (shard_set.tokenizer_folder / name).read_bytes())
    partial.rename(folder)
    sync(folder.parent)


def _commit() -> str | None:
    """The commit of this code, if it runs from a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _say_start(preparation: Preparation, world: World, lines: list[str], started: float) -> None:
    print("\n".join([*preparation.describe(world.world_size), *lines]))
    print(f"curves: tensorboard --logdir {preparation.run_folder.parent}")
    print(f"started in {time.monotonic() - started:.1f} s", flush=True)


def _left_out(state: TrainState) -> str:
    positions = ", ".join(f"{start:,} to {stop - 1:,}" for start, stop in state.skipped_ranges)
    return (
        f"after trouble the run has gone back {state.rollbacks} times, and leaves out the instances at the positions "
        f"{positions}; see {TROUBLE_FOLDER}/"
    )


def _say_end(preparation: Preparation, state: TrainState) -> None:
    folder = preparation.run_folder
    if state.skipped_ranges:
        print(f"\n{_left_out(state)}")
    print(
        f"\n{preparation.max_steps:,} steps are done: checkpoints in {folder / 'checkpoints'}, numbers in {folder / 'metrics.jsonl'}"
    )
    print(f"next: tensorboard --logdir {folder.parent}", flush=True)
