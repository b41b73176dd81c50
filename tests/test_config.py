"""The DeepSpeed JSON: what is read, what is refused and how, and what a machine makes of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.errors import UserError
from pretraining.config import lower, read_deepspeed_json
from pretraining.distributed import Capabilities
from pretraining.schedules import learning_rate, schedule_for

CONFIGS = sorted((Path(__file__).resolve().parent.parent / "ds_configs").glob("*.json"))
PLAIN_CPU = Capabilities(bf16=None, fp16=False)
BF16_CPU = Capabilities(bf16="avx512_bf16", fp16=False)
GPU = Capabilities(bf16="bf16 tensor cores", fp16=True)
OLD_GPU = Capabilities(bf16=None, fp16=True)


def document(**changes) -> dict:
    """A right document; a keyword replaces a top-level key, None removes it."""
    base = {
        "train_batch_size": 256,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    return {key: value for key, value in (base | changes).items() if value is not None}


@pytest.fixture
def read(tmp_path):
    """Write a document (or text) to a file and read it."""

    def read_document(content: dict | str):
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return read_deepspeed_json(path)

    return read_document


@pytest.fixture
def errors_of(read):
    """The sentences of the one UserError that a document raises."""

    def sentences(content: dict | str) -> list[str]:
        with pytest.raises(UserError) as caught:
            read(content)
        return str(caught.value).split("\n")

    return sentences


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
@pytest.mark.parametrize(
    ("device", "capabilities", "world_size"),
    [
        ("cpu", PLAIN_CPU, 1),
        ("cpu", BF16_CPU, 1),
        ("cpu", PLAIN_CPU, 2),
        ("cuda", GPU, 8),
        ("cuda", OLD_GPU, 8),
    ],
)
def test_every_shipped_config_lowers_to_what_deepspeed_accepts(path, device, capabilities, world_size):
    """Each JSON in ds_configs can be trained on a laptop, on two ranks and on eight GPUs."""
    from deepspeed.runtime.config import DeepSpeedConfig

    lowered = lower(
        read_deepspeed_json(path), world_size=world_size, device=device, capabilities=capabilities
    )
    engine_config = lowered.engine_config
    assert json.loads(json.dumps(engine_config)) == engine_config
    assert not {"optimizer", "scheduler"} & engine_config.keys()
    # DeepSpeed takes the world to be 1 where nothing is initialised.
    parsed = DeepSpeedConfig(engine_config | {"train_batch_size": lowered.micro_batch_size})
    assert parsed.gradient_accumulation_steps == 1
    assert parsed.gradient_clipping == lowered.gradient_clipping
    assert engine_config["train_batch_size"] == lowered.micro_batch_size * world_size
    assert parsed.float16_config.enabled == (lowered.precision == "fp16")
    assert parsed.bfloat16_config.enabled == (lowered.precision == "bf16")


def test_zero2_is_the_paper():
    """ds_configs/zero2.json trains BERT's batch, rates and schedule, in fp16 under ZeRO-2."""
    (path,) = [path for path in CONFIGS if path.name == "zero2.json"]
    settings = read_deepspeed_json(path)
    assert (settings.train_batch_size, settings.precision) == (256, "fp16")
    optimizer, schedule = settings.optimizer, settings.schedule
    assert (optimizer.lr, optimizer.betas, optimizer.eps) == (1e-4, [0.9, 0.999], 1e-6)
    assert (optimizer.weight_decay, settings.gradient_clipping) == (0.01, 1.0)
    assert (schedule.warmup_num_steps, schedule.total_num_steps, schedule.warmup_type) == (
        10_000,
        1_000_000,
        "linear",
    )
    assert settings.notes == ()


