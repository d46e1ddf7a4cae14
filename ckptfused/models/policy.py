"""What is decided of each layer of a model, and of its loss: plain data, which can be compared, written and read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from itertools import cycle, groupby, islice, pairwise
from typing import Any

from ckptfused.models.layer_mode import LayerMode
from ckptfused.sizes import counted, parse_bytes
from ckptfused.spec import Keep
from ckptfused.spec.checks import check_bool, check_choice, check_integer

LOSSES = ("chunked",)
PLACE = "ckptfused_policy"
"""The name under which a policy is recorded."""
MOST_RUNS = 6  # of equal layers, that a line names
_VERSION = 1
_HALVES = {"ffn": "all but ffn", "attention": "all but attention"}


@dataclass(frozen=True, repr=False)
class CheckpointPolicy:
    """What is decided of the layers of a model, in the order of `convert`'s report, and of its loss.

    Equal policies are equal (`==`), have one hash, one JSON and one `digest`, on every machine.

    **Raises** `ValueError` or `TypeError` for what is out of its range, naming it.
    """

    layers: tuple[LayerMode, ...] = (LayerMode(),)
    repeat: bool = True
    """Whether `layers` are for a model of any length, again and again; else for one of so many layers."""
    segment_count: int | None = None
    """Into how many segments, runs of layers that save their first input alone, the model is divided; what the layers
    keep they keep while their segment is replayed. None: each layer for itself, or what `segment_lengths` says."""
    loss: str | None = None
    """"chunked": language models make their loss without holding the logits; None: as it was."""
    loss_scratch: int | None = None
    """Bytes that the logits of a chunked loss may take at a time; None: by device."""
    segment_lengths: tuple[int, ...] | None = None
    """How many layers each segment has, where they are not as equal as can be. One alone is no segment: it runs in its
    own mode."""

    def __post_init__(self) -> None:
        layers = tuple(self.layers)
        for mode in layers:
            if not isinstance(mode, LayerMode):
                raise TypeError(f"layers: expected values of LayerMode, got {mode!r}")
        if check_bool("repeat", self.repeat):
            if not layers:
                raise ValueError("layers: with repeat=True pass one or more, got none")
            layers = layers[: _period(layers)]
        object.__setattr__(self, "layers", layers)
        if self.segment_count is not None:
            object.__setattr__(self, "segment_count", check_integer("segment_count", self.segment_count, 1))
        if self.segment_lengths is not None:
            if self.segment_count is not None:
                raise ValueError("segment_lengths: pass either segment_lengths= or segment_count=, not both")
            lengths = tuple(check_integer("segment_lengths", n, 1) for n in self.segment_lengths)
            object.__setattr__(self, "segment_lengths", lengths)
        if self.loss is not None:
            check_choice("loss", self.loss, LOSSES)
        if self.loss_scratch is not None:
            object.__setattr__(self, "loss_scratch", parse_bytes("loss_scratch", self.loss_scratch))
            if self.loss is None:
                raise ValueError('loss_scratch: pass loss="chunked" with it, or leave it out')

    # Constructors. `options` are, by name, `scratch` and `offload` of the layers, `loss` and `loss_scratch`.

    @classmethod
    def uniform(cls, keep: Keep | None = "inputs", **options: Any) -> CheckpointPolicy:
        """All layers alike."""
        mode, rest = _split(options)
        return cls((LayerMode(keep, **mode),), **rest)  # type: ignore[arg-type]

    @classmethod
    def none(cls, **options: Any) -> CheckpointPolicy:
        """All layers as they were: nothing is recomputed."""
        return cls.uniform(None, **options)

    @classmethod
    def every(cls, k: int, keep: Keep = "inputs", others: Keep | None = None, **options: Any) -> CheckpointPolicy:
        """The first of every k layers keeps `keep`. others: what those between keep; None: they are as they were."""
        mode, rest = _split(options)
        between = LayerMode(others, **({} if others is None else mode))  # type: ignore[arg-type]
        return cls((LayerMode(keep, **mode), *[between] * (check_integer("k", k, 1) - 1)), **rest)  # type: ignore[arg-type]

    @classmethod
    def selective(cls, half: str, **options: Any) -> CheckpointPolicy:
        """Each layer recomputes one half alone, "ffn" or "attention"; what has no halves, the whole."""
        check_choice("half", half, tuple(_HALVES))
        return cls.uniform(_HALVES[half], **options)

    @classmethod
    def segments(cls, n: int | Sequence[int], keep: Keep | None = "inputs", **options: Any) -> CheckpointPolicy:
        """n runs of layers, as equal in length as can be, each with one saved input; or runs of these lengths, of which
        one of a single layer is no segment.

        keep: what each layer keeps while its segment is replayed; None: it runs as it was, in the replay, too.
        """
        mode, rest = _split(options)
        several = isinstance(n, Iterable) and not isinstance(n, str)
        divided = {"segment_lengths": tuple(n)} if several else {"segment_count": n}  # type: ignore[arg-type]
        return cls((LayerMode(keep, **mode),), **divided, **rest)  # type: ignore[arg-type]

    @classmethod
    def whole_model(cls, keep: Keep | None = "inputs", **options: Any) -> CheckpointPolicy:
        """All layers as one segment: the least that can be saved, the most that a replay holds."""
        return cls.segments(1, keep, **options)

    @classmethod
    def per_layer(cls, layers: Iterable[LayerMode | Keep | None], **options: Any) -> CheckpointPolicy:
        """One mode, or what is kept, for each layer of a model that has so many."""
        mode, rest = _split(options)
        if isinstance(layers, str) or not isinstance(layers, Iterable):
            raise TypeError(f"layers: expected a mode, or what is kept, of each layer, got {layers!r}")
        modes = tuple(
            x if isinstance(x, LayerMode) else LayerMode(x, **({} if x is None else mode))  # type: ignore[arg-type]
            for x in layers
        )
        return cls(modes, repeat=False, **rest)

    def modes(self, count: int) -> tuple[LayerMode, ...]:
        """The modes of a model's layers, of which there are `count`.

        **Raises** `ValueError` if the policy is for another number of layers, or divides into more segments than there
        are layers, or into segments of more or fewer.
        """
        check_integer("count", count, 0)
        if not self.repeat and len(self.layers) != count:
            raise ValueError(
                f"policy: expected modes of {counted(count, 'layer')}, which the model has, got {len(self.layers)} "
                f"(policy {self.digest}). The layers are those that ckptfused.convert(model) reports, in that order"
            )
        if self.segment_count is not None and self.segment_count > max(count, 1):
            raise ValueError(
                f"policy: expected no more segments than layers, of which the model has {count}, got "
                f"{self.segment_count}"
            )
        if self.segment_lengths is not None and sum(self.segment_lengths) != count:
            raise ValueError(
                f"policy: expected segments of {counted(count, 'layer')}, which the model has, got "
                f"{sum(self.segment_lengths)} in segment_lengths={list(self.segment_lengths)}"
            )
        return tuple(islice(cycle(self.layers), count)) if self.layers else ()

    @property
    def is_divided(self) -> bool:
        """Whether it joins layers to segments."""
        return self.segment_count is not None or self.segment_lengths is not None

    def lengths(self, count: int) -> tuple[int, ...]:
        """Lengths of the segments of so many layers; where there are none, all 1."""
        if self.segment_lengths is not None:
            return self.segment_lengths
        segments, ends = count if self.segment_count is None else self.segment_count, [0]
        for left in range(segments, 0, -1):
            ends.append(ends[-1] + (count - ends[-1]) // left)
        return tuple(end - begin for begin, end in pairwise(ends))

    # As text and plain data.

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain data, of which JSON is made; what is as by default is left out."""
        runs = [(mode, len(list(run))) for mode, run in groupby(self.layers)]
        lines = [_told(mode, ("keep",)) | ({"count": n} if n > 1 else {}) for mode, n in runs]
        told = {name: value for name, value in _told(self).items() if name not in ("layers", "repeat")}
        return {"version": _VERSION, "layers": lines, "repeat": self.repeat, **told}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CheckpointPolicy:
        """The inverse of `to_dict`. **Raises** `ValueError` or `TypeError` for what it does not know, naming it."""
        if not isinstance(data, Mapping):
            raise TypeError(f"policy: expected a dict, got {data!r}")
        if data.get("version") != _VERSION:
            raise ValueError(
                f"policy: expected version {_VERSION}, which this ckptfused reads, got {data.get('version')}"
            )
        _check_keys("policy", data, ("version", *(field.name for field in fields(cls))))
        lines = data.get("layers")
        if not isinstance(lines, list | tuple):
            raise TypeError(f"policy: expected a list of layers, got {lines!r}")
        layers: list[LayerMode] = []
        for i, line in enumerate(lines):
            where = f"policy: layers[{i}]"
            if not isinstance(line, Mapping):
                raise TypeError(f'{where}: expected {{"keep": …}}, got {line!r}')
            _check_keys(where, line, ("keep", "scratch", "offload", "count"))
            if "keep" not in line:
                raise ValueError(f"{where}: expected what it keeps, got no key 'keep' among {', '.join(line)}")
            rest = {name: value for name, value in line.items() if name != "count"}
            try:
                layers += [LayerMode(**rest)] * check_integer("count", line.get("count", 1), 1)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{where}: {error}") from None
        rest = {name: value for name, value in data.items() if name not in ("version", "layers")}
        return cls(tuple(layers), **rest)

    def to_json(self) -> str:
        """A text of which a line tells of a run of equal layers."""
        data = self.to_dict()
        layers = ",\n".join(f"    {json.dumps(line)}" for line in data.pop("layers"))
        version, *rest = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in data.items())
        return ",\n".join([f"{{\n{version}", f'  "layers": [\n{layers}\n  ]', *rest]) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> CheckpointPolicy:
        """The inverse of `to_json`. **Raises** as `from_dict`, and `ValueError` for what is no JSON."""
        if not isinstance(text, str | bytes):
            raise TypeError(f"policy: expected a text of JSON, got {type(text).__name__}")
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"policy: expected JSON, got a text in which {error}") from None
        return cls.from_dict(data)

    @property
    def digest(self) -> str:
        """Twelve letters that tell this policy from others, the same on every machine."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        runs = [(mode, len(list(run))) for mode, run in groupby(self.layers)]
        if len(runs) > MOST_RUNS:
            said = [f"{len(self.layers)} layers, each as it is listed"]
        elif len(self.layers) == 1 and self.repeat:
            said = [str(self.layers[0])]
        else:
            said = [" | ".join(f"{n} × {mode}" for mode, n in runs) + (", again and again" if self.repeat else "")]
        said += [f"{name}={value!r}" for name, value in _told(self).items() if name not in ("layers", "repeat")]
        return f"policy {self.digest}: {', '.join(filter(None, said)) or 'of a model without layers'}"

    def __repr__(self) -> str:
        return f"<Checkpoint{str(self)[0].upper()}{str(self)[1:]}>"

    # In the place where a run keeps its settings.

    def record(self, config: Any) -> None:
        """Writes the policy into a Hugging Face config, which saves it with the model, `TrainingArguments`, any other
        object that takes attributes, or a dict, under the name "ckptfused_policy"."""
        if isinstance(config, MutableMapping):
            config[PLACE] = self.to_dict()
        else:
            setattr(config, PLACE, self.to_dict())

    @classmethod
    def recorded(cls, config: Any) -> CheckpointPolicy | None:
        """The policy that `record` wrote, or JSON that was put there; None if there is none."""
        found = config.get(PLACE) if isinstance(config, Mapping) else getattr(config, PLACE, None)
        if found is None or isinstance(found, cls):
            return found
        return cls.from_json(found) if isinstance(found, str) else cls.from_dict(found)


def _period(layers: tuple[LayerMode, ...]) -> int:
    """The least number of layers of which these are a repetition."""
    n = len(layers)
    return next(k for k in range(1, n + 1) if n % k == 0 and layers == layers[:k] * (n // k))


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A constructor's options: those of the layers, and those of the policy."""
    mode = {name: value for name, value in options.items() if name in ("scratch", "offload")}
    return mode, {name: value for name, value in options.items() if name not in mode}


def _told(data: Any, always: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass that are not as by default."""
    values = ((field, getattr(data, field.name)) for field in fields(data))
    told = {field.name: value for field, value in values if field.name in always or value != field.default}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}


def _check_keys(where: str, data: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in data:
        if name not in known:
            raise ValueError(f"{where}: expected keys among {', '.join(known)}, got {name!r}")
