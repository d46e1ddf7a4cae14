"""Written-out blocks that a vector for each batch element modulates, and changes of one place in them."""

from __future__ import annotations

DIT = """
def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Block(nn.Module):
    def __init__(self, width=24, heads=4, p=0.0):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(p)
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2, self.act = nn.Linear(width, 40), nn.Linear(40, width), nn.GELU(approximate="tanh")
        self.adaLN = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def attend(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.drop.p if self.training else 0.0)
        return self.drop(self.proj(y.transpose(1, 2).reshape(B, T, C)))

    def feed(self, x):
        return self.fc2(self.drop(self.act(self.fc1(x))))

    def forward(self, x, cond):
        a, b, g, d, e, h = self.adaLN(cond).chunk(6, dim=1)
        x = x + g.unsqueeze(1) * self.attend(modulate(self.norm1(x), a, b))
        x = x + h.unsqueeze(1) * self.feed(modulate(self.norm2(x), d, e))
        return x
"""
"""The way of DiT: shift, scale and gate of each half from one projection (adaLN-Zero)."""

TABLE = (
    DIT.replace(
        "self.adaLN = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))",
        "self.table = nn.Parameter(torch.randn(6, width) / width**0.5)",
    )
    .replace(
        "self.adaLN(cond).chunk(6, dim=1)",
        "(self.table[None] + cond.repeat(1, 6).reshape(x.shape[0], 6, -1)).chunk(6, dim=1)",
    )
    .replace(".unsqueeze(1)", "")
)
"""The way of PixArt and Wan: a table of the layer's own is added to what all layers share."""

GAINS = (
    DIT.replace("nn.LayerNorm(", "nn.RMSNorm(")
    .replace("6 * width", "4 * width")
    .replace(
        "a, b, g, d, e, h = self.adaLN(cond).chunk(6, dim=1)", "b, g, e, h = self.adaLN(cond)[:, None].chunk(4, -1)"
    )
    .replace("g.unsqueeze(1)", "g.tanh()")
    .replace("h.unsqueeze(1)", "h.tanh()")
    .replace("modulate(self.norm1(x), a, b)", "self.norm1(x) * (1 + b)")
    .replace("modulate(self.norm2(x), d, e)", "self.norm2(x) * (1 + e)")
)
"""The way of Lumina: gains alone, of RMSNorms, and gates within ±1."""

AFFINE = DIT.replace(
    "self.norm1 = nn.LayerNorm(width, elementwise_affine=False,", "self.norm1 = nn.LayerNorm(width,"
).replace("self.norm2 = nn.LayerNorm(width, elementwise_affine=False,", "self.norm2 = nn.RMSNorm(width,")
"""The way of CogVideoX and LightningDiT: the norms have weights of their own."""
SHIFTED = (
    DIT.replace("return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)", "return x + shift.unsqueeze(1)")
    .replace("self.norm1 = nn.LayerNorm(width, elementwise_affine=False,", "self.norm1 = nn.RMSNorm(width,")
    .replace(
        "x + h.unsqueeze(1) * self.feed(modulate(self.norm2(x), d, e))", "x + h[:, None] * self.feed(self.norm1(x))"
    )
)
"""A shift alone; a norm that is read twice, once without a vector, beside a gate."""

SANDWICH = (
    GAINS.replace(
        "nn.Dropout(p)\n", "nn.Dropout(p)\n        self.norm3, self.norm4 = nn.RMSNorm(width), nn.RMSNorm(width)\n"
    )
    .replace(
        "self.drop(self.proj(y.transpose(1, 2).reshape(B, T, C)))", "self.proj(y.transpose(1, 2).reshape(B, T, C))"
    )
    .replace("self.attend(self.norm1(x) * (1 + b))", "self.norm3(self.attend(self.norm1(x) * (1 + b)))")
    .replace("self.feed(self.norm2(x) * (1 + e))", "self.norm4(self.feed(self.norm2(x) * (1 + e)))")
)
"""The way of Lumina 2 and Z-Image: a gate of a norm with weights."""

