"""Small models with planted faults."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Layer(nn.Module):
    """A residual layer of linear maps, with a piece of the test's in the middle."""

    def __init__(self, piece: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.piece = piece or nn.Identity()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.piece(self.up(x)).tanh())


class Stack(nn.Module):
    """Layers, each called by `call` (a checkpoint, or nothing)."""

    def __init__(self, layers: list[nn.Module], call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if self.call is None else self.call(layer, x)
        return x.square().mean()


def torch_checkpoint(**options: Any) -> Callable[..., Any]:
    return functools.partial(checkpoint, **{"use_reentrant": False, **options})


def stack(piece: Callable[[], nn.Module], call: Callable[..., Any] | None = None, place: int = 1) -> Stack:
    """Three layers, one of which has the piece."""
    return Stack([Layer(piece() if i == place else None) for i in range(3)], call or torch_checkpoint())


def wrapped(piece: Callable[[], nn.Module], **options: Any) -> Stack:
    """The same under `checkpoint_wrapper`."""
    model = stack(piece)
    model.call = None
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer, **options)
    return model


def batch(count: int = 5) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(3))


class FunctionalDropout(nn.Module):
    """Its own code draws; no module of it does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.dropout(x, 0.5, self.training))


class PythonDropout(nn.Module):
    """Drops by Python's generator, which PyTorch's checkpoint does not replay."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([random.random() < 0.5 for _ in range(x.size(-1))])


class NoisyRouter(nn.Module):
    """Chooses one of two experts with noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.generator = torch.Generator().manual_seed(0)
        self.gate = Gate(self.generator)

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x)
        made = torch.stack([expert(x) for expert in self.experts])
        return made.gather(0, choice[None, :, None].expand(1, *x.shape))[0]


class Gate(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return torch.rand(x.size(0), generator=self.generator).gt(0.5).long()


class Average(nn.Module):
    """Reads a running mean before it updates it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made = x * (1 + self.mean)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return made


class Counts(nn.Module):
    """Every second call is another one."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.calls = 0
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls if self.read else x


class Casts(nn.Module):
    """In half precision within somebody's context, which has ended by the time of backward."""

    now = torch.bfloat16

    def forward(self, x: Tensor) -> Tensor:
        return x.to(type(self).now)


class CastStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        Casts.now = torch.bfloat16
        loss = super().forward(x)
        Casts.now = torch.float32
        return loss


class CastLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.piece(self.up(x)).float().tanh())


class Turned(Stack):
    """Leaves its last layer in eval mode after forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.layers[2].train()
        loss = super().forward(x)
        self.layers[2].eval()
        return loss


class Scaled(nn.Module):
    """Called with a scale by name, which its caller changes afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return (self.linear(x) + scale).tanh()


class ChangesArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scaled(), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.full((WIDTH,), 2.0)
        x = checkpoint(self.a, x, scale=scale, use_reentrant=False)
        scale.mul_(3)
        return checkpoint(self.b, x, scale=scale, use_reentrant=False).square().mean()


def counted(model: Stack) -> Stack:
    """A model with a hook on a module of the second layer that multiplies by how often it ran."""
    calls = itertools.count(1)
    model.layers[1].up.register_forward_hook(lambda module, args, result: result * next(calls))
    return model


class Codebook(nn.Module):
    """A parameter that the forward moves, behind PyTorch's back."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        made = x * self.code
        self.code.data.lerp_(x.detach().mean(0), 0.5)
        return made


class CodebookAside(nn.Module):
    """Moves a codebook that its results do not depend on: a parameter, or a tensor that is a plain attribute."""

    def __init__(self, parameter: bool) -> None:
        super().__init__()
        code = torch.ones(WIDTH)
        self.code = nn.Parameter(code, requires_grad=False) if parameter else code

    def forward(self, x: Tensor) -> Tensor:
        self.code.data.lerp_(x.detach().mean(0), 0.5)
        return x.sin()


class Books:
    """An object of somebody's own."""

    def __init__(self) -> None:
        self.code = torch.ones(WIDTH)


class CodebookWithin(nn.Module):
    """Moves a codebook in a dict, a list or an object that it holds, or adds to a list."""

    def __init__(self, how: str) -> None:
        super().__init__()
        made: dict[str, Any] = {"dict": {"code": torch.ones(WIDTH)}, "list": [torch.ones(WIDTH)], "object": Books()}
        self.books, self.how = made.get(how, []), how
        self.itself: list[Any] = []
        self.itself.append(self.itself)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.how == "grows":
            self.books.append(mean)
        else:
            code = vars(self.books)["code"] if self.how == "object" else self.books["code" if self.how == "dict" else 0]
            code.lerp_(mean, 0.5)
        return x.sin()


class Advances(Layer):
    """Its own code after its last module multiplies by the next of an iterator, of which nobody else knows."""

    def __init__(self, numbers: Iterator[float]) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * next(self.numbers)).sin()


def clock() -> Iterator[float]:
    """Seconds, which never come twice."""
    while True:
        yield 1 + time.perf_counter() % 1


def around(numbers: Iterator[float], reentrant: bool = False) -> Stack:
    """A stack whose checkpointed function, not a module, is what advances."""

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda t: (layer(t) * next(numbers)).sin(), x, use_reentrant=reentrant)

    return Stack([Layer()], call)


class DropsOnRank(nn.Module):
    """On one rank alone it draws from a generator that PyTorch's checkpoint does not replay."""

    def __init__(self, at_fault: bool) -> None:
        super().__init__()
        self.at_fault = at_fault

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([random.random() for _ in range(x.size(-1))]) if self.at_fault else x


def single_replay() -> tuple[Any, Any]:
    """Contexts of a checkpoint: half precision in forward, and none in the replay."""
    return torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False)


class ScaledByType(Layer):
    """Its last operation depends on the default type."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * (torch.get_default_dtype().itemsize / 4)).sin()


class ChangesDefaultType(Stack):
    """Its replays run under another default type than its forward."""

    def __init__(self) -> None:
        super().__init__([ScaledByType() for _ in range(3)], torch_checkpoint())

    def forward(self, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float32)
        loss = super().forward(x)
        torch.set_default_dtype(torch.float64)
        return loss


class Branches(nn.Module):
    """Calls one or the other, by a counter in a closure that no attribute shows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls: Any = iter(range(1000))

    def forward(self, x: Tensor) -> Tensor:
        return (self.one, self.other)[next(self.calls) % 2](x)


class Foreign(torch.autograd.Function):
    """A checkpoint of nobody's that replays no random state."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, dy)
        return None, x.grad
