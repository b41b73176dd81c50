"""The model computes BERT: the same numbers as transformers, at the cost of real tokens only."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from data_prep.errors import UserError
from pretraining import attention as attention_module
from pretraining.attention import attention, choose_backend, dropout, dropout_add, plan_attention
from pretraining.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    from_huggingface,
    to_huggingface,
)
from pretraining.model import PRESETS, BertConfig, BertForPreTraining, MicroBatch

CPU = torch.device("cpu")
SDPA_RUNS = choose_backend(CPU, torch.float32, 0.0)


def tiny_config(**changes):
    shape = {
        "vocab_size": 101,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "max_position_embeddings": 40,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return BertConfig(**shape | changes)


def random_config(rng):
    heads = int(rng.integers(1, 5))
    return tiny_config(
        vocab_size=int(rng.integers(20, 200)),
        hidden_size=heads * int(rng.integers(3, 12)),
        num_hidden_layers=int(rng.integers(1, 4)),
        num_attention_heads=heads,
        intermediate_size=int(rng.integers(8, 90)),
        type_vocab_size=int(rng.integers(2, 4)),
    )


def random_model(config, seed, std=0.15):
    """Every parameter random, biases and LayerNorms too, so that none can be forgotten unnoticed."""
    torch.manual_seed(seed)
    model = BertForPreTraining(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
        model.bert.embeddings.word_embeddings.weight[config.vocab_size :] = 0
        model.masked_lm_head.bias[config.vocab_size :] = 0
    return model


def random_batch(config, lengths, rng, masked=None):
    lengths = np.asarray(lengths, dtype=np.int64)
    tokens, starts = int(lengths.sum()), np.cumsum(lengths) - lengths
    masked = max(1, tokens // 6) if masked is None else masked
    return MicroBatch(
        input_ids=torch.from_numpy(rng.integers(0, config.vocab_size, tokens)),
        token_type_ids=torch.from_numpy(rng.integers(0, config.type_vocab_size, tokens)),
        position_ids=torch.from_numpy(np.arange(tokens) - np.repeat(starts, lengths)),
        lengths=lengths,
        cls_positions=torch.from_numpy(starts),
        masked_lm_positions=torch.from_numpy(np.sort(rng.choice(tokens, masked, replace=False))),
        masked_lm_labels=torch.from_numpy(rng.integers(0, config.vocab_size, masked)),
        next_sentence_labels=torch.from_numpy(rng.integers(0, 2, len(lengths))),
    )


def in_order(batch, order):
    """The same sequences in another order."""
    spans = [np.arange(s, s + n) for s, n in zip(batch.cls_positions.tolist(), batch.lengths, strict=True)]
    tokens = torch.from_numpy(np.concatenate([spans[i] for i in order]))
    lengths = batch.lengths[order]
    new_place = torch.empty_like(tokens)
    new_place[tokens] = torch.arange(len(tokens))
    return MicroBatch(
        input_ids=batch.input_ids[tokens],
        token_type_ids=batch.token_type_ids[tokens],
        position_ids=batch.position_ids[tokens],
        lengths=lengths,
        cls_positions=torch.from_numpy(np.cumsum(lengths) - lengths),
        masked_lm_positions=new_place[batch.masked_lm_positions],
        masked_lm_labels=batch.masked_lm_labels,
        next_sentence_labels=batch.next_sentence_labels[order],
    )


def padded(batch):
    """The micro-batch as transformers wants it, and the [B, S] mask of real tokens."""
    longest = int(batch.lengths.max())
    real = torch.arange(longest) < torch.from_numpy(batch.lengths)[:, None]

    def pad(values, fill):
        return torch.full(real.shape, fill, dtype=torch.int64).masked_scatter(real, values)

    labels = torch.full_like(batch.input_ids, -100)
    labels[batch.masked_lm_positions] = batch.masked_lm_labels
    inputs = {
        "input_ids": pad(batch.input_ids, 0),
        "token_type_ids": pad(batch.token_type_ids, 0),
        "attention_mask": real.long(),
        "labels": pad(labels, -100),
        "next_sentence_label": batch.next_sentence_labels,
    }
    return inputs, real


def transformers_model(config, model, attn_implementation="eager"):
    """transformers' BERT with our weights. Its pad row gets no gradient unless there is no pad row."""
    values = config_to_huggingface(config) | {"pad_token_id": None}
    theirs = transformers.BertForPreTraining._from_config(
        transformers.BertConfig(**values), attn_implementation=attn_implementation
    )
    missing, unexpected = theirs.load_state_dict(to_huggingface(model.state_dict(), config), strict=False)
    assert set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert not unexpected
    theirs.tie_weights()
    return theirs.eval()