SINGLE = (
    DIT.replace("6 * width", "3 * width")
    .replace(
        "self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)",
        "self.qkv = nn.Linear(width, 3 * width)",
    )
    .replace(
        "self.fc1, self.fc2, self.act = nn.Linear(width, 40), nn.Linear(40, width)",
        "self.fc1, self.out, self.act = nn.Linear(width, 40), nn.Linear(width + 40, width)",
    )
    .replace("self.drop(self.proj(y.transpose(1, 2).reshape(B, T, C)))", "y.transpose(1, 2).reshape(B, T, C)")
    .replace("self.fc2(self.drop(self.act(self.fc1(x))))", "self.drop(self.act(self.fc1(x)))")
    .replace("a, b, g, d, e, h", "a, b, g")
    .replace("chunk(6", "chunk(3")
    .replace("x = x + g.unsqueeze(1) * self.attend(modulate(self.norm1(x), a, b))", "n = modulate(self.norm1(x), a, b)")
    .replace(
        "x = x + h.unsqueeze(1) * self.feed(modulate(self.norm2(x), d, e))",
        "x = x + g[:, None] * self.out(torch.cat([self.attend(n), self.feed(n)], 2))",
    )
)
"""The way of Flux's and Chroma's single blocks: one projection is the last of both halves."""

JOINT = (
    SINGLE.replace("self.qkv = nn.Linear(width, 3 * width)", "self.both = nn.Linear(width, 3 * width + 40)")
    .replace("self.fc1, self.out, self.act = nn.Linear(width, 40), nn.Linear", "self.out, self.act = nn.Linear")
    .replace("B, T, C = x.shape", "B, T, C = *x.shape[:2], x.shape[2] // 3")
    .replace("self.qkv(x)", "x")
    .replace("self.fc1(x)", "x")
    .replace(
        "n = modulate(self.norm1(x), a, b)",
        "n, m = self.both(modulate(self.norm1(x), a, b)).split([3 * x.shape[2], 40], -1)",
    )
    .replace("self.feed(n)", "self.feed(m)")
)
"""The way of Flux 2: one product is the first of both halves, too."""

MODULATED = {
    **{"projection": DIT, "table": TABLE, "gains": GAINS, "affine": AFFINE, "shifted": SHIFTED},
    **{"sandwich": SANDWICH, "single": SINGLE, "joint": JOINT},
}

_LAST = "self.out(torch.cat([self.attend(n), self.feed(n)], 2))"
IN_SINGLE = [
    ("[self.attend(n), self.feed(n)]", "[self.feed(n), self.attend(n)]"),
    ("[self.attend(n), self.feed(n)]", "[self.attend(n), self.feed(2 * n)]"),
    ("[self.attend(n), self.feed(n)]", "[self.attend(n), self.feed(x)]"),
    ("[self.attend(n), self.feed(n)]", "[self.attend(n), self.feed(n).flip(-1)]"),
    ("[self.attend(n), self.feed(n)]", "[self.attend(n).flip(-1), self.feed(n)]"),
    ("[self.attend(n), self.feed(n)]", "[self.feed(n)[..., :24], self.feed(n)]"),
    ("[self.attend(n), self.feed(n)]", "[self.attend(n)[..., :12], self.attend(n)[..., 12:], self.feed(n)]"),
    ("[self.attend(n), self.feed(n)]", "[self.attend(n).detach(), self.feed(n)]"),
    (_LAST, _LAST.replace("], 2)", "], 2).roll(1, -1)")),
    (_LAST, _LAST.replace("], 2)", "], 2) * 2")),
    (_LAST, f"self.drop({_LAST})"),
    (_LAST, f"self.norm2({_LAST})"),
    (_LAST, f"{_LAST} * n"),
    (f"g[:, None] * {_LAST}", f"g[:, None] + {_LAST}"),
    (f"x + g[:, None] * {_LAST}", f"n + g[:, None] * {_LAST}"),
]
_SPLIT = ".split([3 * x.shape[2], 40], -1)"
IN_JOINT = [
    (_SPLIT, f".flip(-1){_SPLIT}"),
    (_SPLIT, f".relu(){_SPLIT}"),
    (_SPLIT, f".roll(1, -1){_SPLIT}"),
    ("self.feed(m)", "self.feed(m + n[..., :40])"),
    ("self.feed(m)", "self.feed(m.flip(-1))"),
    ("self.feed(m)", "self.feed(m) * m"),
]

