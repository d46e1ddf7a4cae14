"""Blocks as other libraries' readers know them, as source texts that tests change in one place."""

from __future__ import annotations

from typing import Any

import torch

TOWER = """
class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, width=24, heads=4, p=0.0):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, dropout=p, batch_first=True)
        self.fc, self.proj, self.act = nn.Linear(width, 40), nn.Linear(40, width), nn.ReLU(inplace=True)
        self.scale_1, self.scale_2, self.drop = Scale(width), Scale(width), nn.Dropout(p)

    def forward(self, x, pad):
        torch._assert(x.dim() == 3, "expected a batch")
        y = self.ln_1(x)
        y, _ = self.attn(y, y, y, key_padding_mask=pad, need_weights=False)
        x = x + self.scale_1(self.drop(y))
        h = self.act(self.fc(self.ln_2(x)))
        x = x + self.scale_2(self.drop(self.proj(h)))
        return x
"""
"""A vision tower's: `nn.MultiheadAttention`, LayerScale, an activation in place."""

SUMS = """
def turn(x, turns):
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width=24, heads=4, p=0.0):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(p)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_q, self.to_kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width)
        self.out, self.to_h, self.down = nn.Linear(width, width), nn.Linear(width, 80), nn.Linear(40, width)

    def forward(self, x, turns, mask):
        n = self.norm1(x)
        q = self.to_q(n).unflatten(-1, (self.heads, -1))
        k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.to_kv(n).chunk(2, -1))
        q, k = turn(q, turns), turn(k, turns)
        q *= q.shape[-1] ** -0.25
        k = k * k.shape[-1] ** -0.25
        sim = torch.einsum("bihd, bjhd -> bhij", q, k)
        sim.masked_fill_(~mask, -torch.inf)
        sim = sim - sim.amax(-1, keepdim=True).detach()
        p = self.drop(sim.softmax(-1))
        y = torch.einsum("bhij, bjhd -> bihd", p, v).flatten(2)
        x = x + self.drop(self.out(y))
        up, gate = self.to_h(self.norm2(x)).chunk(2, -1)
        return x + self.down(up * F.gelu(gate))
"""
"""In sums by index: complex rotations, k and v of one product, logits less their largest, up before gate."""

FOLDED = """
class Block(nn.Module):
    def __init__(self, width=24, heads=4, p=0.0):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(p)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.vkq, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.proj = nn.Linear(width, 40), nn.Linear(40, width)

    def forward(self, x, mask):
        b, t, c = x.shape
        d = c // self.heads
        vkq = self.vkq(x).view(b, t, 3, self.heads, d).permute(2, 0, 3, 1, 4).reshape(3, b * self.heads, t, d)
        v, k, q = vkq.unbind(0)
        s = torch.baddbmm(mask, q, k.transpose(1, 2), beta=1, alpha=d**-0.5)
        y = torch.bmm(self.drop(s.softmax(-1)), v)
        y = y.view(b, self.heads, t, d).transpose(1, 2).reshape(b, t, c)
        x = self.norm1(x + self.out(y))
        return self.norm2(x + self.drop(self.proj(F.silu(self.fc(x)))))
"""
"""Heads folded into the batch, v before k before q, the mask added within the product, norms of sums."""


