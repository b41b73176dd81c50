"""Schedules: tables worked out by hand, DeepSpeed's, torch's, transformers' and NVIDIA's own, and the JSON."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.errors import UserError
from pretraining.schedules import (
    SCHEDULES,
    ConstantSchedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupExponentialLR,
    WarmupLR,
    WarmupPolynomialLR,
    WarmupStableDecayLR,
    learning_rate,
    read_schedule,
    schedule_for,
)
from pretraining.strict_json import Errors

PEAK = 2e-3
WARMUP = {"warmup_num_steps": 10, "warmup_max_lr": PEAK}
NVIDIA = {"rebase": False, "degree": 0.5, "first_step": 1}
PHASE_1 = {"warmup_max_lr": 6e-3, "warmup_ratio": 0.2843, "total_num_steps": 7038}
PHASE_2 = {"warmup_max_lr": 4e-3, "warmup_ratio": 0.128, "total_num_steps": 1563}


def read(params: dict | None, kind: str | None = None, lr: float = PEAK):
    """What the JSON's scheduler becomes, the sentences about what is wrong, and the notes."""
    section = None if kind is None else {"type": kind} | ({} if params is None else {"params": params})
    errors, notes = Errors("ds.json", {}), []
    return read_schedule(section, lr, errors, notes), errors, notes