def hidden_states(model, batch):
    """Embeddings and every layer's output, [T, H] each."""
    seen = []
    modules = [model.bert.embeddings, *model.bert.layers]
    hooks = [m.register_forward_hook(lambda _module, _inputs, output: seen.append(output)) for m in modules]
    output = model(batch)
    for hook in hooks:
        hook.remove()
    return seen, output


def mean_loss(output, batch):
    loss = output.masked_lm_loss_sum / max(1, len(batch.masked_lm_labels))
    if output.next_sentence_loss_sum is not None:
        loss = loss + output.next_sentence_loss_sum / len(batch.lengths)
    return loss


def gradients(model, batch):
    model.zero_grad()
    mean_loss(model(batch), batch).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_near(ours, theirs, what, tolerance=1e-5):
    ours, theirs = ours.detach(), theirs.detach()
    worst = float((ours - theirs).abs().max())
    assert worst <= tolerance * max(1.0, float(theirs.abs().max())), f"{what}: {worst}"


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("seed", range(4))
def test_equals_transformers(seed, attn_implementation):
    """Hidden states of every layer, both losses and all gradients are those of transformers' BERT, which
    pads where this model does not."""
    rng = np.random.default_rng(seed)
    config = random_config(rng)
    model = random_model(config, seed).eval()
    batch = random_batch(config, [7, 1, 23, 23, 40, 2, 13, 13, 13], rng)
    theirs = transformers_model(config, model, attn_implementation)
    inputs, real = padded(batch)

    expected = theirs(**inputs, output_hidden_states=True)
    states, output = hidden_states(model, batch)
    assert len(states) == len(expected.hidden_states) == config.num_hidden_layers + 1
    for i, (ours, other) in enumerate(zip(states, expected.hidden_states, strict=True)):
        assert_near(ours, other[real], f"hidden state {i}")
    assert_near(mean_loss(output, batch), expected.loss, "loss")
    masked_lm = F.cross_entropy(expected.prediction_logits.flatten(0, 1), inputs["labels"].flatten())
    assert_near(output.masked_lm_loss_sum / len(batch.masked_lm_labels), masked_lm, "masked-LM loss")

    right = expected.prediction_logits.argmax(-1) == inputs["labels"]
    assert int(output.masked_lm_correct) == int(right.sum())
    next_right = expected.seq_relationship_logits.argmax(-1) == batch.next_sentence_labels
    assert int(output.next_sentence_correct) == int(next_right.sum())

    expected.loss.backward()
    ours = to_huggingface(gradients(model, batch), config)
    other = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert ours.keys() == other.keys()
    for name in ours:
        assert_near(ours[name], other[name], name)


def test_vocabulary_padding_is_invisible():
    """Padded rows give no logits, get a gradient of exactly zero, and change nothing whatever they hold."""
    config = tiny_config(vocab_size=101)
    assert config.padded_vocab_size == 128
    assert tiny_config(vocab_size=128).padded_vocab_size == 128
    assert tiny_config(vocab_size=129).padded_vocab_size == 192
    model, rng = random_model(config, 0), np.random.default_rng(0)
    batch = random_batch(config, [9, 5], rng, masked=6)
    before = gradients(model, batch)
    assert before["bert.embeddings.word_embeddings.weight"][101:].abs().sum() == 0
    assert before["masked_lm_head.bias"][101:].abs().sum() == 0

    loss = mean_loss(model(batch), batch).item()
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[101:] = 50.0
        model.masked_lm_head.bias[101:] = 1000.0
    assert mean_loss(model(batch), batch).item() == loss
    assert model.masked_lm_logits(torch.randn(3, 32), torch.arange(3)).shape == (3, 101)
    fresh = BertForPreTraining(config).bert.embeddings.word_embeddings.weight
    assert fresh[101:].abs().sum() == 0 and fresh[100].abs().sum() > 0