RECIPES = {  # batch, algorithm, lr, clipping; rates of some updates, of papers and published scripts
    "large_lamb_phase1": (
        65_536,
        "Lamb",
        6e-3,
        1.0,
        {0: 2.99864551e-6, 1999: 5.99729102e-3, 2000: 5.07589459e-3, 7037: 0},
    ),
    "large_lamb_phase2": (32_768, "Lamb", 4e-3, 1.0, {0: 1.99936020e-5, 199: 3.99872041e-3, 1562: 0}),
    "large_lamb_clamped_phase1": (
        65_536,
        "Lamb",
        11e-3,
        1.0,
        {0: 1e-3, 225: 3.75e-3, 450: 12e-3, 950: 9.91e-3},
    ),
    "large_lamb_clamped_phase2": (32_768, "Lamb", 2e-3, 1.0, {0: 0, 75: 0.5e-3, 150: 2e-3, 300: 1.8e-3}),
    "base_adam": (256, "AdamW", 1e-4, 1.0, {0: 0, 5_000: 5e-5, 10_000: 9.9e-5, 999_999: 1e-10}),
    "large_24h_adam": (4_096, "AdamW", 1e-3, 0.0, {0: 0, 30: 5e-4, 60: 1e-3, 530: 5e-4}),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_the_published_ones(repository, name):
    """Batch, rate, clipping and the schedule's values of each published recipe; LAMB's two ways differ as published."""
    batch, algorithm, lr, clipping, rates = RECIPES[name]
    recipe = read_deepspeed_json(repository / "ds_configs" / f"{name}.json")
    optimizer = recipe.optimizer
    assert (recipe.train_batch_size, recipe.gradient_clipping) == (batch, clipping)
    assert (optimizer.algorithm, optimizer.lr, optimizer.weight_decay) == (algorithm, lr, 0.01)
    schedule, _ = schedule_for(recipe.schedule, recipe.schedule.total_num_steps or 1000)
    found = {step: learning_rate(schedule, step) for step in rates}
    assert found == pytest.approx(rates, rel=1e-8, abs=1e-15)
    if algorithm == "Lamb":
        is_clamped = "clamped" in name
        assert optimizer.trust_ratio_clamp == ([0.01, 0.3] if is_clamped else None)
        assert optimizer.bias_correction is not is_clamped
        assert optimizer.layer_adaptation_for_no_decay is is_clamped


def test_all_errors_come_at_once(errors_of):
    """Mistakes at all levels are reported in one message, each with file, key, what was found and what to do."""
    bad = {
        "train_batch_size": 0,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clip": 1.0,
        "amp": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lrr": 1, "betas": [0.9, 2], "weight_decay": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_steps": 3, "warmup_type": "cubic"}},
        "zero_optimization": {
            "stage": 3,
            "overlap_com": True,
            "offload_optimizer": {"devise": "cpu"},
            "load_from_fp32_weights": False,
        },
        "fp16": {"enabled": True, "loss_scale_window": 0},
        "bf16": {"enabled": True, "check_grad_overflow": False},
    }
    sentences = errors_of(bad)
    expected = [
        ('"train_batch_size" is 0', "greater than 0"),
        ('"train_micro_batch_size_per_gpu" is "auto"', "write a value"),
        ('"gradient_clip" is unknown', '"gradient_clipping"'),
        ('"amp" is not supported', "fp16"),
        ('"optimizer.params.lr" is missing', "write it"),
        ('"optimizer.params.lrr" is unknown', '"lr"'),
        ('"optimizer.params.betas.1" is 2', "less than 1"),
        ('"optimizer.params.weight_decay" is true', "number"),
        ('"scheduler.params.warmup_steps" is unknown', '"warmup_num_steps"'),
        ('"scheduler.params.warmup_type" is "cubic"', "'log' or 'linear'"),
        ('"zero_optimization.stage" is 3', "write 2"),
        ('"zero_optimization.overlap_com" is unknown', '"overlap_comm"'),
        ('"zero_optimization.offload_optimizer.devise" is unknown', '"device"'),
        ('"zero_optimization.load_from_fp32_weights" is false', "a resumed run needs it"),
        ('"fp16" is', "loss_scale_window must be > 0"),
        ('"bf16.check_grad_overflow" is false', "leave it out"),
        ('"fp16" and "bf16" are both enabled', "in one of them"),
    ]
    for found, advice in expected:
        assert any(found in sentence and advice in sentence for sentence in sentences), (found, sentences)
    assert len(sentences) == len(expected)
    assert all("ds.json: " in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"a": 1,\n  "b": {"c": 1, "c": 2}}',
            '"c" stands twice in the object that begins at line 2, column 8',
        ),
        ('{"a": 1,\n "b": 2,\n}', "a comma without a successor at line 2, column 8"),
        ('{\n "a": [1, 2,]}', "a comma without a successor at line 2, column 12"),
        ('{"a" 1}', "not valid JSON at line 1, column 6"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("[1]", "expected an object"),
        ("", "the file is empty"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_not_json_is_found_by_line_and_column(errors_of, text, message):
    """DeepSpeed's own reader takes comments and trailing commas; here the place of each fault is named."""
    assert message in errors_of(text)[0]


def test_a_file_that_is_not_there_is_a_user_error(tmp_path):
    """A misspelt path gives a sentence, not a traceback."""
    with pytest.raises(UserError, match=r"nothing\.json: cannot be read"):
        read_deepspeed_json(tmp_path / "nothing.json")


def test_every_feature_that_deepspeed_removed_is_refused_with_a_reason(errors_of):
    """No key that DeepSpeed would stop at, half-way through start-up, is called unknown or let through."""
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS as REMOVED

    sentences = errors_of(document(**{key: {"enabled": True} for key in REMOVED}))
    for key in REMOVED:
        assert any(f'"{key}" is not supported: ' in sentence for sentence in sentences), key


@pytest.mark.parametrize("name", ["zero_optimization", "fp16", "bf16"])
def test_no_key_of_deepspeeds_own_sections_is_unknown(read, name):
    """DeepSpeed's defaults, written out, are accepted or refused by name, never called unknown."""
    import deepspeed.runtime.precision_config as precision
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    schemas = {"fp16": precision.DeepSpeedFP16Config, "bf16": precision.DeepSpeedBF16Config}
    schema = schemas.get(name, DeepSpeedZeroConfig)
    section = {key: field.default for key, field in schema.model_fields.items() if key != "leaf_module"}
    section |= {"stage": 2, "overlap_comm": True} if name == "zero_optimization" else {"enabled": True}
    assert read(document(**{name: section})).sections[name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hysteresis": 0}, '"fp16.hysteresis" is 0, with which the loss scale never falls; write 1'),
        ({"hysteresis": 1}, None),
        ({"initial_scale_power": 3, "min_loss_scale": 8}, None),
        ({"initial_scale_power": 3, "min_loss_scale": 9}, '2^3, is not between "fp16.min_loss_scale" 9 and'),
        ({"initial_scale_power": -1}, "2^-1, is not between"),
        ({"initial_scale_power": 2000}, "2^2000, is not between"),
        ({"initial_scale_power": 2000, "hysteresis": 0, "loss_scale": 128}, None),
        ({"initial_scale_power": 2000, "hysteresis": 0, "enabled": False}, None),
    ],
)
def test_a_loss_scale_that_cannot_work_is_refused(read, errors_of, changes, message):
    """What DeepSpeed takes and then overflows for ever or stops with a traceback; only where scaling is dynamic."""
    content = document(fp16={"enabled": True} | changes)
    if message is None:
        assert read(content)
    else:
        (sentence,) = errors_of(content)
        assert message in sentence


def test_what_is_switched_off_asks_for_nothing(read):
    """Leftovers such as "tensorboard": {"enabled": false} are no reason to stop."""
    settings = read(
        document(tensorboard={"enabled": False}, prescale_gradients=False, fp16={"enabled": False})
    )
    assert settings.precision == "fp32"
    assert settings.sections.keys() == {"zero_optimization"}


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "world_size", "expected"),
    [
        (256, 32, None, 1, (256, 32, 8)),
        (256, 32, None, 3, (256, 32, 3)),  # shares of 86, 85, 85
        (256, 32, 8, 1, (256, 32, 8)),
        (256, None, None, 1, (256, 32, 8)),
        (256, None, 2, 4, (256, 32, 2)),
        (None, 16, 4, 2, (128, 16, 4)),
        (None, 16, None, 2, (32, 16, 1)),
        (4, None, None, 3, (4, 2, 1)),
        (4, 1, None, 3, (4, 1, 2)),
        (8, 64, None, 2, (8, 4, 1)),  # a micro-batch is never larger than the share
    ],
)
def test_batch_triangle(read, train, micro, accumulation, world_size, expected):
    """Any of the three may be absent; without accumulation the batch need not divide by ranks or micro-batches."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch = dict(zip(names, (train, micro, accumulation), strict=True))
    lowered = lower(read(document(**batch)), world_size=world_size, device="cpu", capabilities=PLAIN_CPU)
    assert (lowered.train_batch_size, lowered.micro_batch_size, lowered.max_micro_steps) == expected
    assert lowered.engine_config["gradient_accumulation_steps"] == 1


@settings(deadline=None)
@given(
    train=st.integers(1, 5000),
    micro=st.one_of(st.none(), st.integers(1, 300)),
    world_size=st.integers(1, 64),
    seq_len=st.integers(5, 512),
    longest_fit=st.one_of(st.none(), st.integers(1, 64)),
)
def test_the_micro_steps_are_just_enough(tmp_path_factory, train, micro, world_size, seq_len, longest_fit):
    """On any number of ranks the largest share, all instances as long as may be, fits into max_micro_steps micro-batches
    and not into one less; without a bound in instances a token budget is the only one."""
    if train < world_size:
        return
    budget = longest_fit and longest_fit * seq_len + seq_len // 2
    path = tmp_path_factory.getbasetemp() / "triangle.json"
    path.write_text(json.dumps(document(train_batch_size=train, train_micro_batch_size_per_gpu=micro)))
    lowered = lower(
        read_deepspeed_json(path),
        world_size=world_size,
        device="cpu",
        capabilities=PLAIN_CPU,
        seq_len=seq_len,
        micro_batch_tokens=budget,
    )
    largest = max(len(range(rank, train, world_size)) for rank in range(world_size))
    full = min(lowered.micro_batch_size, longest_fit or largest)
    assert (lowered.max_micro_steps - 1) * full < largest <= lowered.max_micro_steps * full
    assert lowered.micro_batch_size == min(largest, micro or (largest if budget else 32))
    assert lowered.micro_batch_tokens == budget


def lowering_error(settings, **machine) -> str:
    with pytest.raises(UserError) as caught:
        lower(settings, **machine)
    return str(caught.value)


def test_a_triangle_that_does_not_close_names_the_numbers_and_two_ways_out(read):
    """256 is not 32 × 2 × 2: all four numbers are there, and both repairs."""
    settings = read(document(train_micro_batch_size_per_gpu=32, gradient_accumulation_steps=2))
    message = lowering_error(settings, world_size=2, device="cpu", capabilities=PLAIN_CPU)
    for part in (
        "256",
        "32 ×",
        "2 × 2 ranks",
        "= 128",
        "leave gradient_accumulation_steps out",
        "write train_batch_size 128",
    ):
        assert part in message


def test_machine_errors_also_come_at_once(read):
    """Too many ranks and a GPU without bf16 are two sentences of one message."""
    settings = read(document(train_batch_size=4, bf16={"enabled": True}))
    message = lowering_error(settings, world_size=8, device="cuda", capabilities=OLD_GPU)
    assert "more ranks than instances" in message
    assert "this GPU has none" in message


@pytest.mark.parametrize(
    ("asked", "device", "capabilities", "precision", "note"),
    [
        ("fp16", "cuda", GPU, "fp16", None),
        ("fp16", "cpu", BF16_CPU, "bf16", "bf16 in hardware (avx512_bf16)"),
        ("fp16", "cpu", PLAIN_CPU, "fp32", "neither fp16 nor bf16"),
        ("fp16", "cpu", Capabilities("amx_bf16", True), "fp16", None),
        ("bf16", "cpu", BF16_CPU, "bf16", None),
        ("bf16", "cpu", PLAIN_CPU, "bf16", "emulates it"),
        (None, "cuda", GPU, "fp32", None),
    ],
)
def test_the_precision_is_what_the_machine_has(read, asked, device, capabilities, precision, note):
    """fp16 gives way to what the processor computes in hardware, and every replacement is said."""
    settings = read(document(communication_data_type="fp16", **({asked: {"enabled": True}} if asked else {})))
    lowered = lower(settings, world_size=2, device=device, capabilities=capabilities)
    assert lowered.precision == precision
    assert {name for name in ("fp16", "bf16") if name in lowered.engine_config} == {precision} - {"fp32"}
    assert any(note in text for text in lowered.replacements) if note else lowered.replacements == []
    replaced = precision != (asked or "fp32")
    assert ("communication_data_type" in lowered.engine_config) != replaced


def test_stage_1_with_low_precision_and_grad_accum_dtype_is_refused(read):
    """DeepSpeed would switch to another optimizer class without a word; stage 2 and fp32 are fine."""
    sections = {"data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": True}}
    settings = read(document(zero_optimization={"stage": 1}, **sections))
    message = lowering_error(settings, world_size=1, device="cpu", capabilities=BF16_CPU)
    assert "grad_accum_dtype" in message
    for allowed in (
        document(**sections),
        document(zero_optimization={"stage": 1}, data_types=sections["data_types"]),
    ):
        lowered = lower(read(allowed), world_size=1, device="cpu", capabilities=BF16_CPU)
        assert lowered.engine_config["data_types"] == {"grad_accum_dtype": "fp32"}


def test_offload_runs_the_optimizer_on_the_cpu(read, errors_of):
    """Offload works with an optimizer of ours only if DeepSpeed is told so, and the update then is the CPU's."""
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert '"zero_force_ds_cpu_optimizer": false' in errors_of(document(zero_optimization=offload))[0]
    settings = read(document(zero_optimization=offload, zero_force_ds_cpu_optimizer=False))
    lowered = lower(settings, world_size=2, device="cuda", capabilities=GPU)
    assert lowered.optimizer_device == "cpu"
    assert lowered.engine_config["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize("zero", [{"stage": 0}, None, {"stage": 0, "overlap_comm": True}])
def test_stage_0_is_a_whole_optimizer_in_fp32(read, errors_of, zero):
    """Stage 0, written or by a missing section, trains in fp32; DeepSpeed does not clip there, and what it cannot use is said."""
    settings = read(document(zero_optimization=zero, gradient_clipping=0.5, fp16={"enabled": False}))
    lowered = lower(settings, world_size=2, device="cpu", capabilities=PLAIN_CPU)
    assert lowered.engine_config["zero_optimization"] == {"stage": 0}
    assert lowered.engine_config["gradient_clipping"] == 0.0 and lowered.gradient_clipping == 0.5
    unused = [note for note in settings.notes if "overlap_comm" in note]
    assert len(unused) == (zero is not None and len(zero) > 1)
    assert any("not in the file" in note for note in settings.notes) == (zero is None)
    for name in ("fp16", "bf16"):  # fp16 is refused on this machine too, which would train it in fp32
        (sentence,) = errors_of(document(zero_optimization=zero, **{name: {"enabled": True}}))
        assert '"zero_optimization.stage" is 0' in sentence and "other optimizer classes" in sentence
        assert f"write 1 or 2, or leave {name} out" in sentence


def test_other_stages_are_refused(errors_of):
    """Stage 3, a section that forgets its stage, and offload at stage 0 are one sentence each, with what to write."""
    offload = {"stage": 0, "offload_optimizer": {"device": "cpu"}}
    for zero, found, advice in (
        ({"stage": 3}, '"zero_optimization.stage" is 3', "write 2"),
        ({}, '"zero_optimization.stage" is missing', "write 1 or 2, or 0"),
        ({"overlap_comm": True}, '"zero_optimization.stage" is missing', "write 1 or 2, or 0"),
        (offload, '"zero_optimization.offload_optimizer" is for stages 1 and 2', "write stage 2"),
        (
            {"stage": 2, "parameter_alignment": True},
            '"zero_optimization.parameter_alignment"',
            "leave it out",
        ),
    ):
        (sentence,) = errors_of(document(zero_optimization=zero))
        assert found in sentence and advice in sentence


def test_the_schedule_ends_its_warm_up_at_the_optimizers_rate(read):
    """The "scheduler" is read with the optimizer's lr, and what is said about it reaches the notes."""
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}}
    settings = read(document(scheduler=scheduler))
    assert settings.schedule.warmup_max_lr == 1e-4
    assert any("DeepSpeed's default 0.001" in note for note in settings.notes)
    assert read(document()).schedule.warmup_max_lr == 1e-4


