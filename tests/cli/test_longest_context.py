"""The longest sequence that fits, models by few of their layers, and the command that asks for both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfused
from ckptfused.cli import context, main
from ckptfused.cli.configurations import MODELS, read_config
from ckptfused.cli.language_models import (
    CHECKPOINTED,
    CHUNKED,
    LEAST,
    OFFLOADED,
    PAIRED,
    UNCONVERTED_MODEL,
    VARIANTS,
    Trained,
    build_language_model,
    varied,
)
from ckptfused.cli.longest_context import language_step, longest
from ckptfused.profiler import Profile, profile
from ckptfused.sizes import size
from tests.cases import by_turns

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]
SMALL = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"vocab_size": 2048, "head_dim": 32}


def small(name: str, layers: int) -> dict[str, Any]:
    return MODELS[name] | SMALL | {"num_hidden_layers": layers}


# A head that sets the peak and one that does not, AdamW's step, LoRA.
TRAINED: tuple[tuple[int, int | None, dict[str, Any]], ...] = (
    (2048, None, {}),
    (64, None, {"optimizer": torch.optim.AdamW, "device": "cpu", "gradient_accumulation_steps": 2}),
    (64, 4, {}),
)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "of"), by_turns(VARIANTS, [("llama-3-8b", 4), ("gemma-2-9b", 8)]))
def test_few_layers_say_the_same_as_all(variant: str, of: tuple[str, int]) -> None:
    """Gemma 2's are of two kinds by turns. Each variant of each model, each in one of three ways to train."""
    name, layers = of
    classes, lora, options = TRAINED[(VARIANTS.index(variant) + layers // 8) % 3]
    layers = {OFFLOADED: 2 * layers, PAIRED: 16}.get(variant, layers)  # in whose middle one has two on each side
    call: Any = (small(name, layers) | {"vocab_size": classes}, variant, torch.bfloat16, lora)
    whole = language_step(build_language_model(*call), 200, 2, **options)
    few = Trained(*call)
    assert len(few._models) == 2
    found = few.step(200, 2, **options)
    assert found.sizes() == whole.sizes()
    assert bytes_of(found) == bytes_of(whole)
    assert 400 * 128 * 2 == Trained(*call).least(200, 2) < whole.peak
    if options.get("device") != "cpu":  # whose cache holds some of a few layers, and little of all
        assert found.seconds == pytest.approx(whole.seconds, rel=1e-9)  # sums in another order


@pytest.mark.slow
def test_the_first_layer_that_gets_its_input_back_may_need_most() -> None:
    """The first layer's input stays where embeddings are frozen: the third is the last whose input comes back while the
    next is on its way, beside the gradients of all adapters above."""
    call: Any = (small("llama-3-8b", 8) | {"vocab_size": 512}, OFFLOADED, torch.bfloat16, 4)
    whole = language_step(build_language_model(*call), 300, 2)
    assert whole.moment.startswith("backward of layer 2:")
    assert Trained(*call).step(300, 2).sizes() == whole.sizes()


def bytes_of(step: Profile) -> Any:
    """What the parts of the model and the optimizer add, without times."""
    parts = [replace(part, forward_seconds=0.0, backward_seconds=0.0) for part in step.parts]
    return parts, step.all_gradients, step.optimizer_transient


def test_layers_that_do_not_repeat_are_all_run() -> None:
    assert len(Trained(small("llama-3-8b", 6), CHUNKED, torch.bfloat16)._models) == 2
    assert len(Trained(small("gemma-2-9b", 7), CHUNKED, torch.bfloat16)._models) == 1
    assert len(Trained(small("llama-3-8b", 3), CHUNKED, torch.bfloat16)._models) == 1


def test_the_published_sizes() -> None:
    """Parameters as the model cards count them: 8.03, 8.19 and 9.24 billion."""
    for name, billions in (("llama-3-8b", 8.03), ("qwen3-8b", 8.19), ("gemma-2-9b", 9.24)):
        model = build_language_model(MODELS[name], CHECKPOINTED, torch.bfloat16)
        assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == billions, name


@pytest.mark.parametrize("budget", [0, 999, 1000, 5_130, 77_777, 10**9])
@pytest.mark.parametrize("power", [1, 2])
def test_the_search(power: int, budget: int) -> None:
    """The last multiple that fits, for lines and for curves, in few guesses."""
    asked = []

    def step_of(tokens: int) -> Profile:
        asked.append(tokens)
        return Profile(900 + tokens**power, 0, 0, 0, 0, 0, 0, "")

    found = longest(step_of, budget, step=10, most=100_000)
    fitting = [tokens for tokens in range(10, 163_840, 10) if 900 + tokens**power <= budget]
    expected = fitting[-1] if fitting else 0
    assert found.tokens == expected or found.tokens >= 100_000
    assert found.profile.peak == 900 + (found.tokens or 10) ** power
    assert len(asked) == len(set(asked)) <= 30


def test_no_step_is_predicted_that_cannot_fit() -> None:
    asked = []

    def step_of(tokens: int) -> Profile:
        asked.append(tokens)
        return Profile(900 + tokens, 0, 0, 0, 0, 0, 0, "")

    budget = 5_130
    found = longest(step_of, budget, step=10, first=1 << 20, least=lambda tokens: tokens)
    assert found.tokens == 4_230 and found.profile.peak == budget
    assert max(asked) <= budget
    with pytest.raises(ValueError, match="of which a step fits into 9 B: the result of one layer alone takes 10 B"):
        longest(pytest.fail, 9, step=10, least=lambda tokens: tokens)


def test_the_host_is_a_limit_too() -> None:
    """A token takes 2 bytes on the card and 3 on the host, and one of the two is reached first."""

    def step_of(tokens: int) -> Profile:
        return Profile(2 * tokens, 0, 0, 0, 0, 0, 0, "", host=3 * tokens)

    assert longest(step_of, 10_000, step=10).tokens == 5_000
    assert longest(step_of, 10_000, step=10, host=9_000).tokens == 3_000
    assert longest(step_of, 10_000, step=10, host=29).tokens == 0
    found = longest(step_of, 10_000, step=10, host=30)
    assert found.tokens == 10 and found.steps[0] == (10, 20) and found.steps == tuple(sorted(set(found.steps)))


def test_what_waits_on_the_host() -> None:
    """Inputs of all layers but the last, and but the first, whose input nobody differentiates, each in the next power
    of two of pinned memory, as small ones are."""
    config = small("llama-3-8b", 6)
    step = language_step(build_language_model(config, OFFLOADED, torch.bfloat16, 4), 128)
    x = 128 * config["hidden_size"] * 2
    assert step.host == 4 * x and f"host memory {size(step.host)}" in str(step)
    assert language_step(build_language_model(config, OFFLOADED, torch.bfloat16, 4), 130).host == 4 * 2 * x
    assert Trained(config, OFFLOADED, torch.bfloat16, 4).step(128).host == step.host
    assert language_step(build_language_model(config, LEAST, torch.bfloat16, 4), 128).host == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set:UserWarning")
def test_weights_in_four_bits() -> None:
    """Half a byte a weight, and 4 bytes for each 64; embeddings and head in the type that was asked for."""
    pytest.importorskip("bitsandbytes")
    config = small("llama-3-8b", 4)
    plain = build_language_model(config, LEAST, torch.bfloat16, 4)
    model: Any = build_language_model(config, LEAST, torch.bfloat16, 4, four_bit=True)
    linear = [
        m.base_layer.weight for m in plain.modules() if isinstance(getattr(m, "base_layer", None), torch.nn.Linear)
    ]
    count = sum(weight.numel() for weight in linear)
    scales = sum(-(-w.numel() // 64) * 4 + 16 * 4 for w in linear)
    saved = language_step(plain, 128).weights - language_step(model, 128).weights
    assert saved == 2 * count - count // 2 - scales
    assert all(layer.path == "fused" for layer in ckptfused.convert(model).layers)
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512}
    t5 = {
        "model_type": "t5",
        "num_layers": 1,
        "d_model": 64,
        "num_heads": 4,
        "d_kv": 16,
        "d_ff": 128,
        "vocab_size": 512,
    }
    for other in (gpt2, t5):  # Conv1D, and a projection that stays as it was
        sizes = [
            language_step(build_language_model(other, UNCONVERTED_MODEL, torch.bfloat16, 4, four_bit), 64).weights
            for four_bit in (False, True)
        ]
        assert sizes[1] < 0.8 * sizes[0]
    with pytest.raises(ValueError, match="4-bit weights are not trained: give the rank of adapters"):
        build_language_model(config, LEAST, torch.bfloat16, four_bit=True)


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    search, answers = context._longest, {}

    def once(given: Any, variant: str, arguments: Any) -> Any:
        if variant not in answers:
            answers[variant] = search(given, variant, arguments)
        return answers[variant]

    monkeypatch.setattr(context, "_longest", once)  # printed twice, as JSON and as a table
    path, config = tmp_path / "config.json", small("llama-3-8b", 3)  # all run: few of more layers say the same
    path.write_text(json.dumps(config))
    command = ["context", "--config", str(path), "--memory", "16MiB", "--lora", "4", "--step", "64"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tokens = {name: row["tokens"] for name, row in found["variants"].items()}
    assert [*tokens, PAIRED] == list(VARIANTS) and list(tokens.values()) == sorted(tokens.values())
    for name in (CHECKPOINTED, OFFLOADED):
        row = found["variants"][name]
        model = build_language_model(config, name, torch.bfloat16, 4)
        longest_step = language_step(model, tokens[name])
        assert row["peak"] == longest_step.peak <= 16 << 20
        assert language_step(model, tokens[name] + 64).peak > 16 << 20
        assert row.keys() == {"tokens", "refused", *longest_step.sizes()}
    picture = tmp_path / "context.svg"
    assert main([*command, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert all(f"{count:,}" in out for count in tokens.values()) and "Not counted: the CUDA context" in out
    assert out.count(" a step; ") == len(VARIANTS) - 1 and out.count("of host memory") == 1
    assert "tokens of a sequence" in picture.read_text()


@pytest.mark.slow
def test_the_command_with_weights_in_four_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Longer sequences fit than beside weights of bfloat16; each row is a step of such a model."""
    pytest.importorskip("bitsandbytes")
    path, config = tmp_path / "config.json", small("llama-3-8b", 3)
    path.write_text(json.dumps(config))
    found = []
    for option in ([], ["--load-in-4bit"]):
        command = ["context", "--config", str(path), "--memory", "16MiB", "--lora", "4", "--step", "256", "--json"]
        assert main([*command, *option]) == 0
        found.append(json.loads(capsys.readouterr().out)["variants"])
    assert all(found[1][name]["tokens"] >= row["tokens"] for name, row in found[0].items())
    row = found[1][LEAST]
    assert row["tokens"] > found[0][LEAST]["tokens"]
    model = build_language_model(config, LEAST, torch.bfloat16, 4, four_bit=True)
    assert row["peak"] == language_step(model, row["tokens"]).peak <= 16 << 20


def test_the_shortest_that_is_tried_may_be_too_long() -> None:
    def step_of(tokens: int) -> Any:
        raise ValueError("no row 255 in a table of 128")

    with pytest.raises(ValueError, match="no row 255 in a table of 128; 256 is the shortest that is tried, --step"):
        longest(step_of, 1 << 30)


def test_a_model_without_layers_has_no_segments() -> None:
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
    assert varied(model, PAIRED) is None


@pytest.mark.slow
def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small("llama-3-8b", 3)))
    command = ["context", "--config", str(path), "--memory", "8MiB", "--lora", "4", "--host-memory", "1KiB"]
    assert main([*command, "--step", "64"]) == 0
    each, pairs = (line for line in capsys.readouterr().out.splitlines() if "offload=True" in line)
    assert "none  the shortest needs " in each and "16.00 KiB of host memory" in each
    assert "segments of two" in pairs and "none" not in pairs and "host memory" not in pairs
    assert main(["context", "--config", "llama-3-8b", "--memory", "1GiB"]) == 0
    assert "none  the shortest needs " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "80Gigs"], "MiB, GiB, TiB: of 1024), got '80Gigs'"),
        (["--memory", "8GB", "--lora", "0"], "argument --lora: expected a number from 1 on, got '0'"),
        (["--memory", "8GB", "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_options_are_checked_first(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["context", "--config", "llama-3-8b", *options])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[1]", '{"hidden_size": 4}'])
def test_a_configuration_of_something_else_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["context", "--config", str(path), "--memory", "8GB"]) == 1
    assert "--config: expected" in capsys.readouterr().err
    with pytest.raises(ValueError, match="llama-3-8b, qwen3-8b, gemma-2-9b, the path of .*, got 'nope'"):
        read_config("nope")


BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 192}, 192),
        ({**BERT, "model_type": "bert"}, 512),
        ({**BERT, "model_type": "roberta", "max_position_embeddings": 194}, 192),  # counted from what is no padding
    ],
)
def test_a_sequence_has_no_more_tokens_than_the_model_has_positions(
    config: dict[str, Any], positions: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2's are rows of an embedding, BERT's a buffer too; a step beyond them is refused as with data."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 0}))
    assert main(["context", "--config", str(path), "--memory", "8GiB", "--step", "64", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["variants"].values()
    assert {row["tokens"] for row in rows} == {positions} and all("size" in row["refused"] for row in rows)
    for command in ("profile", "plan"):
        assert main([command, "--config", str(path), "--seq", str(positions + 1)]) == 1
        said = capsys.readouterr().err
        assert "expected one that takes this batch" in said and said.count("\n") == 1
    ids = torch.full((1, 64), 1 << 40)  # as of torch.empty: of ids shapes count
    assert profile(
        build_language_model(read_config(str(path)), UNCONVERTED_MODEL, torch.float32),
        {"input_ids": ids, "labels": ids},
        device="h200",
    )
    assert main(["context", "--config", str(path), "--memory", "8GiB", "--step", "1024"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_what_one_layer_cannot_hold_is_answered_without_a_prediction(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ckptfused.cli.language_models.language_step", pytest.fail)
    assert main(["context", "--config", "llama-3-8b", "--device", "h100", "--batch", "100000"]) == 1
    said = capsys.readouterr().err
    assert "the result of one layer alone takes 195.31 GiB" in said and said.count("\n") == 1


@pytest.mark.parametrize("command", ["plan", "profile"])
@pytest.mark.parametrize("batch", ["9" * 11, "9" * 21])
def test_a_batch_that_no_tensor_holds(command: str, batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--config", "llama-3-8b", "--device", "h100", "--batch", batch, "--seq", "99999999"]
    assert main([command, *given]) == 1
    assert "expected at most 1,099,511,627,776 tokens a step" in capsys.readouterr().err


def test_an_absurd_batch_is_answered_soon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None of some 12,000 tiles a layer is counted: the answer is one sentence."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small("llama-3-8b", 1) | {"intermediate_size": 1 << 18}))
    assert main(["context", "--config", str(path), "--memory", "8GiB", "--batch", "100000"]) == 1
    said = capsys.readouterr().err
    assert "run in at most 7,000 pieces of 1.00 GiB, got 25,600,000 tokens: predict fewer" in said
    assert said.count("\n") == 1
