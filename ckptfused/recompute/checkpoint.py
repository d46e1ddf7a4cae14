"""`checkpoint` and `checkpoint_sequential`: for everything that is not a transformer block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from ckptfused._extension import _C
from ckptfused.checks import transformed
from ckptfused.compat import torch_autograd
from ckptfused.compat.torch_autograd import saved_tensor_hooks_allowed, vmap_saves_inputs
from ckptfused.ops import numerics
from ckptfused.recompute.argument_trees import CYCLE
from ckptfused.recompute.arguments import Given, HeldArgs
from ckptfused.recompute.copy_on_write import Aliases, CopiesOnWrite, clone, share_memory
from ckptfused.recompute.per_thread_tensors import entered
from ckptfused.recompute.replay_state import ReplayState, itself
from ckptfused.recompute.saved_tensor_versions import SavedTensorVersions
from ckptfused.spec.checks import check_choice, check_flag, check_integer


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = False,
    context_fn: Callable[[], tuple[Any, Any]] = torch_checkpoint.noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Calls `function(*args, **kwargs)`, keeps its arguments only, and calls it again in backward.

    `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` does the work, and its options mean what they mean
    there. Beyond it:

    - The function works on copies of its arguments: tensors, also those in lists, tuples, dicts, dataclasses and other
      pytrees, are copied when first written (copy-on-write), containers at once. In-place operations on them, such as
      a leading `nn.ReLU(inplace=True)`, give right gradients; the caller's tensors are only read, with grad mode off
      too. A copy that is handed back unwritten becomes the caller's own tensor again (but for a leaf's), other results
      have memory of their own. What the function puts into lists, dicts, dataclasses and other pytrees or takes out of
      them, the caller's get too, once (under torch.compile they do not: return it). Tensors that cannot be copied on
      write (subclasses, sparse, nested) are copied at once. `record_stream` does nothing to a copy that is not yet
      written, whose memory is the caller's: call it on the caller's tensor.
    - Every tensor argument is guarded: changed in place before backward, it raises. So does a parameter, a buffer or a
      tensor of a closure that the replay reads, and what the function itself changes in place after autograd has saved
      it for an operation that backward asks for, with PyTorch's own words. Lists and dicts are replayed as they were.
    - The random state of the devices of all tensor arguments is replayed, not of positional ones alone, and so are
      generators (PyTorch's, NumPy's, `random.Random`), among the arguments at any depth or held by a module; those of
      the module `random` and of `numpy.random`, too, where the code of the function, of a method or property of a
      module, or of what they call by a global name, names or imports them (not with `preserve_rng_state=False`).
    - Names mean in the replay what they meant in the forward: variables of closures, defaults, globals that the code
      names, arguments of partials; lists, dicts and sets in any of these but globals; and attributes of objects that
      the function is, is bound to (a class, too), or has there. Afterwards they mean what they did before it: a counter
      in a closure counts once. (Objects that hold locks, queues or threads are left alone.)
    - Modules are in the replay as the forward found them, and afterwards as they were: children, modes, dropout rates,
      hooks, counters, also in lists and dicts of any kind within one another and in attributes of their classes, and
      buffers that the forward writes (running statistics, power iterations, observers), which are updated once. Objects
      among the arguments, such as caches, are too. So are threads, matmul precision and the libraries and kernels that
      are allowed. Modules are looked for from the function: it is one, is a method of one, or has them in its closure,
      defaults, globals, attributes or arguments, at most six steps away and among the first 256 values of a container.
      Of a function that reaches more than 128 modules only children, parameters, buffers and attributes that are
      numbers, texts and the like are; each module costs about a microsecond at a call, so give it a layer rather than a
      method of the model.
    - **Not** found, so a replay changes it a second time: lists, dicts and objects by way of a global name, or held by
      another object or module (but its lists and dicts); iterators and NumPy arrays; a buffer that the call itself
      registers; a parameter that the function writes, unless a second time makes no difference (a forced norm);
      files. A closure's tensor that the function writes has its old values in the replay, its values and its graph
      afterwards; one into which it adds twice with a gradient raises.
    - **Threads.** A replay has buffers of its own while other threads call the modules under `checkpoint`. All else
      that it finds changed, such as modes, counters and a closure's tensors, is exchanged while it lasts for other
      threads as well: let no thread change or read that of a module while another is in its backward.

    Under `torch.func.grad` and its kind, which have no place for a replay, the function is only called; with PyTorch
    2.11 under `torch.vmap` and forward-mode derivatives, too.

    **Saves** the tensors in `args` and `kwargs`, and the old values of buffers: of those that the function writes, and
    of those up to 64 KiB. Larger buffers are tracked by their version counters. A call that is the first to write
    one, or that writes one above 64 MiB, saves what the function saves, as without a checkpoint; later calls copy the
    buffer. Where there are such buffers, the forward holds what the function saves until it ends, as a replay does.

    **Recomputes** `function`, up to the last tensor that backward needs (`early_stop`).

    **Raises** `ValueError` for `use_reentrant=True`, and for a container with tensors that is among its own contents;
    `ValueError` or `TypeError` for another option out of its range;
    `RuntimeError` in backward for what was changed, with its name;
    `RuntimeError` in forward if the function writes to an argument that shares memory with another.

    **Source** `torch.utils.checkpoint`; PyTorch's copy-on-write storages, for the copies.
    """
    if use_reentrant:
        raise ValueError(
            "ckptfused.checkpoint: expected use_reentrant=False, got True; for reentrant checkpointing "
            "use torch.utils.checkpoint.checkpoint"
        )
    _check_callable("function", function)
    flags = {"debug": debug, "early_stop": early_stop, "preserve_rng_state": preserve_rng_state}
    options = _options(context_fn, determinism_check, flags)
    try:
        inputs = HeldArgs(args, kwargs)
    except RecursionError:
        raise ValueError(f"ckptfused.checkpoint: {CYCLE}") from None
    tensors = inputs.take_tensors()
    # Functionalisation resolves writes, Inductor drops the copies that nobody writes to.
    on_copies: Callable[..., Any] = lambda *given: inputs.call(function, [t.clone() for t in given])  # noqa: E731
    if torch.compiler.is_compiling():
        return torch_checkpoint.checkpoint(on_copies, *tensors, **options)
    with_gradient, ordinary = torch.is_grad_enabled(), _C.ordinary(tensors)
    markers = [] if ordinary else _markers(tensors, options)
    if transformed():
        # torch.func.grad and its kind have no place for a replay, nor has torch.vmap in PyTorch 2.11.
        if not saved_tensor_hooks_allowed() or vmap_saves_inputs():
            return on_copies(*tensors)
        return torch_checkpoint.checkpoint(lambda *markers: on_copies(*tensors), *markers, **options)
    if with_gradient and not ordinary:
        # What was made in inference mode can be neither saved nor written to.
        tensors = [clone(t) if t.is_inference() else t for t in tensors]
    made = CopiesOnWrite()
    if with_gradient:
        copies = made.of(tensors)
    else:  # the function itself may turn gradients on, and off again
        with torch.enable_grad():
            copies = made.of(tensors)
    given = Given(args, kwargs, made.original)
    aliases = Aliases(inputs, tensors, copies) if share_memory(tensors) else None
    if with_gradient:
        with entered():  # before it looks at buffers: those are the module's own from now on
            segment = _Segment(function, inputs, tensors, (copies, given), preserve_rng_state)
            del given
            result = torch_autograd.checkpoint_of_torch(segment, *markers, **options)
            segment.saved_tensor_versions.settle(segment.state.settle())
    else:
        with entered():
            result = inputs.call(function, copies, given)
    if aliases is not None:
        aliases.check()
    return made.settle(result)


