"""Policies: what they say, their text, where they are recorded, and what `convert` makes of them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import ckptfused
from ckptfused import CheckpointPolicy, LayerMode
from ckptfused.spec import KEEP_PRESETS
from tests.models.compare import run
from tests.models.small import llama
from tests.models.zoo import text_batch

POLICIES = {
    "inputs": CheckpointPolicy(),
    "names": CheckpointPolicy.uniform(["qkv", "attn"], scratch="64MiB", offload=True),
    "none": CheckpointPolicy.none(loss="chunked"),
    "every": CheckpointPolicy.every(3),
    "every-all": CheckpointPolicy.every(3, others="all"),
    "ffn": CheckpointPolicy.selective("ffn"),
    "attention": CheckpointPolicy.selective("attention"),
    "segments": CheckpointPolicy.segments(4, "all"),
    "lengths": CheckpointPolicy.segments((3, 1, 2), "all"),
    "whole": CheckpointPolicy.whole_model(None),
    "layers": CheckpointPolicy.per_layer(["inputs", "inputs", None, LayerMode("all", offload=True)], scratch=1024),
    "loss": CheckpointPolicy.uniform(loss="chunked", loss_scratch="1MiB"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_json_both_ways(name: str) -> None:
    policy = POLICIES[name]
    for again in (CheckpointPolicy.from_json(policy.to_json()), CheckpointPolicy.from_dict(policy.to_dict())):
        assert again == policy and hash(again) == hash(policy) and again.digest == policy.digest
    assert policy.digest in repr(policy)


def test_all_differ() -> None:
    """In every field, also as digests."""
    digests = {policy.digest for policy in POLICIES.values()}
    digests |= {
        CheckpointPolicy.uniform(scratch=1024).digest,
        CheckpointPolicy.uniform(offload=True).digest,
        CheckpointPolicy((LayerMode(),), repeat=False).digest,
        CheckpointPolicy.uniform(loss="chunked").digest,
        CheckpointPolicy.segments(3, "all").digest,
        CheckpointPolicy.segments([1, 3, 2], "all").digest,
    }
    assert len(digests) == len(POLICIES) + 6


def test_the_names_of_a_preset_are_the_preset() -> None:
    for preset, names in KEEP_PRESETS.items():
        own = LayerMode(tuple(reversed(names)))
        assert own == LayerMode(preset) and hash(own) == hash(LayerMode(preset)) and own.keep == preset
        assert CheckpointPolicy.uniform(set(names)).digest == CheckpointPolicy.uniform(preset).digest
    assert LayerMode(("gu", "attn")).keep == ("attn", "gu")  # nobody's


def test_a_digest_is_the_same_everywhere() -> None:
    assert CheckpointPolicy().digest == "93b9b381b2d0"


def test_equal_layers_share_a_line() -> None:
    text = CheckpointPolicy.per_layer([None] * 30 + ["all"] * 2, loss="chunked").to_json()
    assert text == (
        '{\n  "version": 1,\n  "layers": [\n    {"keep": null, "count": 30},\n    {"keep": "all", "count": 2}\n  ],\n'
        '  "repeat": false,\n  "loss": "chunked"\n}\n'
    )


def test_what_is_the_same_is_equal() -> None:
    assert CheckpointPolicy.every(1) == CheckpointPolicy.every(4, others="inputs") == CheckpointPolicy.uniform("inputs")
    assert CheckpointPolicy.uniform(("qkv", "attn")) == CheckpointPolicy.uniform(["attn", "qkv"])
    assert CheckpointPolicy.uniform(scratch="1KiB") == CheckpointPolicy.uniform(scratch=1024)
    assert CheckpointPolicy.whole_model() == CheckpointPolicy.segments(1)


def test_modes() -> None:
    inputs, kept = LayerMode(), LayerMode("all")
    assert CheckpointPolicy.every(3, others="all").modes(7) == (inputs, kept, kept) * 2 + (inputs,)
    assert CheckpointPolicy.every(2).modes(3) == (inputs, LayerMode(None), inputs)
    assert CheckpointPolicy.per_layer([kept, "inputs"]).modes(2) == (kept, inputs)
    assert CheckpointPolicy().modes(0) == ()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: LayerMode("everything"), ValueError, "keep: expected a preset"),
        (lambda: LayerMode(("attn", "atn")), ValueError, "'atn'"),
        (lambda: LayerMode(3), TypeError, "keep: expected"),  # type: ignore[arg-type]
        (lambda: LayerMode(scratch=0), ValueError, "scratch: expected"),
        (lambda: LayerMode(offload="no"), TypeError, "offload: expected a bool"),  # type: ignore[arg-type]
        (lambda: LayerMode(None, offload=True), ValueError, "runs as it was"),
        (lambda: CheckpointPolicy.every(0), ValueError, "k: expected"),
        (lambda: CheckpointPolicy.selective("head"), ValueError, "half: expected one of ffn, attention"),
        (lambda: CheckpointPolicy.segments(0), ValueError, "segment_count: expected"),
        (lambda: CheckpointPolicy.segments((2, 0)), ValueError, "segment_lengths: expected"),
        (lambda: CheckpointPolicy.segments(2.5), TypeError, "segment_count: expected an integer, got 2.5"),
        (lambda: CheckpointPolicy.segments("3"), TypeError, "segment_count: expected an integer, got '3'"),
        (lambda: CheckpointPolicy.per_layer("all"), TypeError, "layers: expected a mode, .* of each layer, got 'all'"),
        (lambda: CheckpointPolicy.segments((2, 1)).modes(4), ValueError, r"of 4 layers.* got 3 in .*=\[2, 1\]"),
        (
            lambda: CheckpointPolicy(segment_count=1, segment_lengths=(1,)),
            ValueError,
            "segment_count=, not both",
        ),
        (lambda: CheckpointPolicy.uniform(loss="small"), ValueError, "loss: expected"),
        (lambda: CheckpointPolicy.uniform(loss_scratch=1), ValueError, "loss_scratch: pass loss="),
        (lambda: CheckpointPolicy(()), ValueError, "layers: with repeat=True pass one or more"),
        (lambda: CheckpointPolicy(("all",)), TypeError, "layers: expected values of LayerMode"),  # type: ignore[arg-type]
        (lambda: CheckpointPolicy.per_layer(["all"] * 3).modes(4), ValueError, "4 layers, which the model has, got 3"),
        (
            lambda: CheckpointPolicy.segments(5).modes(4),
            ValueError,
            "no more segments than layers, of which the model has 4",
        ),
        (lambda: CheckpointPolicy.from_json("{"), ValueError, "expected JSON"),
        (lambda: CheckpointPolicy.from_json("[]"), TypeError, "expected a dict"),
        (lambda: CheckpointPolicy.from_dict({"layers": []}), ValueError, "expected version 1.*got None"),
        (lambda: CheckpointPolicy.from_dict({"version": 1, "layer": []}), ValueError, "among .*layers.*got 'layer'"),
        (lambda: CheckpointPolicy.from_dict({"version": 1}), TypeError, "list of layers"),
        (lambda: _line({"keep": "most"}), ValueError, r"layers\[0\]: keep: expected a preset"),
        (lambda: _line({"kept": "all"}), ValueError, r"layers\[0\]: expected keys among keep, .*got 'kept'"),
        (lambda: _line({"count": 2}), ValueError, r"layers\[0\]: .*no key 'keep'"),
        (lambda: _line({"keep": "all", "count": 0}), ValueError, r"layers\[0\]: count: expected"),
    ],
)
def test_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def _line(line: dict[str, Any]) -> CheckpointPolicy:
    return CheckpointPolicy.from_dict({"version": 1, "layers": [line]})


def test_recorded_in_a_config(tmp_path: Any) -> None:
    import transformers

    policy, model = POLICIES["layers"], llama()
    assert CheckpointPolicy.recorded(model.config) is None
    policy.record(model.config)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["ckptfused_policy"]["layers"][0]["count"] == 2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert CheckpointPolicy.recorded(again.config) == policy


def test_recorded_elsewhere(tmp_path: Any) -> None:
    import transformers

    policy, plain = POLICIES["every"], {}  # type: ignore[var-annotated]
    policy.record(plain)
    assert CheckpointPolicy.recorded(json.loads(json.dumps(plain))) == policy
    assert CheckpointPolicy.recorded({"ckptfused_policy": policy.to_json()}) == policy
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert CheckpointPolicy.recorded(arguments) is None
    policy.record(arguments)
    torch.save(arguments, tmp_path / "training_args.bin")
    again = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert CheckpointPolicy.recorded(again) == CheckpointPolicy.recorded(copy.deepcopy(arguments)) == policy


def test_a_policy_of_no_layers_says_so() -> None:
    assert str(CheckpointPolicy(layers=(), repeat=False)).endswith(": of a model without layers")


def test_each_layer_as_the_policy_says() -> None:
    """Same gradients, other bytes; the report says what differs; `revert` and a second `convert` undo it."""
    model = llama(num_hidden_layers=4)
    batch = text_batch()
    wanted = run(copy.deepcopy(model), batch)
    names = ckptfused.convert(model, "all").layers
    fused = run(model, batch)
    policy = CheckpointPolicy.per_layer([None, "inputs", LayerMode("all", scratch="1MiB"), ("qkv", "attn")])
    report = ckptfused.convert(model, policy=policy)
    assert [layer.path for layer in report.layers] == ["original", "fused", "fused", "fused"]
    assert [layer.name for layer in report.layers] == [layer.name for layer in names]
    assert report.layers[0].after == report.layers[0].before
    sizes = [layer.after for layer in report.layers[1:]]
    assert sizes[0] < sizes[2] < sizes[1] == names[2].after  # type: ignore[operator]
    lines = str(report).splitlines()
    assert "mode" in lines[0] and len(lines) >= 6 and policy.digest in lines[5]
    assert "scratch=1,048,576 bytes" in lines[3] and "keep=('attn', 'qkv')" in lines[4]
    layers = model.model.layers
    assert "forward" not in vars(layers[0]) and layers[2].forward.mode.scratch == 1 << 20
    got = run(model, batch)
    for name in got:
        same = fused if name.split(".")[2:3] != ["0"] else wanted
        torch.testing.assert_close(got[name], same[name], rtol=1e-4, atol=1e-6)
    ckptfused.convert(model, policy=CheckpointPolicy.none())
    assert not any("forward" in vars(module) for module in model.modules())
    again = run(model, batch)
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)
    ckptfused.convert(model, policy=policy)
    assert ckptfused.revert(model) == 3


def test_one_offloads() -> None:
    model = llama(num_hidden_layers=2)
    report = ckptfused.convert(model, policy=CheckpointPolicy.per_layer([LayerMode(offload=True), "inputs"]))
    first, second = model.model.layers
    assert first.forward.offloader is not None and second.forward.offloader is None
    assert any(note.startswith("offload:") for note in report.notes)


def test_selective_replays_one_half() -> None:
    """In bytes: QKV, o, lse and mid in one, mid, gate and up in the other."""
    model = llama(num_hidden_layers=1)
    config = model.config
    c, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    h, g = config.num_attention_heads, config.num_key_value_heads
    (ffn,) = ckptfused.convert(model, policy=CheckpointPolicy.selective("ffn")).layers
    assert ffn.after == 4 * (c + h * d + h + c + (h + 2 * g) * d)
    (attention,) = ckptfused.convert(model, policy=CheckpointPolicy.selective("attention")).layers
    assert attention.after == 4 * (c + c + 2 * f)


def test_without_an_adapter_halves_are_no_halves() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
    report = ckptfused.convert(model, policy=CheckpointPolicy.selective("ffn"))
    assert [layer.path for layer in report.layers] == ["generic", "generic"]
    assert all("keep does not apply" in layer.reason for layer in report.layers)
    assert not any("keep does not apply" in layer.reason for layer in ckptfused.convert(model).layers)


@pytest.mark.parametrize("options", [{"keep": "inputs"}, {"loss": "chunked"}, {"scratch": 4096}, {"offload": True}])
def test_a_policy_stands_alone(options: dict[str, Any]) -> None:
    model = llama()
    with pytest.raises(ValueError, match=f"pass either policy= or {next(iter(options))}=.*, not both"):
        ckptfused.convert(model, policy=CheckpointPolicy(), **options)
    with pytest.raises(TypeError, match="policy: expected a CheckpointPolicy, got 'inputs'"):
        ckptfused.convert(model, policy="inputs")  # type: ignore[arg-type]


def test_another_number_of_layers() -> None:
    """The model is as it was: here converted in another way."""
    model = llama()
    ckptfused.convert(model, "all")
    before = [layer.forward for layer in model.model.layers]
    with pytest.raises(ValueError, match="expected modes of 2 layers, which the model has, got 3"):
        ckptfused.convert(model, policy=CheckpointPolicy.per_layer(["inputs"] * 3))
    assert [layer.forward for layer in model.model.layers] == before


def test_the_loss_too() -> None:
    model = llama()
    report = ckptfused.convert(model, policy=CheckpointPolicy.none(loss="chunked", loss_scratch="64KiB"))
    assert [head.path for head in report.heads] == ["chunked"] and report.fused == 0
    ckptfused.convert(model, policy=CheckpointPolicy.none())
    assert "forward" not in vars(model)
