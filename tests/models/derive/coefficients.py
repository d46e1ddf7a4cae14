"""A written-out block with xIELU, whose coefficients are trained, and changes of one place in it."""

from __future__ import annotations

from tests.models.derive.written import LLAMA

_ACTIVATION = """class XIELU(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(1))
        self.register_buffer("beta", torch.tensor(0.5))
        self.register_buffer("eps", torch.tensor(-0.05))

    def forward(self, x):
        a = F.softplus(self.alpha_p)
        n = self.beta + F.softplus(self.alpha_n)
        return torch.where(
            x > 0,
            a * x * x + self.beta * x,
            (torch.expm1(torch.min(x, self.eps)) - x) * n + self.beta * x,
        )


class Block(nn.Module):
"""
XIELU = (
    LLAMA.replace("class Block(nn.Module):\n", _ACTIVATION)
    .replace("F.silu(self.w1(n)) * self.w3(n)", "self.act(self.w1(n))")
    .replace("        self.w3 = nn.Linear(width, hidden, bias=False)\n", "        self.act = XIELU()\n")
)
assert "self.act(self.w1(n))" in XIELU and "self.act = XIELU()" in XIELU

_EPS = "torch.min(x, self.eps)"
_BELOW = "(torch.expm1(torch.min(x, self.eps)) - x) * n + self.beta * x"
IN_XIELU = [
    ("x > 0", "x >= 0"),
    ("x > 0", "x > 1e-7"),
    ("x > 0", "x < 0"),
    ("x > 0", "x > self.eps"),
    ("x > 0", "x.detach() > 0"),
    ("x > 0", "x[:1] > 0"),
    (_EPS, "torch.max(x, self.eps)"),
    (_EPS, "torch.min(x, 0.9 * self.eps)"),
    (_EPS, "torch.min(x, self.eps * x)"),
    (_EPS, "torch.min(self.eps, x.detach())"),
    (_EPS, "torch.min(x * 1.0000001, self.eps)"),
    (_EPS, "x"),
    (_EPS, "x.clamp(max=-0.05)"),
    ("torch.expm1(torch.min(x, self.eps))", "torch.exp(torch.min(x, self.eps))"),
    ("torch.expm1(torch.min(x, self.eps))", "torch.expm1(2 * torch.min(x, self.eps))"),
    (_BELOW, "(torch.expm1(torch.min(x, self.eps)) - torch.min(x, self.eps)) * n + self.beta * x"),
    (_BELOW, "(torch.expm1(torch.min(x, self.eps)) - 2 * x) * n + self.beta * x"),
    (_BELOW, "torch.add((torch.expm1(torch.min(x, self.eps)) - x) * n, self.beta * x, alpha=2)"),
    (_BELOW, "(torch.expm1(torch.min(x, self.eps)) - x) * a + self.beta * x"),
    (_BELOW, "(torch.expm1(torch.min(x, self.eps)) - x) * n + self.alpha_p * x"),
    (_BELOW, "(torch.expm1(torch.min(x, self.eps)) - x) * n + self.beta * x + self.eps"),
    (_BELOW, "(torch.expm1(torch.min(x, self.eps)) - x) * n.detach() + self.beta * x"),
    ("a * x * x + self.beta * x", "a * x * x"),
    ("a * x * x + self.beta * x", "a * x * x + n * x"),
    ("a * x * x + self.beta * x", "a * x * x * x + self.beta * x"),
    ("a * x * x + self.beta * x", "a.detach() * x * x + self.beta * x"),
    ("a * x * x + self.beta * x", "a * x * x + self.beta * x.flip(1)"),
    ("F.softplus(self.alpha_p)", "F.softplus(self.alpha_p * x.mean())"),
    ("F.softplus(self.alpha_p)", "F.softplus(self.alpha_p).square()"),
    ("F.softplus(self.alpha_p)", "self.alpha_p"),
    ("F.softplus(self.alpha_n)", "F.softplus(self.alpha_p)"),
    ("nn.Parameter(torch.randn(1))", "nn.Parameter(torch.randn(40))"),
    ('self.register_buffer("beta", torch.tensor(0.5))', "self.beta = 0.5"),
    ('self.register_buffer("beta", torch.tensor(0.5))', "self.beta = nn.Parameter(torch.tensor(0.5))"),
    ('self.register_buffer("eps", torch.tensor(-0.05))', "self.eps = nn.Parameter(torch.tensor(-0.05))"),
]
