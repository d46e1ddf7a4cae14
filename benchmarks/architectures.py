"""What becomes of every decoder of transformers: a small random model of each is converted, trained a step, compared.

Each causal language model that transformers knows is built from its configuration, shrunk, in float64 and without
dropout. A step of the converted model is compared with one of the model as it was: the loss and every gradient. Prints
a Markdown page; docs/architectures.md is the last one that was printed.

    python benchmarks/architectures.py > docs/architectures.md
    python benchmarks/architectures.py olmo2 falcon
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import ckptfused
from benchmarks.architecture_sizes import SINGLE, smaller
from ckptfused.layer.parts import Reason
from ckptfused.models import find
from ckptfused.models.forward import ConvertedForward
from ckptfused.models.report import LayerReport

TOKENS = 12
SEEN_LATER = "what it takes is seen at its first call"
MOST = 10**7
"""Parameters of a model: more are those of a configuration that was not shrunk."""
LIMIT = 1e-4
"""Error of a gradient relative to its largest value. Most decoders have float32 inside (norms, softmax), blocks have
float64 there."""
INTRODUCTION = """# Architectures

What `convert` makes of the decoders of transformers {version}, as `python benchmarks/architectures.py` printed it: of
each causal language model a small random one, built from its shrunk configuration in float64 and without dropout, is
converted and trained a step. Bytes are those that a layer saves for backward per token, before and after, the layers'
mean. Gradients are compared with those of the model as it was; the largest difference is relative to a gradient's
largest value.

A `derived` layer has no adapter: [its own code was read and proved](convert.md#layers-without-an-adapter).
"""


class Row(NamedTuple):
    """One architecture: what became of its layers."""

    name: str
    kind: str
    paths: Counter[str]
    """Layers by path: "fused", "part", "generic"."""
    families: tuple[str, ...]
    before: float | None
    after: float | None
    error: float | None
    """Of the gradients; None where the model as it was does not run."""
    why: str

    @property
    def path(self) -> str:
        """One word for all layers."""
        if not self.paths:
            return "–"
        return next(iter(self.paths)) if len(self.paths) == 1 else "mixed"

    def __str__(self) -> str:
        number = lambda v: "?" if v is None else f"{v:,.0f}"  # noqa: E731
        count = ", ".join(f"{count} {path}" for path, count in sorted(self.paths.items()))
        error = "" if self.error is None else f"{self.error:.0e}"
        cells = (self.name, self.kind, count or "–", ", ".join(self.families), number(self.before), number(self.after))
        return "| " + " | ".join((*cells, error, self.why)) + " |"


def names() -> dict[str, str]:
    """The model types of transformers' causal language models, with the class of each, those of text alone."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for name, kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name not in CONFIG_MAPPING or kind in found.values():
            continue
        config = CONFIG_MAPPING[name]
        if not {"text_config", "decoder", "audio_encoder"} & {*getattr(config, "sub_configs", {})}:
            found[name] = kind
    return found


def model_of(name: str, kind: str) -> Any:
    """A small model in float64, without dropout, its weights random. **Raises** whatever building it does."""
    import transformers

    made: Any = getattr(transformers, kind)
    config = smaller(transformers.CONFIG_MAPPING[name], name)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        size = sum(p.numel() for p in made(copy.deepcopy(config)).parameters())
    if size > MOST:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    try:
        config._attn_implementation = "sdpa"
        model = made(config)
    except ValueError:
        config._attn_implementation = "eager"
        model = made(config)
    model = (model.float() if name in SINGLE else model.double()).train()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * (0.1 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5)
            parameter.copy_(parameter + noise if parameter.dim() < 2 else noise)
    return model


def step(model: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss of one batch and all gradients."""
    tokens = torch.randint(3, 90, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    made = model(input_ids=tokens, use_cache=False)
    logits = made.logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())
    loss.backward()
    return float(loss), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def swept(name: str, kind: str) -> Row:
    """What becomes of one architecture."""
    try:
        model = model_of(name, kind)
        loss, gradients = step(copy.deepcopy(model))
    except Exception as error:  # what does not run without us has nothing to be compared
        said = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        return Row(name, kind, Counter(), (), None, None, None, f"does not run as it is: {said}")
    report = ckptfused.convert(model)
    reasons = _reasons(model)
    found, ours = step(model)
    worst = abs(found - loss) / abs(loss)
    least = 1e-3 * max(float(g.abs().max()) for g in gradients.values())
    for key in gradients.keys() | ours.keys():
        if key not in ours or key not in gradients:
            worst = float("inf")
            continue
        a, b = gradients[key], ours[key]
        worst = max(worst, float((a - b).abs().max()) / max(float(a.abs().max()), least))
    return _row(name, kind, model, report.layers, reasons, worst)


def _reasons(model: nn.Module) -> dict[int, str]:
    """Why calls of layers are not fused, by the layer: filled while the model runs."""
    found: dict[int, str] = {}
    for _, layer, _ in find.layers(model):
        forward: Any = vars(layer).get("forward")
        if isinstance(forward, ConvertedForward):
            vars(layer)["forward"] = _noting(forward, found, id(layer))
    return found


def _noting(forward: ConvertedForward, found: dict[int, str], key: int) -> ConvertedForward:
    class Noting(ConvertedForward):
        def unfused(self, reason: Reason, args: Any, kwargs: Any) -> Any:
            found[key] = reason.text
            return super().unfused(reason, args, kwargs)

    forward.__class__ = Noting
    return forward


def _row(
    name: str, kind: str, model: nn.Module, layers: tuple[LayerReport, ...], reasons: dict[int, str], error: float
) -> Row:
    paths: Counter[str] = Counter()
    families: dict[str, None] = {}
    why: dict[str, None] = {}
    for one in layers:
        layer = model.get_submodule(one.name)
        reason = reasons.get(id(layer))
        path = "generic" if reason is not None else "part" if one.path == "part" else "fused"
        paths[path] += 1
        if reason is None and one.family is not None:
            families[one.family] = None
        settled = path == "part" or (reason and one.path == "generic" and not one.reason.endswith(SEEN_LATER))
        said = one.reason if settled else reason
        if said:
            why[_short(said)] = None
    sizes = [(one.before, one.after) for one in layers]
    means = [[size[i] for size in sizes if size[i] is not None] for i in (0, 1)]
    before, after = (sum(mean) / len(mean) if mean else None for mean in means)
    if "generic" in paths and paths.total() == paths["generic"]:
        families = {}
    return Row(name, kind, paths, tuple(families), before, after, error, "; ".join(why))


def _short(reason: str) -> str:
    """A reason with the file's name in place of its path."""
    head, found, rest = reason.partition(".py:")
    return f"{head.rpartition('/')[2]}{found}{rest}".replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types; default: all")
    asked = parser.parse_args().names
    import transformers

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known = names()
    print(INTRODUCTION.format(version=transformers.__version__))
    print("| model type | class | layers | read by | bytes/token before | after | gradients | why not whole |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for name in asked or known:
        rows.append(swept(name, known[name]))
        print(rows[-1], flush=True)
    ran = [row for row in rows if row.error is not None]
    total = Counter(row.path for row in ran)
    print(f"\n{len(ran)} architectures ran: {', '.join(f'{n} {path}' for path, n in total.most_common())}.")
    wrong = [row.name for row in ran if row.error is None or not row.error <= LIMIT]
    if wrong:
        print(f"gradients differ: {', '.join(wrong)}", file=sys.stderr)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
