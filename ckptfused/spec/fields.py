"""The one table of what describes a block: the fields of the frame, of both halves and of the block.

A declaration is a row: name, type, default, allowed values, one line of meaning. The checks, the text form, its parsing
and `csrc/block/spec_fields.h` are made from these rows; `slots.py` says which tensors they bring.
"""

# No `from __future__ import annotations`: `table.rows` reads the annotations themselves.
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

from .activations import ACTIVATIONS, GATED_ACTIVATIONS
from .adapters import Adapter, checked_adapters
from .quantized import Quantized, checked_quantized
from .table import Key, check_rows

MAX_HEAD_DIM = 256
NORMS = ("none", "layernorm", "rmsnorm", "gemma", "layernorm1p")
BIASED_NORMS = ("layernorm", "layernorm1p")
POST_NORMS = (*NORMS, "layerscale")
"""LayerScale multiplies by its weight and normalises nothing."""
QK_PLACES = ("head", "row", "turned")
ROPES = ("none", "half", "interleaved")
OUTPUT_GATES = ("none", "entry", "head")
MASK_KINDS = ("none", "keep", "drop", "add")
SCALAR_TYPES = {"float64": "Double", "float32": "Float", "bfloat16": "BFloat16", "float16": "Half"}
"""The types of matrix products, with their names in c10::ScalarType."""
COMPUTE_TYPES = tuple(SCALAR_TYPES)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What both halves share: `out_norm?(x + m * drop(post_norm?(f(pre_norm?(x)))))`, x left out without a residual."""

    pre: Annotated[str, Key("Norm of x.", NORMS)] = "none"
    post: Annotated[str, Key("Norm of what the half adds to x.", POST_NORMS)] = "none"
    out: Annotated[str, Key("Closing norm, of the sum.", NORMS)] = "none"
    pre_eps: Annotated[float, Key("What `pre` adds to the variance.", least=0)] = 1e-5
    post_eps: Annotated[float, Key("What `post` adds to the variance.", least=0)] = 1e-5
    out_eps: Annotated[float, Key("What `out` adds to the variance.", least=0)] = 1e-5
    joint: Annotated[bool, Key("One tensor holds q, k and v rows (slot q_w), or gate and up rows (gate_w).")] = False
    transposed: Annotated[bool, Key("Weights are stored [in, out] (GPT-2's Conv1D), not [out, in].")] = False
    p_res: Annotated[float, Key("Dropout of what the half adds to x.", probability=True)] = 0.0
    m: Annotated[float, Key("Factor of what the half adds to x.")] = 1.0
    lora: Annotated[tuple[Adapter, ...], Key("Adapters beside projections, in the order of adding.")] = ()
    quant: Annotated[tuple[Quantized, ...], Key("Projections whose weights are stored in few bits.")] = ()
    residual: Annotated[bool, Key("Whether x is added to what the half makes of it.")] = True
    modulated: Annotated[bool, Key("Vectors of pre and post have a row for each batch element: [B, C] (DiT).")] = False


@dataclass(frozen=True)
class AttentionSpec(Frame):
    """The attention half: `out_norm?(x + m * drop(post_norm?(attention(pre_norm?(x)))))`.

    **Raises** `ValueError` or `TypeError` naming the field, what was expected and what came.
    """

    heads: Annotated[int, Key("Query heads, H.", least=1)]
    kv_heads: Annotated[int, Key("Key and value heads, G: a divisor of H.", least=1)]
    head_dim: Annotated[int, Key("Width of a head, D: at most MAX_HEAD_DIM.", least=1)]
    _: KW_ONLY
    interleaved: Annotated[bool, Key("Joint only: rows are [H, 3, D], of each head q, k and v (GPT-NeoX).")] = False
    scale: Annotated[float | None, Key("Factor of the logits; None: 1/sqrt(head_dim).")] = None
    causal: Annotated[bool, Key("Key j is hidden from query i where j > i.", called=True)] = False
    window: Annotated[
        int, Key("Key j is visible where i - j < window (j - i too, not causal); 0: no window.", called=True)
    ] = 0
    softcap: Annotated[float, Key("Logits become softcap * tanh(logits / softcap); 0: as they are.", least=0)] = 0.0
    sinks: Annotated[bool, Key("Each head has a logit of a key beside all others, whose value is 0.")] = False
    output_gate: Annotated[
        str, Key("Sigmoids of a projection, beside that of q, multiply o: each entry, or each head.", OUTPUT_GATES)
    ] = "none"
    gate_in_q: Annotated[bool, Key("Rows of q's tensor are [H, 2, D], of each head q and gate (Qwen3-Next).")] = False
    rope: Annotated[str, Key("How RoPE pairs the entries of a head.", ROPES, called=True)] = "none"
    rotary_dim: Annotated[
        int, Key("RoPE turns the first rotary_dim entries of a head; 0: the whole head.", called=True)
    ] = 0
    qk_norm: Annotated[str, Key("Norm of q and k.", NORMS)] = "none"
    qk_eps: Annotated[float, Key("What `qk_norm` adds to the variance.", least=0)] = 1e-5
    qk_place: Annotated[
        str, Key("What `qk_norm` is of: a head, all heads of q or k as one row, a head that RoPE turned.", QK_PLACES)
    ] = "head"
    v_norm: Annotated[str, Key("Norm of each head of v, which has no weights (Gemma 4).", NORMS)] = "none"
    v_eps: Annotated[float, Key("What `v_norm` adds to the variance.", least=0)] = 1e-5
    q_scale: Annotated[bool, Key("The call gives a factor of q for each position (Ministral 3).", called=True)] = False
    p_attn: Annotated[float, Key("Dropout of the attention probabilities.", probability=True)] = 0.0
    mask: Annotated[str, Key("The mask that the call gives.", MASK_KINDS, called=True)] = "none"
    padding: Annotated[str, Key("The padding mask that the call gives.", MASK_KINDS, called=True)] = "none"
    packed: Annotated[bool, Key("The call gives cu_seqlens: x holds sequences one after another.", called=True)] = False

    def __post_init__(self) -> None:
        check_rows(self, "attn.")
        if self.heads % self.kv_heads:
            raise ValueError(f"attn.kv_heads: expected a divisor of heads={self.heads}, got {self.kv_heads}")
        if self.interleaved and not self.joint:
            raise ValueError("attn.interleaved: expected one tensor for q, k and v (joint=True), got joint=False")
        if self.interleaved and self.heads != self.kv_heads:
            raise ValueError(f"attn.interleaved: expected kv_heads={self.heads}, as heads, got {self.kv_heads}")
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"attn.head_dim: expected at most {MAX_HEAD_DIM}, got {self.head_dim}")
        if self.rotary_dim > self.head_dim:
            raise ValueError(f"attn.rotary_dim: expected at most head_dim={self.head_dim}, got {self.rotary_dim}")
        if self.rope != "none" and self.rotary % 2:
            raise ValueError(f"attn.rotary_dim: expected an even number, got {self.rotary}")
        if self.gate_in_q and (self.joint or self.output_gate != "entry"):
            raise ValueError(
                "attn.gate_in_q: expected q apart from k and v and a gate of each entry, "
                f"got joint={self.joint}, output_gate={self.output_gate!r}"
            )
        if self.qk_place == "row" and (self.interleaved or self.gate_in_q):
            raise ValueError(
                "attn.qk_place: expected head or turned where the heads of q are not side by side, got 'row'"
            )
        if self.scale == 0:
            raise ValueError("attn.scale: expected a number other than 0 (None: 1/sqrt(head_dim)), got 0.0")
        if self.packed and (self.mask != "none" or self.padding != "none"):
            raise ValueError(
                "attn.packed: packed sequences take no mask and no padding, "
                f"got mask={self.mask!r}, padding={self.padding!r}"
            )
        targets = tuple(self.products(0))
        object.__setattr__(self, "lora", checked_adapters("attn.lora", self.lora, targets))
        object.__setattr__(self, "quant", checked_quantized("attn.quant", self.quant, targets, self.transposed))

    @property
    def rotary(self) -> int:
        """How many entries of a head RoPE turns."""
        return self.rotary_dim or self.head_dim

    @property
    def q_width(self) -> int:
        """H·D, the width of the queries and of the attention output."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """G·D, the width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def joint_width(self) -> int:
        """(H+2G)·D, the width of q, k and v together."""
        return self.q_width + 2 * self.kv_width

    @property
    def gate_width(self) -> int:
        """H·D or H, the width of the output gate; 0 without one."""
        return {"none": 0, "entry": self.q_width, "head": self.heads}[self.output_gate]

    @property
    def qkv_width(self) -> int:
        """The width of what the kept name `qkv` holds: q, k, v and the output gate."""
        return self.joint_width + self.gate_width

    def normed_width(self, stem: str) -> int:
        """How many entries the norm of q (`"q_norm"`) or k (`"k_norm"`) is over."""
        if self.qk_place != "row":
            return self.head_dim
        return self.q_width if stem == "q_norm" else self.kv_width

    def products(self, width: int) -> dict[str, tuple[int, int]]:
        """The projections of x, `width` wide, by name: how wide what they take is, and what they make."""
        made = {"q": self.joint_width} if self.joint else {"q": self.q_width, "k": self.kv_width, "v": self.kv_width}
        if self.gate_in_q:
            made["q"] += self.gate_width
        elif self.gate_width:
            made["gate"] = self.gate_width
        return {**{name: (width, out) for name, out in made.items()}, "o": (self.q_width, width)}


