"""Observes what a model computes outside of modules."""

from __future__ import annotations

import collections
import contextlib
import threading
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch

# By the name of a function: how it is called in names, and its factors.
_PRODUCTS = {
    "matmul": ("matmul", ("input", "other")),
    "__matmul__": ("matmul", ("input", "other")),
    # The other way round.
    "__rmatmul__": ("matmul", ("other", "input")),
    "mm": ("mm", ("input", "mat2")), "bmm": ("bmm", ("input", "mat2")),
    "baddbmm": ("baddbmm", ("input", "batch1", "batch2")),
    "scaled_dot_product_attention": ("scaled_dot_product_attention",
                                     ("query", "key", "value"))}
# torch has modes since 1.13.
HAS_MODES = hasattr(torch.overrides, "TorchFunctionMode")
_Mode: Any = (torch.overrides.TorchFunctionMode if HAS_MODES else
              contextlib.nullcontext)

# Takes a name and what belongs to it, by place.
_Observe = Callable[[str, Mapping[Any, Any]], None]


class _FastPath:
    """State of the fast path: for how many blocks it is off, and what it was
    before."""

    lock = threading.Lock()
    count = 0
    was_enabled = True


class _PassingMode(_Mode):  # type: ignore[misc]
    """Takes part in all calls, and changes none."""

    def __torch_function__(self, func: Any, types: Any,
                           args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """In it nn.TransformerEncoder runs its modules in eval too, where it has
    one kernel in their place else. Of torch before 2.1: in this thread."""
    backend: Any = getattr(torch.backends, "mha", None)
    if not hasattr(backend, "set_fastpath_enabled"):
        # While functions are overridden there is no such kernel.
        with _PassingMode():
            yield
        return
    with _FastPath.lock:
        if not _FastPath.count:
            _FastPath.was_enabled = backend.get_fastpath_enabled()
            backend.set_fastpath_enabled(False)
        _FastPath.count += 1
    try:
        yield
    finally:
        with _FastPath.lock:
            _FastPath.count -= 1
            if not _FastPath.count:
                backend.set_fastpath_enabled(_FastPath.was_enabled)


class _Running(threading.local):
    """The modules that run in a thread, the innermost last: each with its name
    and how often it has called each function."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, Any, collections.Counter[str]]] = []


class Products(_Mode):  # type: ignore[misc]
    """While it is entered, the factors of the products of matrices that modules
    compute in this thread are observed, as "MODULE.matmul_0.input", and what
    comes out, as "MODULE.matmul_0.output"."""

    def __init__(self, record: Sequence[str], observe: _Observe) -> None:
        super().__init__()
        self._record = record
        self._observe = observe
        self._running = _Running()

    def hook(self, model: torch.nn.Module) -> Iterator[Any]:
        """Follows which module runs; gives the handles."""
        for name, module in model.named_modules():
            yield module.register_forward_pre_hook(
                lambda module, _, name=name: self._begin(name, module))
            yield module.register_forward_hook(
                lambda module, *_: self._end(module))

    def _begin(self, name: str, module: torch.nn.Module) -> None:
        if not name:
            # The frames are those that an exception left behind.
            self._running.frames.clear()
        self._running.frames.append((name, module, collections.Counter()))

    def _end(self, module: torch.nn.Module) -> None:
        frames = self._running.frames
        while frames and frames.pop()[1] is not module:
            pass

    def __torch_function__(self, func: Any, types: Any,
                           args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        frames = self._running.frames
        kind, factors = _PRODUCTS.get(getattr(func, "__name__", ""), ("", ()))
        if not kind or not frames:
            return func(*args, **kwargs)
        module, _, counts = frames[-1]
        name = f"{module}.{kind}" if module else kind
        name += f"_{counts[kind]}"
        counts[kind] += 1
        if "input" in self._record:
            given = {**dict(zip(factors, args)), **kwargs}
            self._observe(f"{name}.input", {
                place: given.get(factor)
                for place, factor in enumerate(_PRODUCTS[kind][1])})
        output = func(*args, **kwargs)
        if "output" in self._record:
            self._observe(f"{name}.output", {0: output})
        return output