IN_MODULATED = [
    ("(1 + scale.unsqueeze(1))", "scale.unsqueeze(1)"),
    ("(1 + scale.unsqueeze(1))", "(2 + scale.unsqueeze(1))"),
    ("x * (1 + scale.unsqueeze(1))", "x + scale[:, None] * x"),
    ("(1 + scale.unsqueeze(1))", "(1 + scale.unsqueeze(1).detach())"),
    ("(1 + scale.unsqueeze(1))", "(1 + scale.mean(0, keepdim=True).unsqueeze(1))"),
    ("(1 + scale.unsqueeze(1))", "(1 + scale.mean(1, keepdim=True).unsqueeze(1))"),
    ("(1 + scale.unsqueeze(1))", "(1 + scale.flip(0).unsqueeze(1))"),
    ("(1 + scale.unsqueeze(1))", "(1 + scale.unsqueeze(1) * x.mean(1, keepdim=True))"),
    ("(1 + scale.unsqueeze(1))", "(1 + scale.unsqueeze(1).expand_as(x))"),
    ("(1 + scale.unsqueeze(1))", "(1 + F.dropout(scale.unsqueeze(1), 0.5))"),
    ("(1 + scale.unsqueeze(1))", "(1 + scale.unsqueeze(1).clone().mul_(2))"),
    ("+ shift.unsqueeze(1)", "- shift.unsqueeze(1)"),
    ("+ shift.unsqueeze(1)", "+ shift.unsqueeze(1) + scale.unsqueeze(1)"),
    ("+ shift.unsqueeze(1)", "+ x * shift.unsqueeze(1)"),
    ("+ shift.unsqueeze(1)", "+ shift.unsqueeze(1).roll(1, -1)"),
    ("x * (1 + scale.unsqueeze(1)) + shift", "(x + shift.unsqueeze(1)) * (1 + scale.unsqueeze(1)) + 0 * shift"),
    ("return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)", "return x"),
    ("a, b, g, d, e, h", "b, a, g, d, e, h"),
    ("a, b, g, d, e, h", "d, e, g, a, b, h"),
    ("g.unsqueeze(1) * self.attend", "(1 + g.unsqueeze(1)) * self.attend"),
    ("g.unsqueeze(1) * self.attend", "g.unsqueeze(1) * h.unsqueeze(1) * self.attend"),
    ("g.unsqueeze(1) * self.attend", "g.unsqueeze(1) + self.attend"),
    ("g.unsqueeze(1) * self.attend", "g.mean(1)[:, None, None] * self.attend"),
    ("g.unsqueeze(1) * self.attend", "g[:, None, :1] * self.attend"),
    ("g.unsqueeze(1) * self.attend", "(g.unsqueeze(1) * x).sigmoid() * self.attend"),
    ("x = x + g.unsqueeze(1) * self.attend", "x = (1 - g.unsqueeze(1)) * x + g.unsqueeze(1) * self.attend"),
    ("x = x + g.unsqueeze(1) * self.attend", "x = x * g.unsqueeze(1) + self.attend"),
    (
        "x = x + h.unsqueeze(1) * self.feed(modulate(self.norm2(x), d, e))",
        "x = h.unsqueeze(1) * (x + self.feed(modulate(self.norm2(x), d, e)))",
    ),
    ("self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)", "self.norm1 = nn.LayerNorm(width)"),
    ("self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)", "self.norm1 = nn.Identity()"),
    ("self.adaLN(cond)", "self.adaLN(cond + x.mean(1))"),
    ("self.adaLN(cond)", "self.adaLN(F.dropout(cond))"),
]
