"""A written-out block whose q is scaled by position, on few tokens by ones, and changes of one place in it."""

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