@dataclass(frozen=True)
class FFNSpec(Frame):
    """The FFN half: `out_norm?(x + m * drop(post_norm?(down(drop(act(...))))))`.

    **Raises** `ValueError` or `TypeError` naming the field, what was expected and what came.
    """

    act: Annotated[str, Key("The activation.", ACTIVATIONS)]
    hidden: Annotated[int, Key("Width of the hidden value, F.", least=1)]
    _: KW_ONLY
    p_hidden: Annotated[float, Key("Dropout of the hidden value.", probability=True)] = 0.0

    def __post_init__(self) -> None:
        check_rows(self, "ffn.")
        if self.joint and not self.gated:
            raise ValueError(
                f"ffn.joint: expected a gated activation ({', '.join(GATED_ACTIVATIONS)}), got act={self.act!r}"
            )
        targets = tuple(self.products(0))
        object.__setattr__(self, "lora", checked_adapters("ffn.lora", self.lora, targets))
        object.__setattr__(self, "quant", checked_quantized("ffn.quant", self.quant, targets, self.transposed))

    @property
    def gated(self) -> bool:
        """Whether the hidden value is act(gate) * up."""
        return self.act in GATED_ACTIVATIONS

    @property
    def gu_width(self) -> int:
        """2F for a gated FFN, F otherwise: the width of what the kept name `gu` holds."""
        return 2 * self.hidden if self.gated else self.hidden

    def products(self, width: int) -> dict[str, tuple[int, int]]:
        """The projections of x, `width` wide, by name: how wide what they take is, and what they make."""
        first = ("gate",) if self.joint else ("gate", "up") if self.gated else ("up",)
        made = self.gu_width if self.joint else self.hidden
        return {**dict.fromkeys(first, (width, made)), "down": (self.hidden, width)}