def schedule_of_theirs(make, steps: int) -> list[float]:
    """The rates that a torch scheduler sets for each of the first updates, as shares of the peak."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def shares(schedule, steps: int) -> list[float]:
    """Our rates for the same updates, as shares of the peak."""
    return [learning_rate(schedule, step) / schedule.warmup_max_lr for step in range(steps)]


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize("warmup_num_steps", [1, 2, 10])
@pytest.mark.parametrize("kind", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_rates_are_those_of_deepspeeds_scheduler(kind, warmup_num_steps, warmup_type):
    """At every step of the run and beyond its end the rate equals DeepSpeed's of the same name and options, however the
    length of the warm-up is written."""
    from deepspeed.runtime import lr_schedules

    options = {"warmup_num_steps": warmup_num_steps, "warmup_type": warmup_type}
    options |= {"total_num_steps": 40} if kind is not WarmupLR else {}
    options |= (
        {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.05}
        if kind is WarmupCosineLR
        else {"warmup_min_lr": 1e-4}
    )
    theirs_only = {} if kind is WarmupCosineLR else {"warmup_max_lr": PEAK}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    theirs = getattr(lr_schedules, kind.__name__)(optimizer, **options, **theirs_only)
    ours = [kind(**options, warmup_max_lr=PEAK)]
    if kind is not WarmupLR:
        ratio = {"warmup_num_steps": None, "warmup_ratio": warmup_num_steps / 40}
        ours.append(kind(**options | ratio, warmup_max_lr=PEAK))
    for step in range(50):
        theirs.step(step)
        expected = pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-15)
        assert [learning_rate(schedule, step) for schedule in ours] == [expected] * len(ours), step


POLYNOMIAL = WARMUP | {"total_num_steps": 110}
STABLE = WARMUP | {"total_num_steps": 100, "decay_num_steps": 20}
# Shares of the peak by applied updates: step 0, last and first around the end of the warm-up, last and beyond.
TABLES = {
    "constant": (ConstantSchedule(warmup_max_lr=PEAK), {0: 1.0, 1: 1.0, 10**6: 1.0}),
    "warm-up, log": (
        WarmupLR(**WARMUP),
        {0: 0.0, 1: 0.301029995663981, 4: 0.698970004336019, 9: 1.0, 10: 1.0, 10**6: 1.0},
    ),
    "linear": (
        WarmupDecayLR(**POLYNOMIAL, warmup_type="linear"),
        {0: 0.0, 1: 0.1, 5: 0.5, 9: 0.9, 10: 1.0, 60: 0.5, 109: 0.01, 110: 0.0, 500: 0.0},
    ),
    "cosine, a step ahead": (
        WarmupCosineLR(**WARMUP, warmup_type="linear", total_num_steps=40, cos_min_ratio=0.0),
        {0: 0.0, 9: 0.9, 10: 0.997260947684137, 24: 0.5, 39: 0.0, 40: 0.0, 500: 0.0},
    ),
    "polynomial, squares": (
        WarmupPolynomialLR(**POLYNOMIAL, degree=2),
        {0: 0.0, 9: 0.9, 10: 1.0, 60: 0.25, 100: 0.01, 109: 0.0001, 110: 0.0, 500: 0.0},
    ),
    "polynomial, root, to a tenth": (
        WarmupPolynomialLR(**POLYNOMIAL, degree=0.5, decay_min_ratio=0.1),
        {0: 0.0, 9: 0.9, 10: 1.0, 85: 0.55, 109: 0.19, 110: 0.1, 500: 0.1},
    ),
    "polynomial, numbered from one": (
        WarmupPolynomialLR(**POLYNOMIAL, first_step=1),
        {0: 0.1, 8: 0.9, 9: 1.0, 59: 0.5, 108: 0.01, 109: 0.0, 500: 0.0},
    ),
    "polynomial, the original BERT": (
        WarmupPolynomialLR(**WARMUP, total_num_steps=100, rebase=False),
        {0: 0.0, 9: 0.9, 10: 0.9, 11: 0.89, 50: 0.5, 99: 0.01, 100: 0.0, 500: 0.0},
    ),
    "DeepSpeed's phase 1": (
        WarmupExponentialLR(
            warmup_max_lr=11e-3,
            warmup_ratio=0.06,
            total_num_steps=7500,
            warmup_degree=2,
            decay_rate=0.9,
            decay_step=250,
            lr_offset=1e-3,
        ),
        {0: 1 / 11, 225: 3.75 / 11, 450: 12 / 11, 700: 10.9 / 11, 950: 9.91 / 11, 7500: 1 / 11 + 0.9**28.2},
    ),
    "NVIDIA's phase 1": (
        WarmupPolynomialLR(**NVIDIA, **PHASE_1),
        {
            0: 2.99864551182230986e-6 / 6e-3,
            1: 5.99729102364461973e-6 / 6e-3,
            1999: 5.99729102364461973e-3 / 6e-3,
            2000: 5.07589458936579387e-3 / 6e-3,
            3999: 3.94203525399431396e-3 / 6e-3,
            7036: 7.15198539852151555e-5 / 6e-3,
            7037: 0.0,
            7038: 0.0,
        },
    ),
    "NVIDIA's phase 2": (
        WarmupPolynomialLR(**NVIDIA, **PHASE_2),
        {
            0: 1.99936020473448496e-5 / 4e-3,
            199: 3.99872040946896993e-3 / 4e-3,
            200: 3.73395479700861494e-3 / 4e-3,
            999: 2.40068235128253421e-3 / 4e-3,
            1561: 1.01176698148538940e-4 / 4e-3,
            1562: 0.0,
            9999: 0.0,
        },
    ),
    "warm-up, stable, linear": (
        WarmupStableDecayLR(**STABLE),
        {0: 0.0, 5: 0.5, 9: 0.9, 10: 1.0, 80: 1.0, 81: 0.95, 90: 0.5, 99: 0.05, 100: 0.0, 500: 0.0},
    ),
    "warm-up, stable, 1-sqrt": (
        WarmupStableDecayLR(**STABLE, decay_type="1-sqrt", first_step=1),
        {0: 0.1, 9: 1.0, 79: 1.0, 80: 0.776393202250021, 84: 0.5, 98: 0.0253205655191037, 99: 0.0, 500: 0.0},
    ),
    "warm-up, stable, cosine to a tenth": (
        WarmupStableDecayLR(
            warmup_ratio=0.1,
            decay_ratio=0.2,
            total_num_steps=100,
            warmup_max_lr=PEAK,
            decay_type="cosine",
            decay_min_ratio=0.1,
        ),  # fmt: skip
        {0: 0.0, 9: 0.9, 10: 1.0, 80: 1.0, 85: 0.868198051533946, 90: 0.55, 100: 0.1, 500: 0.1},
    ),
}


@pytest.mark.parametrize(("schedule", "table"), TABLES.values(), ids=TABLES)
def test_rates_as_tables(schedule, table):
    """Each schedule at its edges and in between, as worked out by hand with 40 digits."""
    rates = {step: learning_rate(schedule, step) / schedule.warmup_max_lr for step in table}
    assert rates == pytest.approx(table, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("phase", [PHASE_1, PHASE_2])
def test_nvidias_recipe_at_every_step(phase):
    """Every rate of both phases is that of NVIDIA's schedulers.py (PolyWarmUpScheduler), which is stepped before each
    update and takes the optimizer's step + 1 as the number: 1 for the first."""
    schedule = WarmupPolynomialLR(**NVIDIA, **phase)
    lr, warmup, total = phase.values()
    for optimizer_step in range(total):
        progress = (optimizer_step + 1) / total
        expected = lr * progress / warmup if progress < warmup else lr * (1.0 - progress) ** 0.5
        assert learning_rate(schedule, optimizer_step) == pytest.approx(expected, rel=5e-16, abs=0)


