"""A block whose attention no recording can follow before an FFN that one can, and changes of one place in it."""

from __future__ import annotations

LINEAR = """
class Attention(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop, self.width = nn.Dropout(p), width

    def forward(self, x, decay=None):
        q, k, v = self.c_attn(x).split(self.width, dim=2)
        k = k.exp()
        if bool((k > 1e4).any()):
            k = k.clamp(max=1e4)
        states = (k[..., None] * v[..., None, :]).cumsum(1)
        y = (q.softmax(-1)[..., None, :] @ states)[..., 0, :]
        return self.drop(self.c_proj(y)), states.mean()


class Block(nn.Module):
    def __init__(self, width=24, p=0.0):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, p), nn.LayerNorm(width)
        self.c_fc, self.c_proj, self.drop = nn.Linear(width, 40), nn.Linear(40, width), nn.Dropout(p)
        self.gain = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        h, said = self.attn(self.ln_1(x))
        x = x + h
        return x + self.drop(self.c_proj(F.gelu(self.c_fc(self.ln_2(x)))))
"""
SEVERAL = LINEAR.replace("        if bool((k > 1e4).any()):\n    ", "").replace(
    "        return self.drop(self.c_proj(y)), ",
    "        z = torch.zeros_like(y)\n        z[:, :5] = decay * y[:, :5]\n        return self.drop(self.c_proj(z)), ",
)
SEVERAL = SEVERAL.replace("self.attn(self.ln_1(x))", "self.attn(self.ln_1(x), decay=self.gain)")
"""Its attention takes two tensors, and writes in place."""
FUSED_TOO = [
    ("        x = x + h\n", "        with torch.no_grad(): z = 2 * h\n        x = x + z\n"),
    ("x = x + h", "x = 0.5 * x - h.sin()"),
    ("h, said = self.attn(self.ln_1(x))\n        x = x + h", "x, said = self.attn(x)"),
    ("x = x + h", "x = x + self.gain * h"),
    ("x = x + h", "z = x; x = x + h; x = x + 0.1 * z"),
    ("x = x + h", "x = x + h + self.ln_2(self.attn(self.ln_1(x))[0])"),
    ("x = x + h", "x = x + F.dropout(h, 0.2, self.training)"),
    ("x = x + h", "x = x.detach() + h"),
    ("x = x + h", "x = x + h; x[:, 0] = 0"),
    ("x = x + h", "x = self.ln_1(x) + h"),
    ("self.attn(self.ln_1(x))", "self.attn(x=self.ln_1(x))"),
    ("self.attn(self.ln_1(x))", "self.attn(self.ln_2(x))"),
    ("return self.drop(self.c_proj(y)), states.mean()", "return self.drop(self.c_proj(y)), None"),
]
"""After these the FFN half is still one."""
NOT_FUSED = [
    ("        x = x + h\n        return x + ", "        z = x; x = x + h\n        return z + x + "),
    ("self.attn(self.ln_1(x))", "self.attn.forward(self.ln_1(x))"),
    ("x = x + h", "x = x + h * said"),
    ("self.ln_2(x)", "self.ln_2(x + said)"),
    ("F.gelu(self.c_fc(self.ln_2(x)))", "F.gelu(self.c_fc(self.ln_2(h)))"),
    ("F.gelu(", "F.celu("),
    ("        x = x + h\n", "        x = x + F.linear(h, self.attn.c_proj.weight)\n"),
]
"""After these nothing is."""