@pytest.mark.parametrize("next_sentence", [True, False])
def test_huggingface_round_trip_is_bitwise(next_sentence):
    """to_huggingface and from_huggingface are inverse to the bit, padding rows of zeros included, and
    transformers loads the names without a missing or unknown one."""
    config = tiny_config(vocab_size=70, next_sentence=next_sentence)
    state = random_model(config, 1).state_dict()
    exported = to_huggingface(state, config)
    assert len({tensor.untyped_storage().data_ptr() for tensor in exported.values()}) == len(exported)
    again = from_huggingface(exported, config)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)
    assert config_from_huggingface(json.loads(json.dumps(config_to_huggingface(config)))) == config

    values = config_to_huggingface(config)
    theirs = getattr(transformers, values["architectures"][0])(transformers.BertConfig(**values))
    everything = theirs.state_dict()
    assert set(everything) - set(exported) == {f"cls.predictions.decoder.{x}" for x in ("weight", "bias")}
    assert not set(exported) - set(everything)
    # What transformers saves with its tied duplicates, and what its first release called LayerNorm's weights.
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): x for name, x in everything.items()}
    old = {name.replace("LayerNorm.bias", "LayerNorm.beta"): x for name, x in old.items()}
    old["bert.embeddings.position_ids"] = torch.arange(config.max_position_embeddings)[None]
    ours = BertForPreTraining(config)
    ours.load_state_dict(from_huggingface(old, config))
    assert all(torch.equal(x, everything[k]) for k, x in to_huggingface(ours.state_dict(), config).items())


def test_huggingface_weights_that_do_not_fit_are_refused_by_name():
    """Missing, unknown, untied and misshapen weights each raise a UserError that names them."""
    config = tiny_config()
    good = to_huggingface(random_model(config, 2).state_dict(), config)
    dense = "bert.encoder.layer.1.output.dense.weight"
    bad = {
        "lack bert.encoder.layer.1.output": {k: v for k, v in good.items() if k != dense},
        "also have bert.crossattention": good | {"bert.crossattention": torch.zeros(1)},
        "decoder.weight differs": good | {"cls.predictions.decoder.weight": torch.zeros(101, 32)},
        r"output.dense.weight is \[32, 81\]": good | {dense: torch.zeros(32, 81)},
        r"needs \[101, 32\]": good | {"bert.embeddings.word_embeddings.weight": torch.zeros(128, 32)},
    }
    for message, weights in bad.items():
        with pytest.raises(UserError, match=message):
            from_huggingface(weights, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "roberta"}, "model_type"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"architectures": ["BertForSequenceClassification"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
    ],
)
def test_huggingface_config_names_the_unsupported_key(change, message):
    """A config.json of another architecture or activation is refused with the name of the key."""
    with pytest.raises(UserError, match=message):
        config_from_huggingface(config_to_huggingface(tiny_config()) | change)


@pytest.mark.parametrize("next_sentence", [True, False])
@pytest.mark.parametrize("preset", ["tiny", "mini"])
def test_parameter_count(preset, next_sentence):
    """num_parameters is the real number less the rows that only pad the vocabulary."""
    config = BertConfig.preset(preset, 3001, next_sentence=next_sentence)
    with torch.device("meta"):
        real = sum(p.numel() for p in BertForPreTraining(config).parameters())
    assert config.num_parameters() == real - (config.padded_vocab_size - 3001) * (config.hidden_size + 1)