@pytest.mark.parametrize("degree", [0.5, 1.0, 2.0])
def test_polynomials_are_those_of_torch_and_transformers(degree):
    """Not rebased it is torch's PolynomialLR after the warm-up, rebased it is transformers' at every step."""
    from transformers import get_polynomial_decay_schedule_with_warmup as theirs_rebased

    options = {"degree": degree, "total_num_steps": 60, "warmup_max_lr": PEAK, "warmup_num_steps": 7}
    expected = schedule_of_theirs(
        lambda optimizer: torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=60, power=degree), 70
    )
    ours = shares(WarmupPolynomialLR(**options, rebase=False), 70)
    assert ours[7:] == pytest.approx(expected[7:], rel=1e-10, abs=1e-12)
    expected = schedule_of_theirs(
        lambda optimizer: theirs_rebased(optimizer, 7, 60, lr_end=0.05, power=degree), 70
    )
    ours = shares(WarmupPolynomialLR(**options, decay_min_ratio=0.05), 70)
    assert ours == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("decay_type", ["linear", "1-sqrt", "cosine"])
def test_warmup_stable_decay_is_that_of_transformers(decay_type):
    """The three shapes equal transformers' get_wsd_schedule at every step and beyond the end."""
    from transformers import get_wsd_schedule

    expected = schedule_of_theirs(
        lambda optimizer: get_wsd_schedule(optimizer, 7, 20, 60, decay_type=decay_type), 70
    )
    lengths = {"warmup_num_steps": 7, "total_num_steps": 60, "decay_num_steps": 20}
    ours = WarmupStableDecayLR(**lengths, warmup_max_lr=PEAK, decay_type=decay_type)
    assert shares(ours, 70) == pytest.approx(expected, rel=1e-12, abs=1e-15)


kinds_and_options = st.sampled_from(
    [
        (WarmupDecayLR, {"warmup_type": "linear"}),
        (WarmupDecayLR, {"warmup_type": "log"}),
        (WarmupCosineLR, {"warmup_type": "linear", "cos_min_ratio": 0.0}),
        (WarmupPolynomialLR, {"degree": 0.5}),
        (WarmupPolynomialLR, {"degree": 3, "first_step": 1}),
        (WarmupStableDecayLR, {"decay_ratio": 0.2}),
        (WarmupStableDecayLR, {"decay_ratio": 0.5, "decay_type": "1-sqrt", "first_step": 1}),
        (WarmupStableDecayLR, {"decay_num_steps": 1, "decay_type": "cosine"}),
    ]
)


@settings(deadline=None, max_examples=50)
@given(kind_and_options=kinds_and_options, total=st.integers(3, 300), warmup=st.floats(0.01, 0.5))
def test_rates_rise_then_fall(kind_and_options, total, warmup):
    """Whatever the lengths: from 0 up to the peak, never up again, 0 at the end and beyond, and never outside."""
    kind, options = kind_and_options
    for length in ({"warmup_ratio": warmup}, {"warmup_num_steps": max(1, math.floor(warmup * total))}):
        schedule = kind(**options, **length, total_num_steps=total, warmup_max_lr=PEAK)
        rates = [learning_rate(schedule, number - schedule.first_step) for number in range(total + 3)]
        highest = rates.index(max(rates))
        assert rates[0] == 0 and rates[: highest + 1] == sorted(rates[: highest + 1])
        assert rates[highest:] == sorted(rates[highest:], reverse=True)
        assert all(0 <= rate <= PEAK for rate in rates)
        assert rates[total:] == [0, 0, 0]
        assert highest <= max(2, warmup * total) + 1


def test_a_share_is_that_of_the_decimals():
    """7 % of 100 steps are 7: in binary they would be a little more, and NVIDIA's peak a step too late."""
    assert 0.07 * 100 > 7
    schedule = WarmupPolynomialLR(**NVIDIA, warmup_max_lr=1.0, warmup_ratio=0.07, total_num_steps=100)
    assert learning_rate(schedule, 6) == pytest.approx(0.93**0.5, rel=1e-15)


