"""Raw text to a tokenizer and to shards of MLM/NSP instances, and rows held out for a score.

python data_prep/run.py split     --input reviews.csv --output data/reviews --dev_fraction 0.03 --test_fraction 0.06
python data_prep/run.py tokenizer --input TEXT --output data/tokenizer
python data_prep/run.py shards    --input TEXT --tokenizer data/tokenizer --output data/shards
python data_prep/run.py inspect   data/shards
python data_prep/run.py verify    data/shards
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from data_prep.errors import UserError, run_program
from data_prep.options import Help, positive_float, positive_int, share

ONLY = ("plan", "tokenize", "instances", "manifest")
LONGEST_SEQ_LEN = (1 << 16) - 1  # positions have 16 bits in the shard format


def main(argv: list[str] | None = None) -> int | None:
    """Parse the command line and run a command."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a file where a folder should be, no permission
        place = error.filename or f"--output {getattr(arguments, 'output', '')}"
        raise UserError(f"{place}: {error.strerror or error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="data_prep/run.py", description=__doc__, formatter_class=Help)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add_command(name: str, function: Callable, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, formatter_class=Help)
        command.set_defaults(command=function)
        return command

    _add_split_options(add_command("split", split_rows, "hold rows out for a score"))
    tokenizer = add_command("tokenizer", train, "train a SentencePiece tokenizer")
    _add_input_options(tokenizer)
    _add_tokenizer_options(tokenizer)
    shards = add_command("shards", make_shards, "make shards of training instances")
    _add_input_options(shards)
    _add_shard_options(shards)
    inspect = add_command("inspect", inspect_shards, "print instances and statistics of shards")
    inspect.add_argument("folder", type=Path, help="shard folder")
    inspect.add_argument("--instances", type=int, default=3, help="instances to print")
    inspect.add_argument("--split", choices=("train", "eval"), default="train", help="which shards")
    inspect.add_argument("--start", type=int, default=0, help="storage number of the first instance")
    verify = add_command("verify", verify_shards, "check every byte of shards")
    verify.add_argument("folder", type=Path, help="shard folder")
    return parser


_INPUT = {
    "nargs": "+",
    "required": True,
    "metavar": "PATH",
    "help": "files, folders (taken whole) or globs; plain, .gz or .bz2",
}
_TEXT_FIELD = {"default": "text", "help": "field of JSONL or column of CSV that holds the text"}


def _add_split_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", **_INPUT)
    kinds = "jsonl or csv (.tsv too), all inputs alike; auto goes by the file name: .jsonl, .csv, .tsv"
    add("--format", default="auto", choices=("auto", "jsonl", "csv"), help=kinds)
    add("--text_field", **_TEXT_FIELD)
    add("--output", type=Path, required=True, metavar="FOLDER", help="where the train, dev and test files go")
    chosen = "share of the different texts for the {} file, chosen by a hash of the text"
    add("--dev_fraction", type=share, required=True, help=chosen.format("dev"))
    add("--test_fraction", type=share, required=True, help=chosen.format("test"))


def _add_input_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("input").add_argument
    add("--input", **_INPUT)
    add(
        "--format",
        default="auto",
        help="sentences (one a line, blank line between documents), documents (plain text, a file each), jsonl, csv "
        "(.tsv too), mediawiki (XML dump); auto goes by the file name: .jsonl, .csv, .tsv, .xml, else sentences",
    )
    add("--text_field", **_TEXT_FIELD)
    add("--document_start", metavar="REGEX", help="in `documents`: a line that matches begins a new document")
    add("--language", default="en", help="language code for sentence boundaries, e.g. ko")
    add(
        "--eval_fraction",
        type=share,
        default=0.01,
        help="share of the documents held out for evaluation, chosen by a hash of their text; the tokenizer must "
        "not see them either, so give both commands the same",
    )
    add(
        "--split_mb",
        type=positive_float,
        default=64,
        help="input MB per task; line formats are cut inside a file",
    )
    add(
        "--workers",
        type=positive_int,
        default=os.cpu_count(),
        help="processes; they never change the result",
    )


def _add_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FOLDER", help="where the tokenizer goes")
    add("--vocab_size", type=positive_int, default=32000, help="pieces, the five special ones counted")
    add(
        "--character_coverage",
        type=share,
        default=0.9995,
        help="share of the characters that get a piece of their own",
    )
    add("--lower_case", action="store_true", help="fold case (an uncased model)")
    add(
        "--sample_mb",
        type=positive_float,
        default=256,
        help="MB of text to train on at most, chosen by hash (memory: about 5 times as much)",
    )


def _add_shard_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokenizer", type=Path, required=True, metavar="FOLDER", help="made by the tokenizer command")
    add("--output", type=Path, required=True, metavar="FOLDER", help="where the shards go")
    add("--seq_len", type=positive_int, default=128, help="longest instance in tokens")
    add(
        "--duplicates",
        type=positive_int,
        default=1,
        help="times each document is used, with other cuts, partners and masks",
    )
    add("--short_seq_prob", type=share, default=0.1, help="share of instances that are shorter on purpose")
    add("--masked_lm_prob", type=share, default=0.15, help="share of the tokens to predict in static masks")
    add("--max_predictions", type=positive_int, help="predictions per instance at most (none: no bound)")
    add("--seed", type=int, default=0, help="of everything random")
    add(
        "--bucket_mb",
        type=positive_float,
        default=64,
        help="input MB per shard; a worker holds a bucket in memory (about 4 times as much)",
    )
    add("--only", choices=ONLY, help="run one stage and stop, for the elements of a job array")
    add(
        "--part",
        metavar="I/N",
        default="0/1",
        help="of the stage named by --only, the tasks whose number is I modulo N",
    )


def _read_options(arguments: argparse.Namespace):
    from data_prep.inputs import ReadOptions

    return ReadOptions(arguments.format, arguments.language, arguments.text_field, arguments.document_start)


def split_rows(arguments: argparse.Namespace) -> None:
    """Hold rows out for a score."""
    from data_prep.split import SplitSettings, make_split, report

    _check_output(arguments.output)
    settings = SplitSettings(arguments.text_field, arguments.dev_fraction, arguments.test_fraction)
    content, is_new = make_split(arguments.input, arguments.format, arguments.output, settings)
    if not is_new:
        print(f"{arguments.output}: this split is finished; there is nothing to do")
    print("\n".join(report(content, arguments.output)))


def train(arguments: argparse.Namespace) -> None:
    """Train a tokenizer on a sample of the sentences."""
    from data_prep.inputs import find_inputs
    from data_prep.plan import input_names
    from data_prep.tokenizer import Tokenizer, train_tokenizer
    from data_prep.tokenizer_sample import sample_sentences

    if not 0.98 <= arguments.character_coverage <= 1:
        raise UserError(
            f"--character_coverage {arguments.character_coverage}: SentencePiece takes 0.98 to 1; 0.9995 for Korean, "
            "Chinese and Japanese, 1 for small alphabets"
        )
    started = time.monotonic()
    options = _read_options(arguments)
    files = find_inputs(arguments.input, options)
    description = {
        "model_type": "unigram",
        "vocab_size": arguments.vocab_size,
        "character_coverage": arguments.character_coverage,
        "normalization": "nmt_nfkc_cf" if arguments.lower_case else "nmt_nfkc",
        "eval_fraction": arguments.eval_fraction,
        "read": asdict(options),
        "sample_bytes": int(arguments.sample_mb * 1e6),
        "inputs": input_names(files),
    }
    _check_output(arguments.output)
    if _is_trained(arguments.output, description):
        print(f"{arguments.output}: this tokenizer is trained; there is nothing to do")
        return
    sentences = sample_sentences(
        files,
        options,
        eval_fraction=arguments.eval_fraction,
        budget_bytes=description["sample_bytes"],
        split_bytes=max(1, int(arguments.split_mb * 1e6)),
        workers=arguments.workers,
    )
    print(
        f"training a vocabulary of {arguments.vocab_size:,} pieces on {len(sentences):,} sentences …",
        file=sys.stderr,
    )
    train_tokenizer(iter(sentences), arguments.output, description)
    tokenizer = Tokenizer(arguments.output)
    print(f"{tokenizer.vocab_size:,} pieces in {time.monotonic() - started:.1f} s: {arguments.output}")
    print(
        f"next: python data_prep/run.py shards --input … --tokenizer {arguments.output} --output data/shards"
    )


def _check_output(folder: Path) -> None:
    """Find out before the work, not behind it, that a file stands where a folder should be."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise UserError(f"--output {folder}: {place} is a file; name a folder")


def _is_trained(folder: Path, description: dict) -> bool:
    """Whether the folder holds the tokenizer that the description asks for.

    Raises:
        UserError: it holds another one.
    """
    from data_prep.plan import differences
    from data_prep.tokenizer import DESCRIPTION_FILE, Tokenizer

    if not (folder / DESCRIPTION_FILE).is_file():
        return False
    there = {name: value for name, value in Tokenizer(folder).description.items() if name != "model_sha256"}
    if there != description:
        raise UserError(
            f"{folder}: it holds a tokenizer that was trained with other settings ({differences(there, description)}); "
            "choose another --output or delete the folder"
        )
    return True


def make_shards(arguments: argparse.Namespace) -> None:
    """Make shards, or the part of them that `--only` and `--part` name."""
    from data_prep.instances import InstanceSettings
    from data_prep.plan import ShardSettings
    from data_prep.tasks import group_buckets, write_manifest
    from data_prep.workers import work_lock

    if not 8 <= arguments.seq_len <= LONGEST_SEQ_LEN:
        raise UserError(f"--seq_len {arguments.seq_len}: an instance has 8 to {LONGEST_SEQ_LEN:,} tokens")
    settings = ShardSettings(
        read=_read_options(arguments),
        instances=InstanceSettings(
            arguments.seq_len, arguments.short_seq_prob, duplicates=arguments.duplicates, seed=arguments.seed
        ),
        masked_lm_prob=arguments.masked_lm_prob,
        max_predictions=arguments.max_predictions,
        eval_fraction=arguments.eval_fraction,
        split_bytes=max(1, int(arguments.split_mb * 1e6)),
        bucket_bytes=max(1, int(arguments.bucket_mb * 1e6)),
    )
    part = _part(arguments)
    only = arguments.only
    started = time.monotonic()
    with work_lock(arguments.output, shared=only in ("tokenize", "instances")):
        plan, manifest = _begin(arguments, settings)
        if manifest is not None:
            print(f"{arguments.output}: these shards are finished; there is nothing to do")
        if manifest is None and only in (None, "tokenize"):
            _run_stage(plan, "tokenize", part, arguments.workers)
        if manifest is None and only in (None, "instances"):
            _run_stage(plan, "instances", part, arguments.workers)
        if manifest is None and only in (None, "manifest"):
            manifest = write_manifest(plan, group_buckets(plan))
    _report(arguments, plan, manifest, time.monotonic() - started)


def _begin(arguments: argparse.Namespace, settings) -> tuple:
    """The plan, and the manifest if the shards are finished already."""
    from data_prep import plan as planning
    from data_prep.shards import MANIFEST

    if arguments.only not in (None, "plan") and not (arguments.output / MANIFEST).is_file():
        return planning.load_plan(arguments.output, settings), None
    plan = planning.make_plan(arguments.input, arguments.tokenizer, arguments.output, settings)
    manifest = planning.finished_shards(plan)
    if manifest is None:
        planning.begin_plan(plan, arguments.tokenizer)
    return plan, manifest


def _part(arguments: argparse.Namespace) -> tuple[int, int]:
    try:
        index, count = (int(number) for number in arguments.part.split("/"))
    except ValueError:
        raise UserError(f"--part {arguments.part}: expected I/N, e.g. 0/16") from None
    if not 0 <= index < count:
        raise UserError(f"--part {arguments.part}: I goes from 0 to N-1")
    if count > 1 and arguments.only not in ("tokenize", "instances"):
        raise UserError(
            f"--part {arguments.part}: only the stages `tokenize` and `instances` have parts; name one with --only"
        )
    return index, count


def _run_stage(plan, stage: str, part: tuple[int, int], workers: int) -> None:
    from data_prep import tasks
    from data_prep.workers import progress_bar, run_tasks

    index, count = part
    if stage == "tokenize":
        todo = [(plan, task) for task in range(len(plan.splits))][index::count]
        total = sum(plan.splits[task].end - plan.splits[task].start for _, task in todo)
        function, bar = tasks.tokenize, progress_bar(total, "B", "tokenize")
    else:
        groups = tasks.group_buckets(plan)
        todo = [
            (plan, split, number, group) for split in groups for number, group in enumerate(groups[split])
        ]
        todo = todo[index::count]
        function, bar = (
            tasks.build_shard,
            progress_bar(sum(t[3][1] - t[3][0] for t in todo), "bucket", "instances"),
        )
    for _ in run_tasks(function, todo, workers, bar):
        pass


def _report(arguments: argparse.Namespace, plan, manifest: dict | None, seconds: float) -> None:
    from data_prep.shards import SPLITS

    if manifest is None:
        print(
            f"{arguments.only}: done; {len(plan.splits)} tokenize tasks, {sum(plan.buckets.values())} buckets in {plan.work}"
        )
        return
    for split in SPLITS:
        content = manifest["splits"][split]
        counts = content["counts"]
        if counts:
            print(
                f"{split}: {counts['instances']:,} instances, {counts['tokens']:,} tokens of {counts['documents']:,} documents "
                f"in {len(content['shards'])} shards ({counts['duplicate_documents']:,} duplicate documents dropped)"
            )
    size = sum(file["bytes"] for file in manifest["inputs"])
    print(f"{size / 1e6:,.1f} MB of input in {seconds:.1f} s: {arguments.output}")
    print(f"next: python data_prep/run.py inspect {arguments.output}")
    print(
        f"      deepspeed pretraining/run.py --deepspeed_config ds_configs/zero2.json --data {arguments.output}"
    )


def inspect_shards(arguments: argparse.Namespace) -> None:
    """Print instances with their masks, the length histogram and the share of padding."""
    from data_prep.inspection import print_instances, print_statistics
    from data_prep.shards import ShardSet

    shard_set = ShardSet.open(arguments.folder)
    print_instances(shard_set, arguments.split, arguments.start, arguments.instances)
    print_statistics(shard_set)


def verify_shards(arguments: argparse.Namespace) -> None:
    """Check every byte against the checksums that were taken when it was written."""
    from data_prep.shards import ShardSet, verify
    from data_prep.workers import progress_bar

    shard_set = ShardSet.open(arguments.folder)
    total = sum(
        shard["bytes"] for split in shard_set.manifest["splits"].values() for shard in split["shards"]
    )
    shards = 0
    with progress_bar(total, "B", "verify") as bar:
        for _, size in verify(arguments.folder):
            bar.update(size)
            shards += 1
    print(f"{arguments.folder}: {shards} shards, manifest and tokenizer are as they were written")


if __name__ == "__main__":
    sys.exit(run_program(main))
