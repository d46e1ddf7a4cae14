"""Written-out blocks with a gate between attention and its last projection, and changes of one place in them."""

from __future__ import annotations

from tests.models.derive.written import LLAMA

_OUT = "        self.wo = nn.Linear(heads * self.dim, width, bias=False)\n"
_MERGED = "        y = (probs @ v).transpose(1, 2).contiguous().view(B, T, C)\n"
BY_ENTRY = LLAMA.replace(_OUT, _OUT + "        self.wg = nn.Linear(width, heads * self.dim)\n").replace(
    _MERGED, _MERGED + "        y = y * torch.sigmoid(self.wg(x))\n"
)
"""The way of AFMoE and Muse."""
BY_HEAD = LLAMA.replace(_OUT, _OUT + "        self.wg = nn.Linear(width, heads, bias=False)\n").replace(
    _MERGED,
    """        gate = self.wg(x)
        y = (probs @ v).transpose(1, 2)
        y = gate.unsqueeze(-1).sigmoid() * y
        y = y.contiguous().view(B, T, C)
""",
)
"""The way of LFM3 and Step 3."""
IN_Q = (
    LLAMA.replace("self.wq = nn.Linear(width, heads * self.dim,", "self.wq = nn.Linear(width, 2 * heads * self.dim,")
    .replace(
        "        q = self.wq(x).view(B, T, self.heads, self.dim)\n",
        "        q, gate = torch.chunk(self.wq(x).view(B, T, self.heads, 2 * self.dim), 2, dim=-1)\n",
    )
    .replace(_MERGED, _MERGED + "        y = y * torch.sigmoid(gate.reshape(B, T, C))\n")
)
"""The way of Qwen3-Next and Qwen3.5."""
GATED = {
    "entry": (BY_ENTRY, "attn.output_gate=entry"),
    "head": (BY_HEAD, "attn.output_gate=head"),
    "in-q": (IN_Q, "attn.output_gate=entry attn.gate_in_q=1"),
}
assert all("sigmoid(" in source for source, _ in GATED.values()) and "2 * heads" in IN_Q

_BY_ENTRY = [
    ("torch.sigmoid(self.wg(x))", "torch.sigmoid(self.wg(x)).detach()"),
    ("torch.sigmoid(self.wg(x))", "torch.sigmoid(2 * self.wg(x))"),
    ("torch.sigmoid(self.wg(x))", "2 * torch.sigmoid(self.wg(x))"),
    ("torch.sigmoid(self.wg(x))", "torch.tanh(self.wg(x))"),
    ("torch.sigmoid(self.wg(x))", "F.silu(self.wg(x))"),
    ("torch.sigmoid(self.wg(x))", "torch.sigmoid(self.wg(x)).flip(-1)"),
    ("torch.sigmoid(self.wg(x))", "torch.sigmoid(self.wg(x).flip(1))"),
    ("torch.sigmoid(self.wg(x))", "torch.sigmoid(self.wg(2 * x))"),
    ("torch.sigmoid(self.wg(x))", "torch.sigmoid(self.wg(x) + self.wg.bias)"),
    ("torch.sigmoid(self.wg(x))", "torch.sigmoid(self.wg(y))"),
    ("torch.sigmoid(self.wg(x))", "torch.sigmoid(self.wg(x) + self.wq(x))"),
    ("torch.sigmoid(self.wg(x))", "torch.sigmoid(self.wq(x))"),
    ("torch.sigmoid(self.wg(x))", "F.dropout(torch.sigmoid(self.wg(x)), p=self.p, training=self.training)"),
    ("torch.sigmoid(self.wg(x))", "torch.sigmoid(self.wg(x).view(B, T, self.dim, self.heads).mT.reshape(B, T, C))"),
    ("y = y * torch.sigmoid(self.wg(x))", "y = y + torch.sigmoid(self.wg(x))"),
    ("y = y * torch.sigmoid(self.wg(x))", "y = y * torch.sigmoid(self.wg(x)) * torch.sigmoid(self.wg(x))"),
    (
        "y = y * torch.sigmoid(self.wg(x))",
        "y = self.q_norm(y.view(B, T, -1, self.dim)).view(B, T, C) * self.wg(x).sigmoid()",
    ),
    ("y = y * torch.sigmoid(self.wg(x))", "y = (2 * y) * torch.sigmoid(self.wg(x))"),
]
_BY_HEAD = [
    ("gate.unsqueeze(-1).sigmoid()", "gate.flip(-1).unsqueeze(-1).sigmoid()"),
    ("gate.unsqueeze(-1).sigmoid()", "gate.unsqueeze(-1).softmax(-2)"),
    ("gate.unsqueeze(-1).sigmoid()", "gate.mean(-1, keepdim=True).unsqueeze(-1).sigmoid()"),
    ("gate.unsqueeze(-1).sigmoid()", "gate[..., :1].unsqueeze(-1).sigmoid()"),
    ("gate.unsqueeze(-1).sigmoid()", "(1 - gate.unsqueeze(-1).sigmoid())"),
    ("gate.unsqueeze(-1).sigmoid()", "gate.roll(1, 1).unsqueeze(-1).sigmoid()"),
]
_IN_Q = [
    ("q, gate = torch.chunk", "gate, q = torch.chunk"),
    ("2 * self.dim), 2, dim=-1)", "2 * self.dim), 2, dim=-1)\n        gate = gate.flip(2)"),
    (
        "self.wq(x).view(B, T, self.heads, 2 * self.dim), 2, dim=-1",
        "self.wq(x).view(B, T, 2 * self.heads, self.dim), 2, dim=2",
    ),
    ("2 * self.dim), 2, dim=-1)", "2 * self.dim), 2, dim=-1)\n        gate = q"),
    ("torch.sigmoid(gate.reshape(B, T, C))", "torch.sigmoid(gate.transpose(2, 3).reshape(B, T, C))"),
    ("torch.sigmoid(gate.reshape(B, T, C))", "torch.sigmoid(self.q_norm(gate).reshape(B, T, C))"),
]
IN_GATED = [
    *((BY_ENTRY, *change) for change in _BY_ENTRY),
    *((BY_HEAD, *change) for change in _BY_HEAD),
    *((IN_Q, *change) for change in _IN_Q),
]