def test_presets_have_the_published_sizes():
    """BERT-base has 110 M parameters and BERT-large 336 M (the paper says 110 M and 340 M)."""
    assert BertConfig.preset("base", 30522).num_parameters() == 110_106_428
    assert 336e6 <= BertConfig.preset("large", 30522).num_parameters() <= 340e6
    for name in PRESETS:
        config = BertConfig.preset(name, 30522)
        assert config.head_dim == 64 and config.intermediate_size == 4 * config.hidden_size
    assert BertConfig.preset("tiny", 99, hidden_size=64).intermediate_size == 256


def test_config_survives_json_and_refuses_nonsense():
    """to_dict and from_dict are inverse through JSON; every problem is named in one message."""
    config = tiny_config(next_sentence=False, layer_norm_eps=1e-6)
    assert BertConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(UserError, match="lacks vocab_size.* and has the unknown colour"):
        BertConfig.from_dict({"hidden_size": 8, "colour": 1})
    with pytest.raises(UserError, match=r"hidden_dropout_prob.*not divisible.*hidden_act"):
        tiny_config(hidden_dropout_prob=1.0, num_attention_heads=5, hidden_act="swish")
    with pytest.raises(UserError, match="vocab_size must be at least 1"):
        tiny_config(vocab_size=0)
    with pytest.raises(UserError, match="choose one of tiny"):
        BertConfig.preset("huge", 100)


def test_initial_weights():
    """Weights are normal with the configured deviation, cut at two deviations; biases 0, LayerNorm 1 and 0;
    the seed decides."""
    config = tiny_config(vocab_size=500, hidden_size=64, initializer_range=0.05)
    torch.manual_seed(3)
    state = BertForPreTraining(config).state_dict()
    torch.manual_seed(3)
    again = BertForPreTraining(config).state_dict()
    assert all(torch.equal(state[name], again[name]) for name in state)
    for name, tensor in state.items():
        if "layer_norm.weight" in name:
            assert torch.all(tensor == 1), name
        elif name.endswith("bias"):
            assert torch.all(tensor == 0), name
        else:
            assert tensor.abs().max() <= 0.1 + 1e-6, name
    # The deviation of a normal distribution cut at ±2 is 0.8796 of the uncut one's.
    words = state["bert.embeddings.word_embeddings.weight"][:500]
    assert words.std() == pytest.approx(0.8796 * 0.05, rel=0.03)
    at_start = BertForPreTraining(tiny_config(vocab_size=500))
    batch = random_batch(at_start.config, [30] * 8, np.random.default_rng(0))
    output = at_start(batch)
    assert output.masked_lm_loss_sum.item() / 40 == pytest.approx(math.log(500), abs=0.1)
    assert output.next_sentence_loss_sum.item() / 8 == pytest.approx(math.log(2), abs=0.05)