def called(source: str, tokens: int = 12, batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """A call of a block of one of these texts."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, tokens, 24, generator=generator, dtype=dtype)
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if "cond" in source:
        return x, torch.randn(batch, 24, generator=generator, dtype=dtype)
    if "turns" in source:
        angle = torch.arange(tokens, dtype=dtype)[:, None] * 10.0 ** -torch.arange(3, dtype=dtype)
        return x, torch.polar(torch.ones_like(angle), angle), causal[None, None]
    if "baddbmm" in source:
        return x, torch.zeros(1, tokens, tokens, dtype=dtype).masked_fill(~causal, -torch.inf)
    pad = torch.zeros(batch, tokens, dtype=torch.bool)
    pad[1, -3:] = True
    return x, pad


IN_TOWER = [
    ("return x * self.gamma", "return x * self.gamma.abs().sqrt()"),
    ("return x * self.gamma", "return x * self.gamma.detach()"),
    ("return x * self.gamma", "return x * self.gamma * self.gamma"),
    ("return x * self.gamma", "return x * (1 + self.gamma)"),
    ("return x * self.gamma", "return x + self.gamma"),
    ("return x * self.gamma", "return x * self.gamma[0]"),
    ("return x * self.gamma", "return x * self.gamma.mean()"),
    ("return x * self.gamma", "return x.mul_(self.gamma)"),
    ("return x * self.gamma", "return x / self.gamma"),
    ("return x * self.gamma", "return x * self.gamma.flip(0)"),
    ("x = x + self.scale_1(self.drop(y))", "x = self.scale_1(x + self.drop(y))"),
    ("x = x + self.scale_1(self.drop(y))", "x = self.scale_1(x) + self.drop(y)"),
    ("x = x + self.scale_1(self.drop(y))", "x = x + self.scale_2(self.scale_1(self.drop(y)))"),
    ("x = x + self.scale_1(self.drop(y))", "x = x + self.ln_2(self.scale_1(self.drop(y)))"),
    ("x = x + self.scale_1(self.drop(y))", "x = x + self.scale_1(self.ln_2(self.drop(y)))"),
    ("x = x + self.scale_1(self.drop(y))", "x = x + 0.5 * self.scale_1(self.drop(y))"),
    ("x = x + self.scale_1(self.drop(y))", "x += self.scale_1(self.drop(y))"),
    ("x = x + self.scale_1(self.drop(y))", "z = y.flatten(); z *= 2; x = x + self.scale_1(self.drop(y))"),
    ("x = x + self.scale_1(self.drop(y))", "y *= 2; x = x + self.scale_1(self.drop(y))"),
    ("x = x + self.scale_1(self.drop(y))", "x = x + self.scale_1(self.drop(y)); x *= 2"),
    ("self.attn(y, y, y,", "self.attn(y, y, x,"),
    ("self.attn(y, y, y,", "self.attn(y, x, y,"),
    ("self.attn(y, y, y,", "self.attn(y, y.flip(1), y.flip(1),"),
    ("self.attn(y, y, y,", "self.attn(y, y, y, attn_mask=torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1),"),
    ("self.attn(y, y, y,", "self.attn(y, y, y, attn_mask=torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(3),"),
    ("key_padding_mask=pad", "key_padding_mask=~pad"),
    ("key_padding_mask=pad", "key_padding_mask=pad.flip(1)"),
    ("key_padding_mask=pad", "key_padding_mask=pad.to(x.dtype)"),
    ("y, _ = self.attn(y, y, y, key_padding_mask=pad, need_weights=False)", "y, w = self.attn(y, y, y); y = w @ y"),
    ("need_weights=False)", "need_weights=True)"),
    ("batch_first=True)", "batch_first=True, add_bias_kv=True)"),
    ("batch_first=True)", "batch_first=True, add_zero_attn=True)"),
    ("batch_first=True)", "batch_first=True, bias=False)"),
    ("h = self.act(self.fc(self.ln_2(x)))", "h = self.act(self.fc(self.ln_2(self.act(x))))"),
    ("h = self.act(self.fc(self.ln_2(x)))", "z = self.fc(self.ln_2(x)); h = self.act(z) + z"),
    ("h = self.act(self.fc(self.ln_2(x)))", "z = self.fc(self.ln_2(x)); w = z[:]; h = self.act(z) + w"),
    ("h = self.act(self.fc(self.ln_2(x)))", "z = self.fc(self.ln_2(x)); w = z + 0; h = self.act(z) + w"),
    ("h = self.act(self.fc(self.ln_2(x)))", "h = self.fc(self.ln_2(x)); h[..., 0] = 0; h = self.act(h)"),
    ("h = self.act(self.fc(self.ln_2(x)))", "h = self.fc(self.ln_2(x)); torch.abs(h, out=h)"),
]

IN_SUMS = [
    ("pairs * turns[None, :, None]", "pairs * turns.conj()[None, :, None]"),
    ("pairs * turns[None, :, None]", "pairs * turns[None, :, None].flip(1)"),
    ("pairs * turns[None, :, None]", "pairs * turns[None, :, None] ** 2"),
    ("pairs * turns[None, :, None]", "pairs.conj() * turns[None, :, None]"),
    ("pairs * turns[None, :, None]", "pairs / turns[None, :, None]"),
    ("pairs * turns[None, :, None]", "pairs + turns[None, :, None]"),
    ("pairs * turns[None, :, None]", "(pairs * turns[None, :, None]).detach()"),
    ("pairs * turns[None, :, None]", "2 * pairs * turns[None, :, None]"),
    (".flatten(3).to(x.dtype)", ".transpose(3, 4).flatten(3).to(x.dtype)"),
    ("q, k = turn(q, turns), turn(k, turns)", "q = turn(q, turns)"),
    ("q, k = turn(q, turns), turn(k, turns)", "q, k = turn(k, turns), turn(q, turns)"),
    ("q, k = turn(q, turns), turn(k, turns)", "q, k = turn(q, turns), turn(k, turns.conj())"),
    ("k, v = (t.unflatten", "v, k = (t.unflatten"),
    ("k, v = (t.unflatten", "k, v = (t.flip(-1).unflatten"),
    ("q *= q.shape[-1] ** -0.25", "q *= q.shape[1] ** -0.25"),
    ("q *= q.shape[-1] ** -0.25", "q *= self.norm1.weight[:1]"),
    ("q *= q.shape[-1] ** -0.25", "w = q.transpose(0, 1); q *= 0.5"),
    ("q *= q.shape[-1] ** -0.25", "w = q.transpose(0, 1); w *= 0.5"),
    ('"bihd, bjhd -> bhij", q, k', '"bihd, bjhd -> bhji", q, k'),
    ('"bihd, bjhd -> bhij", q, k', '"bjhd, bihd -> bhij", q, k'),
    ('"bihd, bjhd -> bhij", q, k', '"bihd, bjhd -> bhij", k, q'),
    ('"bihd, bjhd -> bhij", q, k', '"bjhd, bihd -> bhij", k, q'),
    ('"bihd, bjhd -> bhij", q, k', '"bihd, bjgd -> bhij", q, k'),
    ("sim.masked_fill_(~mask, -torch.inf)", "sim.masked_fill_(~mask.flip(-1), -torch.inf)"),
    ("sim.masked_fill_(~mask, -torch.inf)", "sim.masked_fill_(~mask, -9.0)"),
    ("sim.masked_fill_(~mask, -torch.inf)", "sim.masked_fill(~mask, -torch.inf)"),
    ("sim.masked_fill_(~mask, -torch.inf)", "sim += torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -1e30)"),
    ("sim.masked_fill_(~mask, -torch.inf)", "sim += torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -1e3)"),
    ("sim.masked_fill_(~mask, -torch.inf)", "sim += torch.ones_like(mask, dtype=x.dtype).masked_fill(~mask, -1e30)"),
    ("sim.masked_fill_(~mask, -torch.inf)", "sim.masked_fill_(~(mask & mask.roll(1, -1)), -1e30)"),
    ("sim = sim - sim.amax(-1, keepdim=True).detach()", "sim = sim - sim.amax(-2, keepdim=True).detach()"),
    ("sim = sim - sim.amax(-1, keepdim=True).detach()", "sim = sim - 2 * sim.amax(-1, keepdim=True)"),
    ("sim = sim - sim.amax(-1, keepdim=True).detach()", "sim = sim - sim.amax(-1, keepdim=True)"),
    ("sim = sim - sim.amax(-1, keepdim=True).detach()", "sim = sim.amax(-1, keepdim=True).detach() - sim"),
    ("sim = sim - sim.amax(-1, keepdim=True).detach()", "sim = sim - sim.sum(-1, keepdim=True).detach()"),
    ("sim.softmax(-1)", "sim.softmax(-2)"),
    ("sim.softmax(-1)", "sim.softmax(-1).transpose(2, 3)"),
    ("sim.softmax(-1)", "sim.softmax(1)"),
    ('"bhij, bjhd -> bihd", p, v', '"bhij, bihd -> bjhd", p, v'),
    ('"bhij, bjhd -> bihd", p, v', '"bhij, bjhd -> bihd", p, v.flip(2)'),
    ('"bhij, bjhd -> bihd", p, v', '"bhij, bjgd -> bihd", p, v'),
    ("up, gate = self", "gate, up = self"),
    ("up * F.gelu(gate)", "up * F.gelu(up)"),
    ("up * F.gelu(gate)", "gate.mul_(2) * F.gelu(up)"),
]

IN_FOLDED = [
    ("v, k, q = vkq", "v, q, k = vkq"),
    ("v, k, q = vkq", "q, k, v = vkq"),
    ("v, k, q = vkq", "k, v, q = vkq"),
    (".view(b, t, 3, self.heads, d)", ".view(b, t, self.heads, 3, d).transpose(2, 3)"),
    (".view(b, t, 3, self.heads, d)", ".view(b, t, self.heads, d, 3).permute(0, 1, 4, 2, 3)"),
    (".permute(2, 0, 3, 1, 4)", ".permute(2, 3, 0, 1, 4)"),
    ("beta=1", "beta=0"),
    ("beta=1", "beta=2"),
    ("alpha=d**-0.5", "alpha=1"),
    ("alpha=d**-0.5", "alpha=t**-0.5"),
    ("alpha=d**-0.5)", "alpha=d**-0.5) * 2"),
    ("alpha=d**-0.5)", "alpha=d**-0.5).tanh()"),
    ("torch.baddbmm(mask,", "torch.baddbmm(mask.transpose(1, 2),"),
    ("torch.baddbmm(mask,", "torch.baddbmm(mask.clamp(min=-1.0),"),
    ("torch.baddbmm(mask,", "mask + torch.baddbmm(torch.empty(1, 1, 1, dtype=x.dtype),"),
    ("q, k.transpose(1, 2), beta", "k, q.transpose(1, 2), beta"),
    ("s.softmax(-1)", "s.softmax(1)"),
    ("s.softmax(-1)", "s.softmax(0)"),
    ("y.view(b, self.heads, t, d)", "y.view(self.heads, b, t, d).transpose(0, 1)"),
    (".transpose(1, 2).reshape(b, t, c)", ".reshape(b, t, c)"),
    ("self.norm1(x + self.out(y))", "self.norm1(self.norm2(x) + self.out(y))"),
    ("self.norm1(x + self.out(y))", "self.norm1(x) + self.out(y)"),
    ("F.silu(self.fc(x))", "F.silu(self.fc(x), inplace=True)"),
    ("F.silu(self.fc(x))", "F.silu(self.fc(F.silu(x, inplace=True)))"),
    ("F.silu(self.fc(x))", "F.dropout(F.silu(self.fc(x)), 0.0, True, True)"),
]
"""Changes of one place in these texts: (what stands there, what is put there)."""