def test_plain_adam_with_weight_decay_is_refused(read, errors_of):
    """adam_w_mode false is another algorithm unless there is no weight decay; "Adam" means AdamW as in DeepSpeed."""
    plain = {"lr": 1e-4, "adam_w_mode": False}
    assert (
        "adam_w_mode"
        in errors_of(document(optimizer={"type": "Adam", "params": plain | {"weight_decay": 0.01}}))[0]
    )
    assert read(document(optimizer={"type": "Adam", "params": plain})).optimizer.weight_decay == 0


def test_reading_the_module_costs_neither_torch_nor_deepspeed():
    """--help stays fast: importing config loads neither."""
    code = "import pretraining.config, sys; sys.exit(bool({'torch', 'deepspeed'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("zero_optimization", "stage", "3"),
        ("zero_optimization", "stage", "2"),
        ("zero_optimization", "stage", True),
        ("zero_optimization", "overlap_comm", "no"),
        ("fp16", "enabled", "no"),
        ("fp16", "enabled", 1),
        ("fp16", "loss_scale_window", "1000"),
    ],
)
def test_what_deepspeed_would_coerce_is_refused(tmp_path, repository, section, key, value):
    """A text for a number, or anything but true and false for a truth value, is an error with its key."""
    document = json.loads((repository / "ds_configs/zero2.json").read_text())
    document[section][key] = value
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=f'"{section}.{key}" is {json.dumps(value)}'):
        read_deepspeed_json(path)


def test_a_byte_order_mark_is_no_error(tmp_path, repository):
    """A JSON that an editor saved with a byte order mark is read."""
    path = tmp_path / "x.json"
    path.write_text((repository / "ds_configs/zero2.json").read_text(), encoding="utf-8-sig")
    assert read_deepspeed_json(path).train_batch_size == 256
