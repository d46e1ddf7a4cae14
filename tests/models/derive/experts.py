"""A block with a mixture of experts as people write it after nanoGPT, and changes of one place in it."""

from __future__ import annotations

EXPERTS = """
class Attention(nn.Module):
    def __init__(self, width, heads, p):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop, self.heads, self.width, self.p = nn.Dropout(p), heads, width, p

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.c_attn(x).split(self.width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        return self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class MoE(nn.Module):
    def __init__(self, width, count, p):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)) for _ in range(count)
        )
        self.drop = nn.Dropout(p)

    def forward(self, x):
        flat = x.view(-1, x.size(-1))
        logits = self.router(flat)
        weights, ids = logits.softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            row, slot = (ids == i).nonzero(as_tuple=True)
            y = y.index_add(0, row, expert(flat[row]) * weights[row, slot, None])
        return self.drop(y.view(x.shape)), logits


class Block(nn.Module):
    def __init__(self, width=24, heads=4, p=0.0):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, heads, p), nn.LayerNorm(width)
        self.moe, self.gain = MoE(width, 4, p), nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        h, _ = self.moe(self.ln_2(x))
        return x + self.gain * h
"""
FUSED_TOO = [
    ("return x + self.gain * h", "return x + self.gain * h.tanh()"),
    ("return x + self.gain * h", "return x - h"),
    ("return x + self.gain * h", "return self.ln_2(x + self.gain * h)"),
    ("return x + self.gain * h", "return x + self.gain * h + self.moe(x)[0]"),
    ("h, _ = self.moe(self.ln_2(x))", "h, _ = self.moe(x)"),
    ("h, _ = self.moe(self.ln_2(x))", "h, _ = self.moe(self.ln_2(x.detach()))"),
    ("h, _ = self.moe(self.ln_2(x))", "h, _ = self.moe(x=self.ln_2(x))"),
    ("h, _ = self.moe(self.ln_2(x))", "h, _ = self.moe(self.ln_2(x)); h = F.dropout(h, 0.2, self.training)"),
]
"""After these the attention half is still one."""
IN_EXPERTS = [
    *FUSED_TOO,
    # before the cut
    ("x = x + self.attn(self.ln_1(x))", "x = x - self.attn(self.ln_1(x))"),
    ("x = x + self.attn(self.ln_1(x))", "x = self.ln_1(x) + self.attn(self.ln_1(x))"),
    ("x = x + self.attn(self.ln_1(x))", "x = x + self.attn(self.ln_1(x)).sin()"),
    ("x = x + self.attn(self.ln_1(x))", "x = x + self.attn(self.ln_1(x)) * self.gain.abs()"),
    ("x = x + self.attn(self.ln_1(x))", "x = self.attn(self.ln_1(x))"),
    ("x = x + self.attn(self.ln_1(x))", "x = x + self.attn(self.ln_1(x)); x[:, 0] = 0"),
    ("is_causal=True", "is_causal=T > 9"),
    # past it
    (
        "        x = x + self.attn(self.ln_1(x))",
        "        z = x; x = x + self.attn(self.ln_1(x))\n        x = x + 0 * z",
    ),
    ("h, _ = self.moe(self.ln_2(x))", "h, _ = self.moe.forward(self.ln_2(x))"),
    ("h, _ = self.moe(self.ln_2(x))", "h, r = self.moe(self.ln_2(x)); h = h * r.mean()"),
    ("h, _ = self.moe(self.ln_2(x))", "h, _ = self.moe(self.ln_2(x)); h += x"),
    ("h, _ = self.moe(self.ln_2(x))", "h, _ = self.moe(F.layer_norm(x, (24,), self.ln_2.weight, self.ln_2.bias))"),
    ("return x + self.gain * h", "return x + self.gain * h if x.size(1) < 10 else x - h"),
    ("return x + self.gain * h", "return x + self.gain * h if x.sum() < 1e9 else x - h"),
    ("        h, _ = self.moe(self.ln_2(x))", "        with torch.no_grad(): h, _ = self.moe(self.ln_2(x))"),
    ("        return x + self.gain * h", "        with torch.no_grad(): z = h * 2\n        return x + self.gain * z"),
    ("return x + self.gain * h", "self.seen = h; return x + self.gain * h"),
    (
        "x = x + self.attn(self.ln_1(x))\n        h, _ = self.moe(self.ln_2(x))",
        "h, _ = self.moe(self.ln_2(x)); x = x + self.attn(self.ln_1(x))",
    ),
]