@dataclass(frozen=True)
class BlockFields:
    """The fields of a `BlockSpec`, one or two halves among them."""

    attn: AttentionSpec | None = None
    ffn: FFNSpec | None = None
    keep: Annotated[tuple[str, ...], Key("What is kept for backward beside x and the random state.")] = ()
    parallel: Annotated[
        bool | Literal["shared"], Key("Both halves add to the same x; 'shared': the FFN reads attn.pre's output.")
    ] = False
    scratch: Annotated[
        int, Key("Bytes of scratch above which the FFN, and on a CPU attention, goes in tiles; 0: by device.", least=0)
    ] = 0
    seq_first: Annotated[bool, Key("x is [T, B, C], not [B, T, C].")] = False
    compute: Annotated[str | None, Key("Type of the matrix products; None: the type of x.", COMPUTE_TYPES)] = None

    @property
    def halves(self) -> dict[str, AttentionSpec | FFNSpec]:
        """The halves that there are, by name, in order."""
        named = {"attn": self.attn, "ffn": self.ffn}
        return {name: half for name, half in named.items() if half is not None}

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The adapters by the prefix of their slots (`"attn.lora0"`), in the order of slots and sites."""
        return {f"{n}.lora{i}": a for n, half in self.halves.items() for i, a in enumerate(half.lora)}

    @property
    def quantized(self) -> dict[str, Quantized]:
        """The weights stored in few bits, by the prefix of the slots beside them (`"attn.quant0"`), in their order."""
        return {f"{n}.quant{i}": q for n, half in self.halves.items() for i, q in enumerate(half.quant)}
