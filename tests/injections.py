"""What tests do to ranks from inside, before the program starts: trouble at given positions of the data."""

import functools
import json
import os
import time
from pathlib import Path

import torch


def on(rank: int) -> bool:
    """Whether this process is that rank."""
    return int(os.environ["RANK"]) == rank


def _holds(share, position: int) -> bool:
    return any(start <= position < stop for start, stop in share.ranges)


def scale_losses(factors: dict[int, float], rank: int) -> None:
    """Multiply the loss of the global batches that hold these positions, on one rank only; its gradients follow."""
    from pretraining.trainer import Trainer

    original = Trainer._forward_backward

    def forward_backward(self, share, global_masked):
        factor = [factor for position, factor in factors.items() if _holds(share, position)]
        if not factor or not on(rank):
            return original(self, share, global_masked)
        hook = self.engine.module.register_forward_hook(
            lambda module, inputs, output: output._replace(
                masked_lm_loss_sum=output.masked_lm_loss_sum * factor[0]
            )
        )
        try:
            return original(self, share, global_masked)
        finally:
            hook.remove()

    Trainer._forward_backward = forward_backward


def poison_weights(position: int, rank: int) -> None:
    """The update of the global batch that holds this position leaves a NaN in one rank's weights and parameters."""
    from pretraining.trainer import Trainer

    original = Trainer.train_step

    def train_step(self, share):
        done = original(self, share)
        if done and _holds(share, position) and on(rank):
            with torch.no_grad():
                self.engine.optimizer.single_partition_of_fp32_groups[0][7] = float("nan")
                next(self.engine.module.parameters())[1, 1] = float("nan")
        return done

    Trainer.train_step = train_step


def skip_from_the_start(skipped_ranges: list[tuple[int, int]]) -> None:
    """A run that has nothing yet is told to leave these positions out."""
    from pretraining import launch

    launch.TrainState = functools.partial(launch.TrainState, skipped_ranges=skipped_ranges)


def allow_fp16() -> None:
    """Let DeepSpeed train in fp16 on a processor, with its real loss scaler."""
    from pretraining.distributed import import_deepspeed

    import_deepspeed().accelerator.get_accelerator().is_fp16_supported = lambda: True


def tiny_in_fp16(infinite: dict[int, int]) -> None:
    """fp16 on a processor, which is slow at it: "tiny" is made smaller.

    The loss of the global batch that holds a position is infinite on its rank of `infinite`, and on no other.
    """
    from pretraining import model

    allow_fp16()
    model.PRESETS["tiny"] = (1, 16, 2)
    for position, rank in infinite.items():
        scale_losses({position: float("inf")}, rank)


def small_spikes() -> None:
    """Two losses after three are enough for a spike."""
    from pretraining import trouble

    trouble.SPIKE_WINDOW, trouble.SPIKE_STEPS = 3, 2


def each(*prepare) -> None:
    """All of them, one after the other."""
    for one in prepare:
        one()


def work_in(folders: list[Path]) -> None:
    """Each rank has a working folder of its own, as on nodes with disks of their own."""
    os.chdir(folders[int(os.environ["RANK"])])


def dump_at_start(folder: Path) -> None:
    """Keep what this rank's optimizer holds before the first step."""
    from pretraining.trainer import Trainer

    original = Trainer.run

    def run(self, batches):
        zero = self.engine.optimizer
        folder.mkdir(exist_ok=True)
        content = {"optimizer_state_dict": zero.state_dict()}
        torch.save(content, folder / f"zero_pp_rank_{self.world.rank}_mp_rank_00_optim_states.pt")
        return original(self, batches)

    Trainer.run = run


def watch_steps(folder: Path) -> None:
    """Write down what each step of each rank took: seconds, and the most memory until its update, in MB.

    The gradient that the first update sees, whole and before it is clipped, is kept too.
    """
    from deepspeed.utils import safe_get_full_grad

    from pretraining.trainer import Trainer

    original, steps = Trainer.train_step, []

    def train_step(self, share):
        update = self.engine.step
        started = time.monotonic()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here

        def step():
            steps.append({"seconds": time.monotonic() - started, "peak": _peak_memory()})
            gradients = {name: safe_get_full_grad(p) for name, p in self.engine.module.named_parameters()}
            (folder / f"rank-{self.world.rank}.json").write_text(json.dumps(steps))
            if len(steps) == 1 and self.world.rank == 0:
                torch.save(gradients, folder / "gradients.pt")
            return update()

        self.engine.step = step
        try:
            return original(self, share)
        finally:
            self.engine.step = update

    Trainer.train_step = train_step


def _peak_memory() -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) / 1024
