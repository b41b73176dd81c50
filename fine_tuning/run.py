"""Fine-tune a pretrained BERT on labelled sentences, and choose learning rate and seed on dev.

    python fine_tuning/run.py --train train.csv --dev dev.csv --init_from runs/base-zero2 --output runs/reviews
    python fine_tuning/run.py --task sst2 --data_dir SST-2 --init_from exported --output runs/sst2
    python fine_tuning/run.py --train train.csv --dev dev.csv --init_from random --model tiny \\
        --tokenizer data/tokenizer --learning_rate 1e-3 --seeds 0 1 2 --output runs/baseline

A run is one learning rate with one seed. The same command trains what is not finished; more learning rates or
seeds are added to what is there.
"""

import sys

from data_prep.errors import run_program
from fine_tuning.arguments import parse_arguments


def main(argv: list[str] | None = None) -> int:
    """Fine-tune; returns the exit code."""
    arguments = parse_arguments(argv, __doc__)
    # From here on it takes seconds: torch is imported.
    from fine_tuning.grid import Grid, table
    from fine_tuning.preparation import prepare

    preparation = prepare(arguments)
    grid = Grid(preparation)
    print("\n".join(preparation.describe()))
    if not grid.pending:
        print("all runs are finished; nothing is left to train")
    elif grid.pending < grid.number_of_runs:
        print(f"{grid.number_of_runs - grid.pending} runs are finished already")
    print(f"curves: tensorboard --logdir {arguments.output}", flush=True)
    summary = grid.run()
    print("\n".join(table(summary, grid.results.metric)))
    if arguments.pooling == "mean":
        print(
            "transformers has no class for --pooling mean: there the folder loads as an encoder only (AutoModel)"
        )
    print(f"numbers: {arguments.output / 'metrics.json'}; model: {arguments.output / 'model'}")
    print(f'next: python fine_tuning/predict.py {arguments.output} "{_example(preparation)}"')
    return 0


def _example(preparation) -> str:
    text = preparation.data.splits["dev"].columns[0][0]
    return "".join(c for c in " ".join(text.split()[:8]) if c not in '"\\$`!')


if __name__ == "__main__":
    sys.exit(run_program(main))
