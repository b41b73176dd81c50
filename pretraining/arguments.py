"""The command line of pretraining, and everything that is checked before the ranks meet."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.errors import UserError
from data_prep.options import (
    Help,
    local_folder,
    non_negative_float,
    output_folder,
    positive_float,
    positive_int,
    probability,
    share,
    whole_number,
)

if TYPE_CHECKING:  # imported where they are needed: --help takes no time
    from data_prep.masking import MaskPolicy
    from data_prep.shards import ShardSet
    from pretraining.config import Lowered
    from pretraining.loading import StartingPoint
    from pretraining.model import BertConfig
    from pretraining.schedules import ScheduleSettings

PRESET_NAMES = ("tiny", "mini", "small", "medium", "base", "large")
DEFAULT_MODEL = "base"
DEFAULT_POSITIONS = 512
DEFAULT_INITIALIZER_RANGE = 0.02


def parse_arguments(argv: list[str] | None, description: str = "") -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="pretraining/run.py", description=description, formatter_class=Help)
    _add_model_options(parser.add_argument_group("model and data"))
    _add_run_options(parser.add_argument_group("run"))
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    return parser.parse_args(argv)


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    config_help = "batch sizes, precision, ZeRO, optimizer and schedule, in DeepSpeed's words"
    add("--deepspeed_config", type=Path, required=True, metavar="JSON", help=config_help)
    data = Path("data/shards")
    add("--data", type=local_folder, default=data, metavar="FOLDER", help="shards made by data_prep/run.py")
    sizes = "layers/hidden size 2/128, 4/256, 4/512, 8/512, 12/768, 24/1024"
    add("--model", choices=PRESET_NAMES, help=f"{sizes} (default: base)")
    start = "start from the weights of a run, a checkpoint or a Hugging Face folder, whose size the model then has"
    add("--init_from", type=Path, metavar="FOLDER", help=start)
    phase = "go on from the newest checkpoint of another run, or from a checkpoint, with its optimizer, on these shards, "
    phase += "with a data counter and schedule of its own; the curves go on"
    add("--phase_from", type=Path, metavar="RUN", help=phase)
    moments = "with --phase_from: the optimizer's moments as they were, or zero (and its count of steps too)"
    add("--phase_optimizer", choices=("keep", "fresh"), default="keep", help=moments)
    count = "with --phase_from: the steps that the bias correction counts go on, or begin anew as NVIDIA's do"
    add("--phase_step", choices=("keep", "reset"), default="keep", help=count)
    add("--seq_len", type=positive_int, help="longest instance in tokens (default: that of the shards)")
    positions = "positions that the model has (default: 512)"
    add("--max_position_embeddings", type=positive_int, help=positions)
    add("--dropout", type=probability, default=0.1, help="dropout probability, in attention too")
    add("--no_next_sentence", action="store_true", help="train the masked LM alone")
    masking = "draw masks anew in each epoch, or use the stored ones"
    add("--masking", choices=("dynamic", "static"), default="dynamic", help=masking)
    rate = (
        "share of the tokens that dynamic masks predict, without another bound (default: as the stored masks)"
    )
    add("--masked_lm_prob", type=share, metavar="P", help=rate)
    width = "standard deviation of the weights at the start, cut at two of them (default: 0.02)"
    add("--initializer_range", type=positive_float, metavar="STD", help=width)
    positions = (
        "position embeddings at the start: random, or sinusoids of the same standard deviation, which small "
    )
    positions += "models learn from sooner; they are trained either way (default: random)"
    add("--position_init", choices=("random", "sinusoidal"), help=positions)


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--output",
        type=output_folder,
        metavar="FOLDER",
        help="run folder (default: runs/MODEL-NAME_OF_THE_JSON)",
    )
    steps = "optimizer steps of the whole run (default: total_num_steps of the JSON's scheduler)"
    add("--max_steps", type=positive_int, help=steps)
    add("--seed", type=int, default=0, help="of initialisation, order, masks and dropout")
    tokens = "most tokens of a micro-batch (default: only train_micro_batch_size_per_gpu bounds it)"
    add("--micro_batch_tokens", type=positive_int, metavar="N", help=tokens)
    resume = "go on from the newest whole checkpoint; never: refuse if there is one"
    add("--resume", choices=("auto", "never"), default="auto", help=resume)
    add("--log_interval", type=whole_number, default=10, help="steps between points of the curves; 0: none")
    diagnostics = (
        "steps between measurements of the updates: norms, update-to-weight and trust ratios; 0: none"
    )
    add("--diagnostics_interval", type=whole_number, default=100, help=diagnostics)
    evaluation = "steps between evaluations on held-out shards; 0: only at the end"
    add("--eval_interval", type=whole_number, default=1000, help=evaluation)
    instances = "held-out instances per evaluation at most; 0: all"
    add("--eval_instances", type=whole_number, default=10000, help=instances)
    save = "steps between checkpoints; 0: only at the end"
    add("--save_interval", type=whole_number, default=1000, help=save)
    add("--keep", type=positive_int, default=3, help="checkpoints to keep, the newest")
    every = "keep for ever the checkpoints of each step that this divides; 0: none"
    add("--keep_every", type=whole_number, default=0, metavar="STEPS", help=every)
    rollbacks = "times that the run goes back to its last good checkpoint, and on without the batches at fault, when a "
    rollbacks += (
        "loss, gradient or weight is not finite or the loss scale at its floor; 0: stop at once. A loss is "
    )
    rollbacks += "looked at before the next step begins, weights before each evaluation and checkpoint"
    add("--max_rollbacks", type=whole_number, default=3, metavar="N", help=rollbacks)
    spike = "go back for a spike too: 5 losses in a row above the median of the 95 before them by K median absolute "
    spike += (
        "deviations and by a tenth; 10 is a careful start. 0: never, since most spikes pass by themselves"
    )
    add("--spike_factor", type=non_negative_float, default=0, metavar="K", help=spike)
    dry_run = "say what the run will be, and what is replaced on this machine, and stop"
    add("--dry_run", action="store_true", help=dry_run)


@dataclass(frozen=True)
class Preparation:
    """All that is known before the ranks meet; the same on every rank."""

    arguments: argparse.Namespace
    run_folder: Path
    shard_set: "ShardSet"
    config: "BertConfig"
    lowered: "Lowered"
    schedule: "ScheduleSettings"
    seq_len: int
    max_steps: int
    notes: list[str]
    start: "StartingPoint | None" = None

    @property
    def mask_policy(self) -> "MaskPolicy":
        """How dynamic masks are drawn."""
        from pretraining.data import mask_policy

        return mask_policy(self.shard_set, self.arguments.masked_lm_prob)

    def describe(self, world_size: int) -> list[str]:
        """What the run will be, in lines for the user."""
        from pretraining.dry_run import describe

        return describe(
            self.config,
            self.lowered,
            self.shard_set,
            seq_len=self.seq_len,
            world_size=world_size,
            max_steps=self.max_steps,
            masked_lm_prob=self.mask_policy.rate,
            notes=self.notes,
        )


def run_folder(arguments: argparse.Namespace) -> Path:
    """The one rule: --output, else runs/MODEL-NAME_OF_THE_JSON; MODEL may be a folder's name."""
    start = arguments.init_from or arguments.phase_from
    model = start.resolve().name if start else arguments.model or DEFAULT_MODEL
    return arguments.output or Path("runs") / f"{model}-{arguments.deepspeed_config.stem}"