def _markers(tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Tensors on the devices of others: torch.utils.checkpoint reads from them whose random states to replay."""
    if any(t.is_nested and t.layout == torch.strided for t in tensors):
        options["determinism_check"] = "none"  # which asks for their sizes
    return [torch.empty(0, device=device) for device in dict.fromkeys(t.device for t in tensors if not t.is_cpu)]


def _options(
    context_fn: Callable[[], tuple[Any, Any]], determinism_check: str, flags: dict[str, bool]
) -> dict[str, Any]:
    """The options of `torch.utils.checkpoint.checkpoint`, checked."""
    options: dict[str, Any] = {"use_reentrant": False, "determinism_check": determinism_check, **flags}
    if context_fn is not torch_checkpoint.noop_context_fn:  # Dynamo wants the default left out
        _check_callable("context_fn", context_fn)
        options["context_fn"] = context_fn
    # Dynamo traces no error of ours.
    for name, flag in flags.items():
        if flag is not True and flag is not False and not torch.compiler.is_compiling():
            check_flag(name, flag)
    if determinism_check != "default" and not torch.compiler.is_compiling():
        check_choice("determinism_check", determinism_check, ("default", "none"))
    return options


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{name}: expected a callable, got {value!r}")


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[[Any], Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
) -> Any:
    """Calls the functions one after the other, in `segments` of equal length, each but the last under `checkpoint`.

    **Saves** the input of each segment but the last, and all that the last one saves.

    **Recomputes** the segments but the last.

    **Raises** `ValueError` unless 1 ≤ `segments` ≤ the number of functions; what `checkpoint` raises.

    **Source** `torch.utils.checkpoint.checkpoint_sequential`.
    """
    if not isinstance(functions, Iterable):
        raise TypeError(f"functions: expected an nn.Sequential or a sequence of functions, got {functions!r}")
    steps: list[Callable[[Any], Any]] = [*functions]
    for i, step in enumerate(steps):
        _check_callable(f"functions[{i}]", step)
    segments = check_integer("segments", segments, 0)
    if not 1 <= segments <= len(steps):
        raise ValueError(
            f"checkpoint_sequential: expected 1 to {len(steps)} segments, one function each, got {segments}"
        )
    size = len(steps) // segments
    theirs = HeldArgs((input,), {}).take_tensors()
    for i in range(segments - 1):
        part = _Chain(steps[i * size : (i + 1) * size])
        input = checkpoint(part, input, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    last = HeldArgs((input,), {})
    # What the last segment writes to is never the caller's.
    copied = segments == 1 or torch.compiler.is_compiling() or transformed()
    copy = torch.clone if torch.compiler.is_compiling() else clone  # Dynamo knows no attributes of tensors
    with torch.enable_grad():
        own = [copy(t) if copied or share_memory([t, *theirs]) else t for t in last.take_tensors()]
    return last.call(_Chain(steps[(segments - 1) * size :]), own)


@dataclass
class _Chain:
    steps: list[Callable[[Any], Any]]

    def __call__(self, value: Any) -> Any:
        for step in self.steps:
            value = step(value)
        return value


class _Segment:
    """The function with its arguments: called once in forward, then in every replay."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: HeldArgs,
        tensors: list[Tensor],
        first: tuple[list[Tensor], Given],
        random_state: bool,
    ) -> None:
        self.function = function
        self.inputs = inputs
        self.saved = SavedArguments(inputs, tensors)
        self.state = ReplayState(function, inputs.others(), random_state)
        self.settings = numerics.current()
        self.saved_tensor_versions = SavedTensorVersions()
        self.first: tuple[list[Tensor], Given] | None = first  # the copies for the forward, and what the caller gave
        self.copies: CopiesOnWrite | None = None
        """What the last replay works on; the sharing ends with the graph, or with the next replay."""

    def __call__(self, *markers: Tensor) -> Any:
        if self.first is not None:
            (copies, given), self.first = self.first, None
            with self.saved_tensor_versions.of_forward(self.state.may_fail()):
                return self.inputs.call(self.function, copies, given)
        self.copies = made = CopiesOnWrite()
        copies = made.of(self.saved.tensors())
        with entered(), numerics.under(self.settings), self.state.replayed() as saved:
            original = made.original if saved is itself else lambda t: saved(made.original(t))
            try:
                with self.saved_tensor_versions.of_replay(original):
                    return self.inputs.call(self.function, copies)
            finally:
                made.forget()


class SavedArguments:
    """The tensors among the arguments, held by autograd like any saved tensor: an enclosing checkpoint drops and
    remakes them, the user's hooks see them."""

    def __init__(self, inputs: HeldArgs, tensors: list[Tensor], places: list[int] | None = None) -> None:
        """places: by which the inputs know these tensors; None: they are all."""
        self.inputs = inputs
        self.places = places
        self.saved = _C.SavedTensors(tensors)

    def tensors(self) -> list[Tensor]:
        if (changed := self.saved.changed()) is not None:
            i, expected, now = changed
            raise RuntimeError(
                f"ckptfused.checkpoint: {self._name(i)} was changed in place between forward and backward: "
                f"expected version {expected}, got version {now}. The replay needs it as it was: "
                "change a clone, or change it after backward"
            )
        return self.saved.unpack()

    def _name(self, i: int) -> str:
        return self.inputs.name(i if self.places is None else self.places[i])
