"""A written-out block whose v has a norm and whose result is scaled (Gemma 4), and changes of one place in it."""

from __future__ import annotations

from tests.models.derive.written import LLAMA

_V = "        v = self.wv(x).view(B, T, self.kv_heads, self.dim)\n"
_Q = "        q, k = self.q_norm(q), self.k_norm(k)\n"
_RETURN = "        return x + 0.5"
_DROP = "        self.drop = nn.Dropout(p)\n"
assert all(LLAMA.count(line) == 1 for line in (_V, _Q, _DROP)) and LLAMA.count(_RETURN) == 1
NORMED_V = LLAMA.replace(_Q, _Q + "        v = F.rms_norm(v, (self.dim,), eps=1e-6)\n")
"""The norm of v alone."""
TAILED = NORMED_V.replace(_RETURN, "        h = x + 0.5").replace(
    _DROP, _DROP + "        self.register_buffer('factor', torch.full((1,), 0.75))\n"
)
TAILED += "        h *= self.factor\n        return h\n"

IN_TAILED = [
    ("v = F.rms_norm(v, (self.dim,), eps=1e-6)", new)
    for new in (
        "v = F.rms_norm(v, (self.dim,), eps=1e-2)",
        "v = F.layer_norm(v, (self.dim,), eps=1e-6)",
        "v = 2 * F.rms_norm(v, (self.dim,), eps=1e-6)",
        "v = F.rms_norm(v, (self.dim,), self.q_norm.weight, eps=1e-6)",
        "v = F.rms_norm(v, (self.dim,), eps=1e-6) + v",
        "v = F.rms_norm(v.flatten(2), (self.kv_heads * self.dim,), eps=1e-6).view_as(v)",
        "v = F.rms_norm(F.rms_norm(v, (self.dim,), eps=1e-6), (self.dim,), eps=0.1)",
        "v = F.rms_norm(v.flip(-1), (self.dim,), eps=1e-6)",
        "v = F.rms_norm(k, (self.dim,), eps=1e-6)",
        "v = F.rms_norm(v.detach(), (self.dim,), eps=1e-6)",
        "v = F.normalize(v, dim=-1)",
        "v = F.rms_norm(v.transpose(1, 2), (self.dim,), eps=1e-6).transpose(1, 2) * x.mean()",
    )
] + [
    ("h *= self.factor", new)
    for new in (
        "h.mul_(self.factor)",
        "h = h * self.factor.exp()",
        "h *= self.factor + x.mean()",
        "h += self.factor",
        "h = self.factor * h + x",
        "h = (self.factor * h).detach()",
        "h = h * self.norm2.weight",
        "h = self.norm2(h)",
        "h = h * self.factor; h = h + h.mean(1, keepdim=True)",
        "h = torch.cat([h[:, 1:], h[:, :1]], 1)",
        "h = h.cumsum(1) * self.factor",
        "h = F.dropout(h, 0.0, self.training).sin()",
        "h = h + self.w2(torch.sigmoid(self.w1(h)) * self.w3(x))",
        "h = h + self.w2(torch.sigmoid(self.w1(h)) * self.w3(h))",
        "z = h.view(-1); z *= self.factor",
        "h[:, 0] = 0",
        "h = torch.where(h > 0, h, self.factor * h)",
        "h = h * mask.mean()",
        "h = h * cos.mean()",
    )
]
