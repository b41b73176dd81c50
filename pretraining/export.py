"""Write a trained model as a folder that Hugging Face's transformers loads.

    python pretraining/export.py runs/base-zero2 --output exported
    python pretraining/export.py runs/base-zero2/checkpoints/step-00100000 --output exported

AutoModel, AutoModelForMaskedLM, AutoModelForPreTraining and AutoTokenizer read such a folder, and so do
--init_from and the other programs here.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from data_prep.errors import UserError, run_program
from data_prep.options import Help


def main(argv: list[str] | None = None) -> int:
    """Export; returns the exit code."""
    parser = argparse.ArgumentParser(prog="pretraining/export.py", description=__doc__, formatter_class=Help)
    model_help = "run folder (its newest whole checkpoint), checkpoint folder or Hugging Face folder"
    parser.add_argument("model", type=Path, metavar="RUN_OR_CHECKPOINT", help=model_help)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where the files go")
    arguments = parser.parse_args(argv)
    export(arguments.model, arguments.output)
    print(f'next: python pretraining/fill_mask.py {arguments.output} "A sentence with a [MASK]."')
    return 0


def export(model: Path, output: Path) -> None:
    """Write `model` to the folder `output`, which is whole or not there.

    Raises:
        UserError: the model cannot be read, or `output` holds something else.
    """
    # It takes seconds: torch is imported.
    from safetensors import SafetensorError

    from pretraining.loading import load_pretrained

    pretrained = load_pretrained(model)
    partial = output.absolute().parent / f".{output.absolute().name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_files(pretrained, partial)
        placed = _place(partial, output)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{output}: it cannot be written ({error}); make room or choose another --output"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    done = "exported to" if placed else "is exported already, byte for byte, in"
    print(f"{pretrained.source} {done} {output}")


def _write_files(pretrained, folder: Path) -> None:
    from safetensors.torch import save_file

    from data_prep.huggingface_tokenizer import write_huggingface_tokenizer
    from data_prep.shards import sync, write_atomically
    from pretraining.huggingface import class_of, config_to_huggingface, to_huggingface

    config, state_dict = pretrained.config, pretrained.state_dict
    tokenizer = pretrained.open_tokenizer()
    write_huggingface_tokenizer(tokenizer, folder, max_length=config.max_position_embeddings)
    values = config_to_huggingface(config) | {
        "architectures": [class_of(state_dict)],
        "pad_token_id": tokenizer.pad_id,
        "dtype": "float32",
    }
    write_atomically(folder / "config.json", (json.dumps(values, indent=2) + "\n").encode())
    weights = folder / "model.safetensors"
    save_file(to_huggingface(state_dict, config), weights, metadata={"format": "pt"})
    sync(weights)
    sync(folder)


def _place(partial: Path, output: Path) -> bool:
    """Rename the finished folder; False if the same files are there already."""
    from data_prep.shards import file_sha256, sync

    if output.is_dir() and any(output.iterdir()):
        names = sorted(path.name for path in partial.iterdir())
        same_names = names == sorted(path.name for path in output.iterdir())
        if not same_names or any(file_sha256(output / name) != file_sha256(partial / name) for name in names):
            raise UserError(f"{output}: it holds something else; choose another --output or delete it first")
        return False
    partial.rename(output)
    sync(partial.parent)
    return True


if __name__ == "__main__":
    sys.exit(run_program(main))