def test_a_run_as_long_as_its_schedule_changes_nothing():
    """No --max_steps, or the schedule's own length, leaves it as it is, without a note."""
    for kind in (WarmupDecayLR, WarmupPolynomialLR):
        schedule = kind(**WARMUP, total_num_steps=100)
        assert schedule_for(schedule, None) == schedule_for(schedule, 100) == (schedule, None)
    for endless in (WarmupLR(**WARMUP), ConstantSchedule(warmup_max_lr=PEAK)):
        assert schedule_for(endless, 5) == schedule_for(endless, None) == (endless, None)


@pytest.mark.parametrize("kind", [WarmupDecayLR, WarmupPolynomialLR])
@pytest.mark.parametrize(
    ("max_steps", "warmup"),
    [(1_000, 10), (10_000, 100), (50, 1), (10, 1), (5_000_000, 10_000)],
)
def test_a_shorter_run_keeps_the_share_of_its_warm_up(kind, max_steps, warmup):
    """Shortened, the warm-up shrinks in proportion; lengthened, it stays; the decay ends with the run and it is said."""
    paper = kind(warmup_num_steps=10_000, warmup_type="linear", warmup_max_lr=1e-4, total_num_steps=1_000_000)
    fitted, note = schedule_for(paper, max_steps)
    assert (fitted.total_num_steps, fitted.warmup_num_steps) == (max_steps, warmup)
    assert learning_rate(fitted, max_steps) == 0.0
    assert max(learning_rate(fitted, step) for step in range(min(max_steps, 20_000))) == pytest.approx(1e-4)
    assert str(max_steps) in note
    assert "1000000" in note
    shortest = 2 if kind is WarmupDecayLR else 1  # DeepSpeed's
    assert f"the warm-up is {max(shortest, warmup)} steps (written: 10000)" in note


@pytest.mark.parametrize(
    ("lengths", "max_steps", "warmup", "decay", "note"),
    [
        ((10, None, 20, None), 50, 5, 10, "the warm-up is 5 steps (written: 10), the decay 10 steps (written: 20)"),
        ((10, None, 20, None), 400, 10, 20, "the warm-up is 10 steps (written: 10), the decay 20 steps (written: 20)"),
        ((None, 0.1, None, 0.25), 50, 5, 12.5, "5 steps (written: 0.1 of the run), the decay 12.5 steps (written: 0.25"),
        ((None, 0.1, None, 0.25), 400, 40, 100, "is 40 steps (written: 0.1 of the run), the decay 100 steps"),
        ((30, None, 70, None), 5, 2, 4, "the warm-up is 2 steps (written: 30), the decay 4 steps (written: 70)"),
        ((10, None, 90, None), 1, 1, 1, "the warm-up is 1 steps (written: 10), the decay 1 steps (written: 90)"),
    ],
)  # fmt: skip
def test_a_shorter_run_keeps_the_share_of_its_last_decay(lengths, max_steps, warmup, decay, note):
    """Steps shrink and never grow, shares stay shares; rounded lengths that overlap still rise to the peak and fall."""
    names = ("warmup_num_steps", "warmup_ratio", "decay_num_steps", "decay_ratio")
    written = dict(zip(names, lengths, strict=True))
    schedule = WarmupStableDecayLR(**written, total_num_steps=100, warmup_max_lr=PEAK)
    fitted, said = schedule_for(schedule, max_steps)
    assert note in said and f"--max_steps {max_steps} replaces total_num_steps 100" in said
    assert learning_rate(fitted, warmup) == (PEAK if max_steps > 1 else 0)
    middle = max(warmup, math.floor(max_steps - decay))
    rates = [learning_rate(fitted, step) for step in range(max_steps + 2)]
    assert all(rate == PEAK for rate in rates[warmup:middle])
    assert rates[middle:] == sorted(rates[middle:], reverse=True)
    assert rates[max_steps:] == [0, 0]
    if max_steps - decay > warmup:
        assert rates[math.ceil(max_steps - decay) + 1] < PEAK == rates[math.ceil(max_steps - decay) - 1]


def test_a_decay_without_an_end_is_refused():
    """Neither total_num_steps nor --max_steps, or no room for the warm-up or the decay, is a sentence to the user."""
    schedule = WarmupCosineLR(**WARMUP)
    with pytest.raises(UserError, match="total_num_steps is absent"):
        schedule_for(schedule, None)
    with pytest.raises(
        UserError, match=r"warmup_num_steps is 10 but --max_steps is 10: write less, or total_num"
    ):
        schedule_for(schedule, 10)
    fitted, note = schedule_for(schedule, 11)
    assert (fitted.total_num_steps, fitted.warmup_num_steps, note) == (11, 10, None)
    stable = WarmupStableDecayLR(**WARMUP, decay_num_steps=20)
    message = "decay_num_steps is 20 but --max_steps is 29, of which the warm-up leaves 19 steps: write less"
    with pytest.raises(UserError, match=message):
        schedule_for(stable, 29)
    assert schedule_for(stable, 30)[0].total_num_steps == 30
    with pytest.raises(ValueError, match="schedule_for"):
        learning_rate(stable, 0)


