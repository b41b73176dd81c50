"""The command line of fine-tuning; torch is not imported here, so that --help takes no time."""

import argparse
from pathlib import Path

from data_prep.errors import UserError
from data_prep.options import Help, positive_float, positive_int, probability, whole_number
from fine_tuning.tasks import OWN_DATA, TASKS
from pretraining.arguments import PRESET_NAMES

RANDOM = "random"


def parse_arguments(argv: list[str] | None, description: str = "") -> argparse.Namespace:
    """Read the command line. Raises UserError where options contradict each other."""
    parser = argparse.ArgumentParser(
        prog="fine_tuning/run.py", description=description, formatter_class=Help, allow_abbrev=False
    )
    _add_data_options(parser.add_argument_group("task and data"))
    _add_model_options(parser.add_argument_group("model"))
    _add_training_options(parser.add_argument_group("training"))
    arguments = parser.parse_args(argv)
    _check(arguments)
    return arguments


def _add_data_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    task_help = f"a task by name, or {OWN_DATA} for own files"
    add("--task", choices=(OWN_DATA, *TASKS), default=OWN_DATA, help=task_help)
    add("--data_dir", type=Path, metavar="FOLDER", help="where the files of a named task lie")
    files = "CSV, TSV or JSONL, known by its extension (.gz and .bz2 too)"
    add("--train", type=Path, metavar="FILE", help=f"labelled training examples: {files}")
    add("--dev", type=Path, metavar="FILE", help="labelled examples that choose learning rate and seed")
    add("--test", type=Path, metavar="FILE", help="labelled examples that choose nothing, for the score")
    add("--text_column", metavar="NAME", help="column or JSON key of the text (default: text)")
    add("--label_column", metavar="NAME", help="column or JSON key of the label (default: label)")
    subset = "train on so many examples only, the same ones for every seed (default: all)"
    add("--train_examples", type=positive_int, metavar="N", help=subset)
    length = "longest text in tokens, [CLS] and [SEP] counted; the rest of longer texts is cut off"
    add("--max_length", type=positive_int, default=128, help=length)


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    init = f"run folder, checkpoint or Hugging Face folder to start from, or {RANDOM}"
    add("--init_from", required=True, metavar="MODEL", help=init)
    add("--model", choices=PRESET_NAMES, help=f"size of the model with --init_from {RANDOM}")
    add("--tokenizer", type=Path, metavar="FOLDER", help=f"its tokenizer with --init_from {RANDOM}")
    pooling = "what the classifier sees: BERT's pooler on [CLS], or the mean of all tokens (better with weak encoders)"
    add("--pooling", choices=("cls", "mean"), default="cls", help=pooling)
    add("--dropout", type=probability, default=0.1, help="dropout probability, in attention and head too")


def _add_training_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    rates = "peak learning rates; the one with the best mean on dev is kept"
    add("--learning_rate", type=positive_float, nargs="+", default=[2e-5, 3e-5, 5e-5], help=rates)
    seeds = "seeds of initialisation, order and dropout; each learning rate is trained with each"
    add("--seeds", type=whole_number, nargs="+", default=[0], help=seeds)
    search = "so many of --seeds, the first ones, are trained with each learning rate, and the others with the best one "
    search += "only (default: all with each)"
    add("--search_seeds", type=positive_int, metavar="N", help=search)
    add("--epochs", type=positive_int, default=3, help="passes over the training examples")
    add("--batch_size", type=positive_int, default=32, help="examples per update")
    warmup = "share of the updates in which the learning rate rises; it falls linearly to 0 afterwards"
    add("--warmup_ratio", type=probability, default=0.1, help=warmup)
    decay = "AdamW's, on matrices only (0: none)"
    add("--weight_decay", type=probability, default=0.01, help=decay)
    precision = "auto: bf16 or fp16 where the device has it in hardware, else fp32"
    add("--precision", choices=("auto", "fp32", "bf16", "fp16"), default="auto", help=precision)
    add("--output", type=Path, required=True, metavar="FOLDER", help="folder for results and model")


def _check(arguments: argparse.Namespace) -> None:
    is_random = arguments.init_from == RANDOM
    given = {"--model": arguments.model, "--tokenizer": arguments.tokenizer}
    wrong = [name for name, value in given.items() if (value is None) == is_random]
    if wrong:
        rule = (
            f"needs {' and '.join(wrong)}" if is_random else f"brings its own: leave {', '.join(wrong)} out"
        )
        raise UserError(f"--init_from {arguments.init_from} {rule}")
    if arguments.max_length < 3:
        raise UserError(f"--max_length {arguments.max_length}: [CLS], [SEP] and some text need at least 3")
    for name in ("learning_rate", "seeds"):
        values = getattr(arguments, name)
        if len(set(values)) < len(values):
            raise UserError(f"--{name} {' '.join(map(str, values))}: a value stands there twice; keep one")
    number = arguments.search_seeds
    if number is not None and number > len(arguments.seeds):
        raise UserError(
            f"--search_seeds {number}: --seeds has {len(arguments.seeds)}; ask for that many at most"
        )