@pytest.mark.parametrize("lengths", [[12, 3], [1], []])
def test_nothing_masked_still_runs_backward(lengths):
    """With M = 0, with one token, and with no sequence at all the loss is 0 with a graph, and every
    parameter gets a finite gradient, so that all ranks reduce the same tensors."""
    config = tiny_config(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    model = random_model(config, 4)
    batch = random_batch(config, lengths, np.random.default_rng(0), masked=0)
    output = model(batch)
    assert output.masked_lm_loss_sum.item() == 0 and int(output.masked_lm_correct) == 0
    (output.masked_lm_loss_sum + output.next_sentence_loss_sum).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(float(p.grad.abs().sum()) == 0 for p in model.masked_lm_head.parameters())


def test_without_next_sentence_head():
    """next_sentence=False has neither pooler nor head nor loss; with a head, labels are demanded."""
    config = tiny_config(next_sentence=False)
    model = random_model(config, 5)
    batch = random_batch(config, [6, 6], np.random.default_rng(0))
    output = model(batch)
    assert output.next_sentence_loss_sum is None and output.next_sentence_correct is None
    assert not [name for name, _ in model.named_parameters() if "pooler" in name or "next_sentence" in name]
    output.masked_lm_loss_sum.backward()
    assert all(p.grad is not None for p in model.parameters())
    batch.next_sentence_labels = None
    assert batch.to("cpu").next_sentence_labels is None
    with pytest.raises(ValueError, match="labels"):
        random_model(tiny_config(), 5)(batch)


def test_micro_batch_moves_all_tensors_and_keeps_lengths_on_the_host():
    """`to` moves each tensor and leaves the lengths, which the host needs, where they are."""
    batch = random_batch(tiny_config(), [4, 4], np.random.default_rng(0)).to("meta")
    assert all(x.device.type == "meta" for x in vars(batch).values() if isinstance(x, torch.Tensor))
    assert isinstance(batch.lengths, np.ndarray)


def test_order_of_sequences_does_not_matter():
    """A shuffled micro-batch has the same losses and gradients as a sorted one."""
    config, rng = tiny_config(), np.random.default_rng(6)
    model = random_model(config, 6)
    batch = random_batch(config, [30, 30, 21, 8, 8, 8, 2], rng)
    shuffled = in_order(batch, rng.permutation(7))
    assert_near(mean_loss(model(shuffled), shuffled), mean_loss(model(batch), batch), "loss")
    expected = gradients(model, batch)
    for name, gradient in gradients(model, shuffled).items():
        assert_near(gradient, expected[name], name)


def reference_attention(query, key, value, lengths):
    """Dense float64 attention, one sequence at a time."""
    outputs = []
    for q, k, v in zip(*(x.double().split(list(lengths)) for x in (query, key, value)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outputs)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8), heads=st.integers(1, 3))
def test_attention_equals_dense_float64(lengths, heads):
    """Forward and backward of attention over runs are those of each sequence by itself in float64, for any
    order of lengths; the path with dropout is the same function when nothing happens to be dropped."""
    torch.manual_seed(sum(lengths))
    qkv = torch.randn(sum(lengths), 3, heads, 8, requires_grad=True)
    weights = torch.randn(sum(lengths), heads, 8)
    plan = plan_attention(lengths, CPU, SDPA_RUNS)
    expected = reference_attention(*qkv.unbind(1), lengths)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), qkv)
    for dropout_p in (0.0, 1e-9):
        context = attention(*qkv.unbind(1), plan, dropout_p)
        assert_near(context, expected, "context")
        (gradient,) = torch.autograd.grad((context * weights).sum(), qkv)
        assert_near(gradient, expected_gradient, "gradient")


def test_plan_joins_equal_neighbours():
    """Consecutive equal lengths are one run, so a sorted micro-batch has one call per distinct length."""
    assert plan_attention([9, 9, 4, 4, 4, 9], CPU, SDPA_RUNS).runs == [(2, 9), (3, 4), (1, 9)]
    assert plan_attention(np.array([3]), CPU, SDPA_RUNS).runs == [(1, 3)]
    with pytest.raises(ValueError, match="at least one token"):
        plan_attention([3, 0], CPU, SDPA_RUNS)