MINIMAL = {
    "WarmupLR": {},
    "WarmupDecayLR": {"total_num_steps": 2000},
    "WarmupCosineLR": {"total_num_steps": 2000},
    "WarmupPolynomialLR": {"total_num_steps": 2000, "warmup_ratio": 0.1},
    "WarmupExponentialLR": {
        "total_num_steps": 2000,
        "warmup_ratio": 0.1,
        "decay_rate": 0.9,
        "decay_step": 250,
    },
    "WarmupStableDecayLR": {"total_num_steps": 2000, "warmup_num_steps": 9, "decay_ratio": 0.5},
}


def test_the_peak_is_the_optimizers_rate():
    """Of each type, with nothing but lengths written, the highest rate is the optimizer's lr; DeepSpeed's WarmupDecayLR
    would take its own default, 0.001, and that it is not taken is said."""
    from deepspeed.runtime import lr_schedules

    assert MINIMAL.keys() == SCHEDULES.keys()
    for kind, params in MINIMAL.items():
        for lr in (3e-4, 1e-3, 11e-3):
            schedule, errors, notes = read(params, kind, lr)
            assert errors == [] and type(schedule) is SCHEDULES[kind]
            assert max(learning_rate(schedule, step) for step in range(2000)) == pytest.approx(lr, rel=1e-3)
            assert read(params | {"warmup_max_lr": lr}, kind, lr)[0] == schedule
            assert bool(notes) == (kind == "WarmupDecayLR" and lr != 1e-3)
            assert all("0.001" in note for note in notes)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=11e-3)
    theirs = lr_schedules.WarmupDecayLR(optimizer, total_num_steps=2000)
    theirs.step(1000)
    assert theirs.get_last_lr() == [1e-3]
    assert read(None)[0] == ConstantSchedule(warmup_max_lr=PEAK)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_another_peak_is_refused(kind):
    """warmup_max_lr may repeat the optimizer's lr but not contradict it."""
    _, errors, _ = read(MINIMAL[kind] | {"warmup_max_lr": 1e-3}, kind, 1e-4)
    (sentence,) = errors
    assert '"scheduler.params.warmup_max_lr" is 0.001 but "optimizer.params.lr" is 0.0001' in sentence


def test_deepspeeds_default_warm_up_is_taken_for_its_types_only():
    """1,000 steps where DeepSpeed's types say nothing; our own ask."""
    assert read({}, "WarmupLR")[0].warmup_num_steps == 1000
    assert read({"warmup_ratio": 0.1}, "WarmupDecayLR")[0].warmup_num_steps is None
    _, errors, _ = read({"total_num_steps": 900}, "WarmupDecayLR")
    assert errors == [
        'ds.json: "scheduler.params": warmup_num_steps is 1000 but total_num_steps is 900; write less'
    ]