def prepare(arguments: argparse.Namespace, world_size: int) -> Preparation:
    """Check everything that can be checked before the ranks meet.

    Raises:
        UserError: something in the command, the JSON or the shards is wrong.
    """
    from data_prep.shards import ShardSet
    from pretraining.config import lower, read_deepspeed_json
    from pretraining.distributed import machine_capabilities
    from pretraining.optimizer import refuse_apex_look_alike
    from pretraining.schedules import schedule_for

    refuse_apex_look_alike()
    settings = read_deepspeed_json(arguments.deepspeed_config)
    shard_set = ShardSet.open(arguments.data)
    config, start = _choose_model(arguments, shard_set)
    seq_len = _check_lengths(arguments, shard_set, config)
    device, capabilities = machine_capabilities()
    lowered = lower(
        settings,
        world_size=world_size,
        device=device,
        capabilities=capabilities,
        seq_len=seq_len,
        micro_batch_tokens=arguments.micro_batch_tokens,
    )
    _check_batch(lowered.train_batch_size, shard_set, arguments)
    _check_masks(arguments)
    _check_rollbacks(arguments)
    schedule, note = schedule_for(lowered.schedule, arguments.max_steps)
    max_steps = arguments.max_steps or schedule.total_num_steps
    if max_steps is None:
        raise UserError(
            f"{arguments.deepspeed_config}: its scheduler has no total_num_steps; give --max_steps"
        )
    notes = [
        *settings.notes,
        *lowered.replacements,
        *([note] if note else []),
        *(start.notes if start else ()),
    ]
    return Preparation(
        arguments,
        run_folder(arguments),
        shard_set,
        config,
        lowered,
        schedule,
        seq_len,
        max_steps,
        notes,
        start,
    )


