"""Written-out blocks whose q is scaled by position, on few tokens by ones, or whose first tokens are not turned, and
changes of one place in them."""

from __future__ import annotations

from tests.models.derive.written import LLAMA

_TURNED = "        q, k = turn(q, cos, sin), turn(k, cos, sin)\n"
_SCALE = """        s = 1 + 0.5 * torch.log(1 + torch.floor(torch.arange(T, device=x.device) / 8))
        s = s[None, None, :, None].to(q.dtype)
"""
SCALED_Q = LLAMA.replace(_TURNED, f"{_TURNED}{_SCALE}        q = q * s\n")
"""The way of Ministral 3 and Llama 4, from the ninth token on."""
assert SCALED_Q != LLAMA

_NORMED = "        q, k = self.q_norm(q), self.k_norm(k)\n"
_BEFORE = _SCALE.replace("s[None, None, :, None]", "s[None, :, None, None]")
IN_SCALED_Q = [
    ("q = q * s\n", new)
    for new in (
        "k = k * s\n",
        "q, k = q * s, k * s\n",
        "v = v * s\n",
        "q = torch.cat((q[..., :3] * s, q[..., 3:]), -1)\n",
        "q = q.clone(); q[..., :3] *= s\n",
        "q = q * s * s\n",
        "q = q * (s * s)\n",
        "q = q + s\n",
        "q = q / s\n",
        "q = q * s.flip(2)\n",
        "q = q * s[:, :, -1:]\n",
        "q = q * s.int()\n",
        "q = q * (s * x.mean().sigmoid())\n",
        "q = q * (s + torch.arange(self.heads, device=x.device)[:, None, None])\n",
        "q = q * s.expand(B, self.heads, T, self.dim)\n",
        "q = q * s.expand(B, 1, T, 1)\n",
        "q = q * F.dropout(s, 0.1)\n",
        "q = q * s.requires_grad_()\n",
        "q = s.mul(q) * 0.5\n",
    )
]
IN_SCALED_Q += [
    (_NORMED, f"{_BEFORE}        q = q * s\n{_NORMED}"),
    (_NORMED, f"{_NORMED}{_BEFORE}        q = q * s\n"),
    (
        "scores = q @ k.transpose(-2, -1) / math.sqrt(self.dim)",
        "scores = (q @ k.transpose(-2, -1)) * s / math.sqrt(self.dim)",
    ),
    ("y = (probs @ v)", "y = (probs @ v) * s"),
    (".to(q.dtype)\n        q = q * s", ".to(q.dtype).floor()\n        q = q * s"),
]

UNTURNED = LLAMA.replace(
    _TURNED,
    """        first = T - cos.shape[-2]
        (q_first, q), (k_first, k) = q.split((first, T - first), dim=-2), k.split((first, T - first), dim=-2)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        q, k = torch.cat((q_first, q), dim=-2), torch.cat((k_first, k), dim=-2)
""",
)
"""The way of DINOv3, whose tables leave the class token and the registers out."""
assert UNTURNED != LLAMA

_CAT = "q, k = torch.cat((q_first, q), dim=-2), torch.cat((k_first, k), dim=-2)"
_TURN = "q, k = turn(q, cos, sin), turn(k, cos, sin)"
_SPLIT = "q.split((first, T - first), dim=-2), k.split((first, T - first), dim=-2)"
IN_UNTURNED = [
    (_CAT, "q, k = torch.cat((q, q_first), dim=-2), torch.cat((k, k_first), dim=-2)"),
    (_CAT, "q, k = torch.cat((q_first, q), dim=-2), torch.cat((k, k_first), dim=-2)"),
    (_CAT, "q, k = torch.cat((k_first, q), dim=-2), torch.cat((q_first, k), dim=-2)"),
    (_CAT, "q, k = torch.cat((0 * q_first, q), dim=-2), torch.cat((k_first, k), dim=-2)"),
    (_CAT, "q, k = torch.cat((2 * q_first, q), dim=-2), torch.cat((k_first, k), dim=-2)"),
    (_CAT, "q, k = torch.cat((q_first.flip(-2), q), dim=-2), torch.cat((k_first.flip(-2), k), dim=-2)"),
    (_CAT, "q, k = torch.cat((-q_first, q), dim=-2), torch.cat((-k_first, k), dim=-2)"),
    (_CAT, "q, k = torch.cat((q_first.detach(), q), dim=-2), torch.cat((k_first, k), dim=-2)"),
    (_TURN, "q, k = turn(q, cos, sin), turn(k, cos, -sin)"),
    (_TURN, "q, k = turn(q, sin, cos), turn(k, sin, cos)"),
    (_TURN, "q, k = turn(q, cos, sin), k"),
    (_TURN, "q, k = turn(q, cos.flip(0), sin.flip(0)), turn(k, cos.flip(0), sin.flip(0))"),
    (_TURN, "q, k = q * cos, k * cos"),
    (_SPLIT, "q.split((T - first, first), dim=-2)[::-1], k.split((T - first, first), dim=-2)[::-1]"),
    ("first = T - cos.shape[-2]", "first = T - cos.shape[-2]; cos, sin = cos * 0 + 1, sin * 0"),
    ("first = T - cos.shape[-2]", "first = T - cos.shape[-2]; mask = mask.clone(); mask[:first] = 0"),
    ("probs @ v", "probs @ torch.cat((v[..., :first, :], turn(v[..., first:, :], cos, sin)), -2)"),
]

PUT = LLAMA.replace(
    "    return x * cos + rotate_half(x) * sin\n",
    """    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    out[..., :half] = x[..., :half] * cos[..., :half] - x[..., half:] * sin[..., :half]
    out[..., half:] = x[..., half:] * cos[..., half:] + x[..., :half] * sin[..., half:]
    return out
""",
)
"""A rotation that is written part by part (Wan)."""
IN_PUT = [
    ("    return out", "    out[..., 8:, :] = 0\n    return out"),
    ("    return out", "    out[..., :-8, :] = 0\n    return out"),
    ("    return out", "    out[3:] = 0\n    return out"),
    ("out = torch.empty_like(x)", "out = torch.zeros_like(x)"),
    ("out = torch.empty_like(x)", "out = x.clone()"),
    ("out = torch.empty_like(x)", "out = x"),
    ("    return out", "    out[..., 0] = 1\n    return out"),
    ("    return out", "    out[..., 0, :] = x[..., 0, :]\n    return out"),
    ("    out[..., half:] =", "    out[..., half:] = x[..., half:]\n    out[..., half:] +="),
    ("* cos[..., :half] - x", "* cos[..., :half] + x"),
    (
        "out[..., half:] = x[..., half:] * cos[..., half:] + x[..., :half]",
        "out[..., half:] = x[..., half:] * cos[..., half:] + out[..., :half]",
    ),
    (
        "    return out",
        "    before = out[..., :half]\n    out[..., :half] = 2 * before\n"
        "    return torch.cat((before, out[..., half:]), -1)",
    ),
]