P, E, S = "WarmupPolynomialLR", "WarmupExponentialLR", "WarmupStableDecayLR"
BAD = [
    ("OneCycle", {}, '"scheduler.type" is "OneCycle"; it should be \'WarmupLR\', \'WarmupDecayLR\''),
    ("LRRangeTest", {}, '"scheduler.type" is "LRRangeTest"; it should be'),
    (P, {}, 'has neither "warmup_num_steps" nor "warmup_ratio"; write one'),
    (P, {"warmup_num_steps": 5, "warmup_ratio": 0.1}, '"scheduler.params.warmup_num_steps" and "warmup_ratio" are both'),
    ("WarmupDecayLR", {"warmup_num_steps": 5, "warmup_ratio": 0.1}, "are both given; write one of them"),
    ("WarmupLR", {"warmup_ratio": 0.1}, '"scheduler.params.warmup_ratio" is 0.1; it belongs to another type'),
    ("WarmupLR", {"total_num_steps": 5}, '"scheduler.params.total_num_steps" is 5; it belongs to another type'),
    (P, {"warmup_ratio": 0.0}, '"scheduler.params.warmup_ratio" is 0.0; it should be greater than 0'),
    (P, {"warmup_ratio": 1}, '"scheduler.params.warmup_ratio" is 1; it should be less than 1'),
    (P, {"warmup_ratio": 28.43}, '"scheduler.params.warmup_ratio" is 28.43; it should be less than 1'),
    (P, {"warmup_ratio": "0.1"}, '"scheduler.params.warmup_ratio" is "0.1"; it should be a valid number'),
    (P, {"warmup_num_steps": 0}, '"scheduler.params.warmup_num_steps" is 0; it should be greater than 0'),
    (P, {"warmup_num_steps": 9, "total_num_steps": 9}, "warmup_num_steps is 9 but total_num_steps is 9; write less"),
    (P, {"warmup_ratio": 0.1, "degree": 0}, '"scheduler.params.degree" is 0; it should be greater than 0'),
    (P, {"warmup_ratio": 0.1, "power": 1}, '"scheduler.params.power" is unknown'),
    (P, {"warmup_ratio": 0.1, "warmup_type": "log"}, '"scheduler.params.warmup_type" is "log"; it should be \'linear\''),
    (P, {"warmup_ratio": 0.1, "first_step": 2}, '"scheduler.params.first_step" is 2; it should be 0 or 1'),
    ("WarmupDecayLR", {"warmup_num_steps": 5, "first_step": 1}, '"scheduler.params.first_step" is 1; it should be 0'),
    (P, {"warmup_ratio": 0.1, "rebase": "no"}, '"scheduler.params.rebase" is "no"; it should be a valid boolean'),
    (P, {"warmup_ratio": 0.1, "decay_ratio": 0.1}, '"scheduler.params.decay_ratio" is unknown'),
    (P, {"warmup_ratio": 0.1, "decay_min_ratio": 1.0}, '"scheduler.params.decay_min_ratio" is 1.0; it should be less'),
    (E, {"warmup_ratio": 0.1, "decay_step": 9}, '"scheduler.params.decay_rate" is missing'),
    (E, {"warmup_ratio": 0.1, "decay_rate": 0.9}, '"scheduler.params.decay_step" is missing'),
    (E, {"warmup_ratio": 0.1, "decay_rate": 1.1, "decay_step": 9}, '"scheduler.params.decay_rate" is 1.1'),
    (E, {"warmup_ratio": 0.1, "total_num_steps": 10**400, "decay_rate": 0.9, "decay_step": 9}, "it should be less than"),
    (E, {"decay_rate": 0.9, "decay_step": 9}, 'has neither "warmup_num_steps" nor "warmup_ratio"'),
    (S, {"warmup_ratio": 0.1}, 'has neither "decay_num_steps" nor "decay_ratio"'),
    (S, {"warmup_ratio": 0.1, "decay_ratio": 0.1, "decay_num_steps": 3}, '"decay_ratio" are both given'),
    (S, {"warmup_ratio": 0.1, "decay_ratio": 1.5}, '"scheduler.params.decay_ratio" is 1.5; it should be less than 1'),
    (S, {"warmup_ratio": 0.1, "decay_ratio": 0.1, "decay_type": "sqrt"}, "is \"sqrt\"; it should be 'linear', '1-sqrt'"),
    (
        S,
        {"warmup_num_steps": 30, "decay_num_steps": 71, "total_num_steps": 100},
        "decay_num_steps is 71 but total_num_steps is 100, of which the warm-up leaves 70 steps; write less",
    ),
    (
        S,
        {"warmup_ratio": 0.25, "decay_ratio": 0.8, "total_num_steps": 10},
        "decay_ratio is 0.8 but total_num_steps is 10, of which the warm-up leaves 7.5 steps; write less",
    ),
    ("WarmupLR", {"warmup_min_lr": 0.1}, '"scheduler.params.warmup_min_lr" is 0.1, above "optimizer.params.lr" 0.002'),
    ("WarmupCosineLR", {"cos_min_ratio": 1.5}, '"scheduler.params.cos_min_ratio" is 1.5; it should be less than or'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "params", "message"), BAD)
def test_what_is_wrong_is_said_in_one_sentence(kind, params, message):
    """Each mistake alone is one sentence with the key, what was found and what to do."""
    _, errors, _ = read(params, kind)
    (sentence,) = errors
    assert message in sentence and sentence.startswith("ds.json: ")


def test_mistakes_are_still_found_without_an_optimizer():
    """A wrong optimizer section hides no mistake of the scheduler's, and adds none."""
    assert read({}, P, None)[1] == read({}, P)[1] != []
    schedule, errors, notes = read(MINIMAL[P], P, None)
    assert (schedule, errors, notes) == (None, [], [])