def test_sdpa_sees_views_without_copies(monkeypatch):
    """On the CPU each run reaches SDPA as a strided view of the projection: no mask, no padding, no copy."""
    calls = []
    sdpa = F.scaled_dot_product_attention

    def spy(q, k, v, **options):
        calls.append((q, k, v, options))
        return sdpa(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    qkv = torch.randn(2 * 5 + 3, 3, 2, 8)
    attention(*qkv.unbind(1), plan_attention([5, 5, 3], CPU, SDPA_RUNS))
    assert [tuple(q.shape) for q, *_ in calls] == [(2, 2, 5, 8), (1, 2, 3, 8)]
    for q, k, v, options in calls:
        assert {x.untyped_storage().data_ptr() for x in (q, k, v)} == {qkv.untyped_storage().data_ptr()}
        assert options == {"dropout_p": 0.0}


@pytest.fixture
def gpu(monkeypatch):
    """A pretended Ampere GPU with neither flash-attn nor torch's kernel; returns a function that adds them."""

    def install(flash_attn=None, torch_varlen=None, capability=(8, 0)):
        monkeypatch.setattr(attention_module, "_flash_attn_varlen", lambda: flash_attn)
        monkeypatch.setattr(attention_module, "_torch_varlen", lambda: torch_varlen)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda")

    return install


def test_backend_choice(gpu):
    """flash-attn first, then torch's kernel where nothing is dropped, else SDPA over runs, with the reason."""
    both = {"flash_attn": max, "torch_varlen": max}
    half = torch.bfloat16
    assert choose_backend(CPU, torch.float32, 0.1) == ("sdpa_runs", "")
    assert choose_backend(gpu(**both), half, 0.1) == ("flash_attn_varlen", "")
    assert choose_backend(gpu(torch_varlen=max), half, 0.0) == ("torch_varlen", "")
    losses = {
        "no dropout": choose_backend(gpu(torch_varlen=max), half, 0.1),
        "neither flash-attn nor": choose_backend(gpu(), half, 0.0),
        "not float32": choose_backend(gpu(**both), torch.float32, 0.0),
        "Ampere": choose_backend(gpu(**both, capability=(7, 0)), half, 0.0),
        "multiple of 8": choose_backend(gpu(**both), half, 0.0, head_dim=12),
    }
    for reason, backend in losses.items():
        assert backend.name == "sdpa_runs" and reason in backend.loss and "slower" in backend.loss


@pytest.mark.parametrize("name", ["flash_attn_varlen", "torch_varlen"])
def test_variable_length_kernels_get_the_right_borders(gpu, name):
    """The two CUDA kernels, played by the reference, get int32 borders and the longest length, and their
    result reaches the caller forward and backward."""
    lengths, seen = [5, 2, 7, 7], {}

    def fake(query, key, value, cu_seqlens_q, cu_seqlens_k, max_q, max_k, **options):
        assert cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32
        assert cu_seqlens_q.tolist() == [0, 5, 7, 14, 21] and max_q == max_k == 7
        seen.update(options)
        return reference_attention(query, key, value, cu_seqlens_q.diff().tolist()).float()

    gpu(flash_attn=fake, torch_varlen=fake)
    plan = plan_attention(lengths, CPU, attention_module.Backend(name, ""))
    qkv = torch.randn(21, 3, 2, 8, requires_grad=True)
    context = attention(*qkv.unbind(1), plan)
    assert_near(context, reference_attention(*qkv.unbind(1), lengths), "context")
    (gradient,) = torch.autograd.grad(context.square().sum(), qkv)
    runs = attention(*qkv.unbind(1), plan_attention(lengths, CPU, SDPA_RUNS))
    (expected,) = torch.autograd.grad(runs.square().sum(), qkv)
    assert_near(gradient, expected, "gradient")
    if name == "flash_attn_varlen":
        attention(*qkv.unbind(1), plan, 0.1)
        assert seen == {"dropout_p": 0.1, "deterministic": False}
    else:
        with pytest.raises(ValueError, match="no dropout"):
            attention(*qkv.unbind(1), plan, 0.1)


def flash_cpu_forward(query, key, value, *args, **kwargs):
    n, heads, length, head_dim = query
    return 4 * n * heads * length * length * head_dim


def flash_cpu_backward(grad_out, query, key, value, *args, **kwargs):
    return 2 * flash_cpu_forward(query, key, value)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_floating_point_operations(dropout_p):
    """A step costs what its real tokens, masked positions and sequences need, and nothing for padding."""
    config = tiny_config(hidden_dropout_prob=dropout_p, attention_probs_dropout_prob=dropout_p)
    model = random_model(config, 7)
    batch = random_batch(config, [31, 31, 31, 17, 9, 9], np.random.default_rng(7), masked=11)
    # torch's table lacks the CPU kernel. A backward pass is counted without the scores it computes again.
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    table = {kernel: flash_cpu_forward, backward: flash_cpu_backward}
    with FlopCounterMode(display=False, custom_mapping=table) as counter:
        mean_loss(model(batch), batch).backward()

    layers, hidden, inner, vocab = 2, 32, 80, config.padded_vocab_size
    tokens, masked, sequences = int(batch.lengths.sum()), 11, 6
    linear = 6 * layers * (4 * hidden**2 + 2 * hidden * inner) * tokens
    dense_attention = 12 * layers * hidden * int((batch.lengths**2).sum())
    heads = 6 * (hidden**2 + hidden * vocab) * masked + 6 * (hidden**2 + 2 * hidden) * sequences
    assert counter.get_total_flops() == linear + dense_attention + heads


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_statistics(p):
    """A share p is zero, the rest is scaled by 1/(1-p), the mean stays, and the gradient has the same mask."""
    torch.manual_seed(8)
    x = torch.ones(1000, 401, requires_grad=True)
    y = dropout(x, p)
    kept = y != 0
    n = x.numel()
    assert abs(int((~kept).sum()) - p * n) < 5 * math.sqrt(p * (1 - p) * n)
    assert torch.allclose(y[kept], torch.tensor(1 / (1 - p)), rtol=1e-4)
    assert float(y.detach().mean()) == pytest.approx(1, abs=5 * math.sqrt(p / (1 - p) / n))
    y.sum().backward()
    assert torch.equal(x.grad != 0, kept)
    # Neighbours in rows and columns are independent: four values share one random word.
    flat = kept.flatten().double()
    for lag in (1, 2, 3, 4, 401):
        correlation = torch.corrcoef(torch.stack((flat[lag:], flat[:-lag])))[0, 1]
        assert abs(float(correlation)) < 5 / math.sqrt(n), lag
    added = dropout_add(torch.ones(400, 400), torch.full((400, 400), 3.0), p)
    assert torch.unique((added - 3).mul(1 - p).round(decimals=3)).tolist() == [0, 1]


def test_attention_dropout_keeps_the_mean():
    """Dropped attention is different each time and averages to attention without dropout."""
    torch.manual_seed(9)
    qkv = torch.randn(3, 30, 2, 8)
    plan = plan_attention([12, 12, 6], CPU, SDPA_RUNS)
    samples = torch.stack([attention(*qkv, plan, 0.1) for _ in range(2000)])
    assert samples.std(0).min() > 0
    error = (samples.mean(0) - attention(*qkv, plan)).abs() / (samples.std(0) / math.sqrt(2000))
    assert error.max() < 5 and error.pow(2).mean() == pytest.approx(1, abs=0.3)


def test_dropout_is_where_bert_has_it():
    """In training, hidden dropout is on the embeddings and before both residual additions of every layer,
    and nowhere else."""
    config = tiny_config(hidden_size=64, hidden_dropout_prob=0.1)
    model = random_model(config, 10)
    embeddings = model.bert.embeddings
    seen = {}

    def keep(name):
        def hook(_module, inputs, output):
            seen[name] = (inputs[0].detach(), output.detach())

        return hook

    watched = {"norm": embeddings.layer_norm, "embeddings": embeddings}
    for i, layer in enumerate(model.bert.layers):
        watched |= {f"{name}.{i}": module for name, module in layer.named_children()}
        watched[f"layer.{i}"] = layer
    for name, module in watched.items():
        module.register_forward_hook(keep(name))
    model.masked_lm_head.dense.register_forward_hook(keep("head"))
    batch = random_batch(config, [40] * 12, np.random.default_rng(10))
    model(batch)

    factors = {"embeddings": seen["embeddings"][1] / seen["norm"][1]}
    for i in range(2):
        first, second = seen[f"attention_layer_norm.{i}"], seen[f"output_layer_norm.{i}"]
        factors[f"attention.{i}"] = (first[0] - seen[f"layer.{i}"][0]) / seen[f"attention_dense.{i}"][1]
        factors[f"output.{i}"] = (second[0] - first[1]) / seen[f"output_dense.{i}"][1]
        # and none on what lies between
        assert torch.equal(seen[f"intermediate_dense.{i}"][0], first[1])
        activated = F.gelu(seen[f"intermediate_dense.{i}"][1])
        assert torch.equal(seen[f"output_dense.{i}"][0], activated)
        assert torch.equal(seen[f"layer.{i}"][1], second[1])
    assert torch.equal(seen["head"][0], seen["layer.1"][1][batch.masked_lm_positions])
    for name, factor in factors.items():
        zero = (factor.abs() < 0.01).double().mean()
        scaled = ((factor - 1 / 0.9).abs() < 0.01).double().mean()
        assert float(zero) == pytest.approx(0.1, abs=0.01), name
        assert float(zero + scaled) > 0.99, name  # the rest are quotients of rounding errors


def test_dropout_is_off_when_it_should_be():
    """p = 0 equals evaluation to the bit and draws no random number; p = 0.1 changes the training output;
    attention dropout alone does too; the seed decides; evaluation ignores p."""
    rng = np.random.default_rng(11)
    batch = random_batch(tiny_config(), [20, 20, 7], rng)

    def loss(training, seed=0, **probabilities):
        model = random_model(tiny_config(**probabilities), 11).train(training)
        torch.manual_seed(seed)
        value = mean_loss(model(batch), batch)
        return float(value.detach()), torch.random.get_rng_state()

    plain, state = loss(False)
    torch.manual_seed(0)
    untouched = torch.random.get_rng_state()
    assert torch.equal(state, untouched)
    unused, state = loss(True)
    assert unused == plain and torch.equal(state, untouched)
    assert loss(False, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)[0] == plain
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        dropped = loss(True, **{name: 0.1})[0]
        assert dropped != plain
        assert loss(True, **{name: 0.1})[0] == dropped
        assert loss(True, seed=1, **{name: 0.1})[0] != dropped


def test_bfloat16_is_close_to_float32():
    """After module.bfloat16() losses are float32 and within 1 %, and gradients within 5 % in norm; the rows
    that gather all tokens' gradients too, of which a bfloat16 sum would lose a large part."""
    config, rng = tiny_config(num_hidden_layers=1), np.random.default_rng(12)
    model = random_model(config, 12, std=0.02)
    batch = random_batch(config, [40] * 30, rng)
    exact, expected = mean_loss(model(batch), batch), gradients(model, batch)
    model.bfloat16()
    output = model(batch)
    assert output.masked_lm_loss_sum.dtype == torch.float32
    assert mean_loss(output, batch).item() == pytest.approx(exact.item(), rel=0.01)
    for name, gradient in gradients(model, batch).items():
        assert gradient.dtype == torch.bfloat16
        error = (gradient.float() - expected[name]).norm() / expected[name].norm()
        assert error < 0.05, (name, float(error))


def test_segment_gradients_are_summed_in_float32():
    """4,096 equal bfloat16 gradients of one segment row sum to 4,096 times one, not to 256 times."""
    model = BertForPreTraining(tiny_config()).bfloat16()
    embeddings = model.bert.embeddings
    embeddings.layer_norm = torch.nn.Identity()
    zeros = torch.zeros(4096, dtype=torch.int64)
    embeddings(zeros, zeros, zeros).sum().backward()
    assert torch.all(embeddings.token_type_embeddings.weight.grad[0] == 4096)
    assert torch.all(embeddings.position_embeddings.weight.grad[0] == 4096)


def test_overfits_a_fixed_batch():
    """Learning works: a tiny model remembers eight sequences, masked words and next-sentence labels."""
    torch.manual_seed(13)
    config = tiny_config(hidden_size=64, hidden_dropout_prob=0.0)
    model = BertForPreTraining(config)
    batch = random_batch(config, [24, 24, 24, 24, 16, 16, 9, 9], np.random.default_rng(13))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    first = mean_loss(model(batch), batch).item()
    for _ in range(150):
        optimizer.zero_grad()
        output = model(batch)
        mean_loss(output, batch).backward()
        optimizer.step()
    output = model(batch)
    assert first > 4 and mean_loss(output, batch).item() < 0.1
    assert int(output.masked_lm_correct) == len(batch.masked_lm_labels)
    assert int(output.next_sentence_correct) == 8