def _choose_model(arguments: argparse.Namespace, shard_set) -> "tuple[BertConfig, StartingPoint | None]":
    """The configuration from the options, or that of the folder to start from, and what is taken over from there."""
    from pretraining.model import BertConfig

    next_sentence = not arguments.no_next_sentence
    option = _start_option(arguments)
    if option is None:
        config = BertConfig.preset(
            arguments.model or DEFAULT_MODEL,
            shard_set.manifest["tokenizer"]["vocab_size"],
            max_position_embeddings=arguments.max_position_embeddings or DEFAULT_POSITIONS,
            hidden_dropout_prob=arguments.dropout,
            attention_probs_dropout_prob=arguments.dropout,
            initializer_range=arguments.initializer_range or DEFAULT_INITIALIZER_RANGE,
            next_sentence=next_sentence,
        )
        return config, None
    if option == "init_from":
        from pretraining.loading import starting_point
    else:
        from pretraining.phase import phase_start as starting_point

    start = starting_point(
        getattr(arguments, option),
        shard_set,
        run_folder(arguments),
        dropout=arguments.dropout,
        next_sentence=next_sentence,
    )
    return start.config, start


def _start_option(arguments: argparse.Namespace) -> str | None:
    """The option that names a folder to start from, if one is given; what does not go with it is refused."""
    option = "init_from" if arguments.init_from else "phase_from" if arguments.phase_from else None
    if arguments.init_from and arguments.phase_from:
        raise UserError("--init_from and --phase_from are both given; the second takes over the weights too")
    for other in ("model", "max_position_embeddings", "initializer_range", "position_init") if option else ():
        if value := getattr(arguments, other):
            raise UserError(
                f"--{other} {value}: with --{option} the folder decides this; leave --{other} out"
            )
    for other in ("phase_optimizer", "phase_step"):
        if option != "phase_from" and (value := getattr(arguments, other)) != "keep":
            raise UserError(f"--{other} {value}: there is no earlier phase; give --phase_from")
    return option


def _check_lengths(arguments: argparse.Namespace, shard_set, config: "BertConfig") -> int:
    made = shard_set.settings["instances"]["seq_len"]
    seq_len = arguments.seq_len or made
    if seq_len != made:
        raise UserError(
            f"--seq_len {seq_len}: the shards in {arguments.data} hold instances of up to {made} tokens; "
            f"make shards with --seq_len {seq_len}, or leave the option out"
        )
    if seq_len > config.max_position_embeddings:
        longer = "" if _start_option(arguments) else f"give --max_position_embeddings {seq_len} or "
        raise UserError(
            f"--seq_len {seq_len}: the model has {config.max_position_embeddings} positions; {longer}make shorter shards"
        )
    if arguments.micro_batch_tokens is not None and arguments.micro_batch_tokens < seq_len:
        raise UserError(
            f"--micro_batch_tokens {arguments.micro_batch_tokens}: the shards in {arguments.data} hold instances of up "
            f"to {seq_len} tokens; give at least {seq_len}"
        )
    return seq_len


def _check_batch(train_batch_size: int, shard_set, arguments: argparse.Namespace) -> None:
    instances = int(shard_set.block_offsets("train")[-1])
    if train_batch_size > instances:
        raise UserError(
            f"{arguments.deepspeed_config}: train_batch_size {train_batch_size:,} is more than the {instances:,} training instances in {arguments.data}; "
            "make more shards (--duplicates) or lower it"
        )


def _check_masks(arguments: argparse.Namespace) -> None:
    rate = arguments.masked_lm_prob
    if rate is not None and arguments.masking == "static":
        raise UserError(
            f"--masked_lm_prob {rate}: stored masks were drawn when the shards were made; leave --masking static out"
        )
    if rate == 0:
        raise UserError("--masked_lm_prob 0: nothing would be predicted; 0.15 is BERT's")


def _check_rollbacks(arguments: argparse.Namespace) -> None:
    if arguments.spike_factor and arguments.max_rollbacks and arguments.keep == 1:
        raise UserError(
            f"--keep 1: a spike (--spike_factor {arguments.spike_factor:g}) is seen some steps after it has begun, when the "
            "checkpoint before it may be deleted; give --keep 2 or more"
        )


def identity(preparation: Preparation) -> dict:
    """What a resumed run must share with the run that it goes on with."""
    option = _start_option(preparation.arguments)
    return {
        "shards": preparation.shard_set.manifest_sha256,
        "model": preparation.config.to_dict(),
        "seed": preparation.arguments.seed,
        "masking": preparation.arguments.masking,
        "masked_lm_prob": preparation.mask_policy.rate,
        "position_init": preparation.arguments.position_init or "random",
        "train_batch_size": preparation.lowered.train_batch_size,
        "precision": preparation.lowered.precision,
        "optimizer": {"type": preparation.lowered.optimizer.algorithm}
        | preparation.lowered.optimizer.model_dump(),
        "schedule": {"type": type(preparation.schedule).__name__} | preparation.schedule.model_dump(),
        "gradient_clipping": preparation.lowered.gradient_clipping,
        **{
            name: preparation.start.sha256 if name == option else None for name in ("init_from", "phase_from")
        },
        "phase_optimizer": preparation.arguments.phase_optimizer,
        "phase_step": preparation.arguments.phase_step,
    }
