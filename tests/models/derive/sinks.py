"""Written-out blocks whose heads have a sink, within the softmax and after it, and changes of one place in them."""

from __future__ import annotations

from tests.models.derive.written import LLAMA

_SOFTMAX = "        probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)\n"
_NORMS = "        self.q_norm, self.k_norm = RMSNorm(self.dim), RMSNorm(self.dim)\n"
_WITH_SINKS = LLAMA.replace(_NORMS, _NORMS + "        self.sinks = nn.Parameter(torch.randn(heads))\n")
SUNK = _WITH_SINKS.replace(
    _SOFTMAX,
    """        sinks = self.sinks.reshape(1, -1, 1, 1).expand(B, -1, T, -1)
        joined = torch.cat([scores, sinks], dim=-1)
        joined = joined - joined.max(dim=-1, keepdim=True).values
        probs = F.softmax(joined, dim=-1, dtype=torch.float32)[..., :-1].to(q.dtype)
""",
)
"""The way of gpt-oss."""
SCALED = _WITH_SINKS.replace(
    _SOFTMAX,
    """        lse = torch.logsumexp(scores, dim=-1)
        share = (lse - self.sinks.view(1, -1, 1)).float().sigmoid()
"""
    + _SOFTMAX,
).replace("y = (probs @ v).transpose", "y = ((probs @ v) * share.unsqueeze(-1).to(q.dtype)).transpose")
"""The way of Granite with sliding windows."""
assert "torch.cat([scores, sinks]" in SUNK and "share.unsqueeze" in SCALED

IN_SUNK = [
    ("[..., :-1]", "[..., 1:]"),
    ("[..., :-1]", "[..., :-1].flip(-1)"),
    ("torch.cat([scores, sinks], dim=-1)", "torch.cat([sinks, scores], dim=-1)"),
    ("torch.cat([scores, sinks], dim=-1)", "torch.cat([scores, sinks.detach()], dim=-1)"),
    ("torch.cat([scores, sinks], dim=-1)", "torch.cat([scores, 2 * sinks], dim=-1)"),
    ("torch.cat([scores, sinks], dim=-1)", "torch.cat([scores, sinks.exp()], dim=-1)"),
    ("torch.cat([scores, sinks], dim=-1)", "torch.cat([scores, scores[..., :1]], dim=-1)"),
    ("torch.cat([scores, sinks], dim=-1)", "torch.cat([scores, torch.zeros_like(sinks)], dim=-1)"),
    ("torch.cat([scores, sinks], dim=-1)", "0.5 * torch.cat([scores, sinks], dim=-1)"),
    ("torch.cat([scores, sinks], dim=-1)", "torch.cat([scores, sinks + mask[..., :1]], dim=-1)"),
    ("torch.cat([scores, sinks], dim=-1)", "torch.cat([scores, sinks], dim=-1).tanh()"),
    ("self.sinks.reshape(1, -1, 1, 1)", "self.sinks.flip(0).reshape(1, -1, 1, 1)"),
    ("self.sinks.reshape(1, -1, 1, 1)", "self.sinks[:1].expand(4).reshape(1, -1, 1, 1)"),
    ("self.sinks.reshape(1, -1, 1, 1)", "self.sinks.view(2, 2).t().reshape(1, -1, 1, 1)"),
    (".max(dim=-1, keepdim=True).values", ".max(dim=-2, keepdim=True).values"),
    (".max(dim=-1, keepdim=True).values", ".mean(dim=-1, keepdim=True)"),
    ("F.softmax(joined, dim=-1", "F.softmax(joined, dim=-2"),
    ("nn.Parameter(torch.randn(heads))", "nn.Parameter(torch.randn(1))"),
    (
        "probs = F.dropout(probs, p=self.p, training=self.training)",
        "probs = probs / probs.sum(-1, keepdim=True)",
    ),
]
LOOK_ALIKE = [
    (SUNK, "self.sinks.reshape(1, -1, 1, 1)", "self.sinks[:2].repeat_interleave(2).reshape(1, -1, 1, 1)"),
    (SUNK, "self.sinks.reshape(1, -1, 1, 1)", "self.q_norm.weight[:4].reshape(1, -1, 1, 1)"),
    (SUNK, "torch.cat([scores, sinks], dim=-1)", "torch.cat([torch.cat([scores, sinks], -1), sinks], dim=-1)[..., 1:]"),
    (SCALED, "(lse - self.sinks.view(1, -1, 1))", "torch.sub(lse, self.sinks.view(1, -1, 1), alpha=2)"),
    (SCALED, ".float().sigmoid()", ".float()"),
]
"""In these the FFN half is still one."""
IN_SCALED = [
    ("torch.logsumexp(scores, dim=-1)", "torch.logsumexp(2 * scores, dim=-1)"),
    ("torch.logsumexp(scores, dim=-1)", "torch.logsumexp(scores, dim=-2)"),
    ("torch.logsumexp(scores, dim=-1)", "torch.logsumexp(scores - mask, dim=-1)"),
    ("torch.logsumexp(scores, dim=-1)", "torch.logsumexp(scores, dim=-1).detach()"),
    ("(lse - self.sinks.view(1, -1, 1))", "(self.sinks.view(1, -1, 1) - lse)"),
    ("(lse - self.sinks.view(1, -1, 1))", "(lse - 2 * self.sinks.view(1, -1, 1))"),
    ("(lse - self.sinks.view(1, -1, 1))", "(lse - self.sinks.detach().view(1, -1, 1))"),
    ("(lse - self.sinks.view(1, -1, 1))", "(lse - self.sinks.flip(0).view(1, -1, 1))"),
    ("(lse - self.sinks.view(1, -1, 1))", "lse"),
    (".sigmoid()", ".tanh()"),
    (".sigmoid()", ".sigmoid().sqrt()"),
    ("(probs @ v) * share", "(probs @ v) + share"),
    ("(probs @ v) * share", "(probs @ v) * share.flip(-1)"),
    ("(probs @ v) * share", "(probs @ (v * 2)) * share"),
]
