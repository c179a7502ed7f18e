"""For torch: results as tensors, models from quantized files, with codes in
place of weights or trained for codes, and activations calibrated while a model
runs.

    import quantd.torch

    with quantd.torch.calibrate(model, client, model_name="acme/net",
                                source=f"rank-{rank}"):
        for batch in batches:
            model(batch)
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import os
import sys
import threading
import time
import traceback
import warnings
from typing import (Any, Callable, Iterable, Iterator, Mapping, Optional,
                    Sequence, Union)

import torch
import torch.utils.checkpoint
from torch.nn.utils import parametrize

from quantd import (_apart, _arrays, _globs, _sharding, _torch_gram,
                    _torch_functions, _torch_weights, errors)
from quantd._requests import CalibrateJob, Contribution, FeatureStatistics
from quantd._torch_fake import FakeQuantize
from quantd._torch_load import LoadedNames, load_into
from quantd._torch_modules import (QuantizedConv1d, QuantizedConv2d,
                                   QuantizedConv3d, QuantizedEmbedding,
                                   QuantizedLinear, QuantizedWeight,
                                   ReplacedWeight, ReplacedWeights, quantize_)
from quantd.client import Client
from quantd.edge import State
from quantd.encoding import GranularityLike
from quantd.results import CalibrateResult, QuantizedTensor
from quantd.tensor import Array, TensorName

__all__ = ["Calibration", "FakeQuantize", "LoadedNames", "QuantizedConv1d",
           "QuantizedConv2d", "QuantizedConv3d", "QuantizedEmbedding",
           "QuantizedLinear", "QuantizedWeight", "ReplacedWeight",
           "ReplacedWeights", "calibrate", "codes", "dequantize", "from_numpy",
           "load_into", "output_weights", "quantize_"]

_KINDS = ("input", "output")
_FEATURES = (None, "gram")
# Share of a contribution's elements: more that were clipped are told of.
_CLIPPED_SHARE = 1e-3
# Most modules that a warning names.
_MOST_NAMED = 8
_ELEMENT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# With on_error "warn" a server that gave no answer is not asked again for so
# many times the time that its retries took: the model waits for them, and is to
# lose no more than this part of its time.
_SILENCE_FACTOR = 10.0
# And for so long at least: to be refused takes no time, and each layer would
# warn.
_LEAST_SILENCE_S = 1.0
# torch before 2.0 hands no keywords to hooks.
_HOOKS_TAKE_KEYWORDS = "with_kwargs" in inspect.signature(
    torch.nn.Module.register_forward_pre_hook).parameters

# Item to be sent: a tensor's name, its sequence, and what is contributed.
_Item = tuple[str, int, Union[torch.Tensor, State]]

# Blocks whose threads send, or will.
_sending: set[Calibration] = set()

if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork.
    os.register_at_fork(after_in_child=_sending.clear)


def from_numpy(array: Array, element_type: str = "") -> torch.Tensor:
    """A tensor on the CPU that shares the memory of `array`. element_type
    "bfloat16": its uint16 are the bits of such. Other uint16 become int32,
    which torch has, by a copy."""
    tensor: torch.Tensor = _arrays.to_torch(array, element_type)
    return tensor


def codes(quantized: QuantizedTensor) -> torch.Tensor:
    """One code per element, in the tensor's shape: int8, uint8, int16, or int32
    for those of int32 and unsigned ones of more than 8 bits."""
    found = quantized.unpacked()
    return found if _arrays.is_torch(found) else from_numpy(found)


def dequantize(quantized: QuantizedTensor) -> torch.Tensor:
    """The reals, in the tensor's shape and type; see
    QuantizedTensor.dequantize."""
    found = quantized.dequantize()
    return found if _arrays.is_torch(found) else from_numpy(
        found, quantized.element_type)


def output_weights(model: torch.nn.Module, batch: Any, *,
                   modules: Union[Iterable[str], Callable[[str, Any], bool],
                                  None] = None,
                   outputs: Optional[Callable[[torch.nn.Module, Any], Any]]
                   = None) -> dict[str, float]:
    """How much of the noise at the output of each layer reaches the end of the
    model, by name of the layer's weight: the noise-to-signal ratio there for
    one of 1 at the layer. What the mixtures of sweep_model need, to be chosen
    by what the model loses.

    It is measured: the model runs once for each layer, with a little noise in
    the weight of that layer alone. A few inputs will do. Nothing of the model
    changes.

    batch: a tensor, a tuple of arguments or a mapping of keywords.
    modules: see calibrate; those without a weight of their own are left out, as
        are those that the batch does not reach.
    outputs: of the model and the batch the tensor that counts; default what the
        model returns, of several tensors the first, or `logits`.

    Raises: ARGUMENT_INVALID.
    """
    with _torch_functions.without_fast_path():
        return _torch_weights.output_weights(
            model, batch, _chosen(model, modules), outputs)


def calibrate(model: torch.nn.Module, client: Client, *, model_name: str,
              source: str, revision: str = "",
              modules: Union[Iterable[str], Callable[[str, Any], bool], None]
              = None, record: Sequence[str] = ("input",),
              start: Union[int, Mapping[str, int], None] = None,
              granularity: GranularityLike = None, mantissa_bits: int = 0,
              force_statistics: bool = False, on_error: str = "raise",
              max_pending_bytes: int = 256 << 20,
              features: Optional[str] = None, where: str = "server",
              every: int = 32, functions: bool = False) -> Calibration:
    """Sends what a model computes to the statistics of the service, under the
    names "MODULE.input" and "MODULE.output" of model_name, with ".1" and so on
    for further tensors, by their place among the parameters of forward();
    keywords that have no place there end in their name. The rest of the model's
    run is untouched. What checkpointing computes a second time, in the backward
    pass, is not counted again.

    Where an earlier block with the same client, model_name, revision and source
    ended with an exception, and what it sent is not answered yet, entering the
    block waits for that, for as long as the client tries again: were both sent
    at once, the one that comes second would be taken for the other one and not
    be counted.

    client: of this process. In one that is forked off inside the block nothing
        is counted: that is an error as on_error has it.
    source: of this process among those that feed the same model, such as its
        rank: each counts its own contributions.
    modules: globs over names of modules, or a function of name and module that
        says which; default all that have a weight of two dimensions or more and
        no modules of their own but parametrizations and FakeQuantize, and
        MultiheadAttention for its in_proj_weight. Its out_proj never runs: it
        takes the weight alone. Names are without the "module." that
        DistributedDataParallel puts in front. The block warns of modules that
        have not run when it ends; meanwhile transformers have no fast path,
        which would run none of theirs.
    record: "input", "output" or both: what is quantized of a layer are its
        inputs.
    start: how many times each tensor was seen before this block, which is what
        makes it exactly once over restarts. A job that starts again from a
        checkpoint and repeats what came after gives the number, or the
        `sequences`, that it had saved with that: what was counted before is not
        counted again. None: goes on after what the service has of this source;
        batches that are repeated count twice.
    granularity, mantissa_bits, force_statistics: see Contribution.
    on_error: "raise" from the model, or from the end of the block; "warn" drops
        what can not be delivered after all retries and lets training go on,
        whatever the reason is. While the server is away the model then waits at
        most for a tenth of its time.
    max_pending_bytes: of copies that wait to be sent; beyond it the model
        waits.

    A DTensor of torch 2 is sent as the part that this process has: the
    statistics are those of the whole tensor. Of processes that have the same
    part only the first sends it. `where` has to be "server" then, and a Gram
    matrix needs all features in each part.

    features: "gram" also adds up the Gram matrices of inputs, with which
        weights are rounded for the output of their layer; see Rounding. Layers
        are Linear and Conv2d without groups; `left_out` has the others, of
        which nothing is counted. The inputs of a Conv2d are unfolded: rows of
        in * height * width features. What feeds several layers, as q, k and v,
        is counted once, and `inputs` says under which name. The first
        contribution to a name sets the steps of its features, see
        FeatureStatistics.
    where: "server" sends each tensor. "device" makes statistics of them where
        the model computes, and sends only these: the service has the same bits
        in the end. The granularity must then fit the tensors, and statistics in
        blocks take memory there. With features each input has a Gram matrix
        there, 8 bytes for each pair of features, and as long as no steps are
        stored the first batch goes up as it is.
    every: on the device: how many times each tensor is seen before its
        statistics are sent. The end of the block and flush() send what there
        is. A contribution has the number of times as its sequence, so that a
        restart may have another `every`: what the service has counted is left
        out. A moving average moves once for each contribution.
    functions: also record products of matrices that modules of the model
        compute with functions of torch: matmul (which is `@`), mm, bmm, baddbmm
        and scaled_dot_product_attention. They are called by the module that
        runs and their order in it, "layers.0.attn.matmul_0.input" and
        "layers.0.attn.matmul_0.input.1"; `modules` does not matter. It takes
        torch 1.13 or later, and sees those of the thread that enters the block,
        but none within another function, such as that of MultiheadAttention.

    Raises: ARGUMENT_INVALID.
    """
    return Calibration(model, client, model_name=model_name, source=source,
                       revision=revision, modules=modules, record=record,
                       start=start, granularity=granularity,
                       mantissa_bits=mantissa_bits,
                       force_statistics=force_statistics, on_error=on_error,
                       max_pending_bytes=max_pending_bytes, features=features,
                       where=where, every=every, functions=functions)


class Calibration:
    """The block of calibrate(). Models may run in several threads.

    is_enabled: False lets what the model computes pass, e.g. in validation; it
        is not counted in `sequences` either.
    left_out: with features, why the inputs of a module are not counted.
    """

    def __init__(self, model: torch.nn.Module, client: Client, *,
                 model_name: str, source: str, revision: str, modules: Any,
                 record: Sequence[str],
                 start: Union[int, Mapping[str, int], None],
                 granularity: GranularityLike, mantissa_bits: int,
                 force_statistics: bool, on_error: str,
                 max_pending_bytes: int, features: Optional[str], where: str,
                 every: int, functions: bool) -> None:
        if on_error not in ("raise", "warn"):
            raise errors.argument_invalid(
                f"expected 'raise' or 'warn', got {on_error!r}", "on_error")
        if where not in ("server", "device"):
            raise errors.argument_invalid(
                f"expected 'server' or 'device', got {where!r}", "where")
        if every < 1:
            raise errors.argument_invalid(f"expected at least 1, got {every}",
                                          "every")
        if not record or isinstance(record, str) or not set(record) <= set(
                _KINDS):
            raise errors.argument_invalid(
                f"expected some of {_KINDS}, got {record!r}", "record")
        if features not in _FEATURES:
            raise errors.argument_invalid(
                f"expected one of {_FEATURES}, got {features!r}", "features")
        if features is not None and set(record) != {"input"}:
            raise errors.argument_invalid(
                "expected features with inputs only", "record")
        if functions and features is not None:
            raise errors.argument_invalid(
                "expected features without functions, which have no weights",
                "functions")
        if functions and not _torch_functions.HAS_MODES:
            raise errors.argument_invalid(
                f"expected torch 1.13 or later, got {torch.__version__}",
                "functions")
        self.is_enabled = True
        self.left_out: dict[str, str] = {}
        self._features = features
        self._shared = _torch_gram.SharedInputs()
        # Names that were told of.
        self._clipped: set[str] = set()
        self._client = client
        self._model_name = model_name
        self._revision = revision
        self._source = source
        self._record = tuple(record)
        self._start = start
        self._granularity = granularity
        self._mantissa_bits = mantissa_bits
        self._force_statistics = force_statistics
        self._on_error = on_error
        self._max_pending_bytes = max_pending_bytes
        self._is_on_device = where == "device"
        self._every = every
        self._model = _unwrapped(model)
        self._products = _torch_functions.Products(
            self._record, self._observe) if functions else None
        self._modules = list(_chosen(model, modules))
        if not self._modules:
            raise errors.argument_invalid("no module of the model is chosen",
                                          "modules")
        if features is not None:
            self._leave_out()
        # By name of their inputs.
        self._layers = {_join(name, "input"): module
                        for name, module in self._modules}
        self._handles: list[Any] = []
        # Settings that hold for torch within the block.
        self._settings = contextlib.ExitStack()
        # Names of what has not been seen.
        self._unseen = {_join(name, kind) for name, _ in self._modules
                        for kind in self._record}
        # Held while a state is made, and before _changed.
        self._gathering = threading.Lock()
        # On the device: of each tensor what was seen since its last
        # contribution.
        self._states: dict[str, State] = {}
        # Exponents of the steps of Gram matrices, once they are stored.
        self._steps: dict[str, Sequence[int]] = {}
        self._changed = _apart.Condition()
        # Guarded by _changed, as is all that follows.
        self._sequences: dict[str, int] = {}
        # On the device: how often the service has counted each, before the
        # block.
        self._counted: dict[str, int] = {}
        self._waiting: collections.deque[_Item]
        self._waiting = collections.deque()
        self._pending_bytes = 0
        # Number of items of the round that is sent that have no answer yet.
        self._round_count = 0
        self._is_ending = False
        self._error: Optional[errors.QuantdError] = None
        self._silent_until = 0.0
        self._thread: Optional[threading.Thread] = None
        # Process that the thread is in.
        self._process_id = os.getpid()

    @property
    def inputs(self) -> dict[str, str]:
        """With features: of each weight whose layer has run, under which name
        its inputs are counted. What quantctl takes as --inputs-map, as
        JSON."""
        with self._changed:
            return {name[:-len("input")] + "weight": counted
                    for name, counted in self._shared.names.items()}

    @property
    def sequences(self) -> dict[str, int]:
        """How many times each tensor was seen, those before the block
        included: what `start` takes. To be saved after flush()."""
        with self._changed:
            return dict(self._sequences)

    def __enter__(self) -> Calibration:
        """Waits for an earlier block that still sends; see calibrate()."""
        if self._thread is not None:
            raise errors.argument_invalid("the block was entered before")
        self._await_earlier()
        try:
            for name, module in self._modules:
                self._hook(name, module)
            self._settings.enter_context(_torch_functions.without_fast_path())
            if self._products is not None:
                self._handles.extend(self._products.hook(self._model))
                self._settings.enter_context(self._products)
            self._process_id = os.getpid()
            self._thread = threading.Thread(target=self._send, daemon=True,
                                            name="quantd-calibrate")
            _sending.add(self)
            self._thread.start()
        except BaseException:
            _sending.discard(self)
            self._remove_hooks()
            raise
        return self

    def _await_earlier(self) -> None:
        # Blocks that go on are not waited for: each may have its own modules.
        for block in list(_sending):
            if block._feeds_same(self) and block._has_ended():
                assert block._thread is not None
                block._thread.join()

    def _feeds_same(self, other: Calibration) -> bool:
        """True if both number their contributions as one source."""
        # The service takes an empty revision for "main".
        return self._client is other._client and (
            self._model_name, self._revision or "main", self._source) == (
                other._model_name, other._revision or "main", other._source)

    def _leave_out(self) -> None:
        """Modules whose inputs have no Gram matrix."""
        for name, module in self._modules:
            why = _torch_gram.why_none(module)
            if why:
                self.left_out[name] = why
        self._modules = [(name, module) for name, module in self._modules
                         if name not in self.left_out]
        if not self._modules:
            raise errors.argument_invalid(
                "expected modules of Linear or Conv2d without groups",
                "modules")
        if self.left_out:
            _warn("not counted, as no Gram matrix is made of their inputs: " +
                  ", ".join(f"{name} ({why})"
                            for name, why in self.left_out.items()))

    def _hook(self, name: str, module: torch.nn.Module) -> None:
        # Before the module runs: it may write over its inputs.
        if "input" in self._record:
            self._handles.append(self._hook_inputs(name, module))
        if "output" in self._record:
            self._handles.append(module.register_forward_hook(
                lambda _, inputs, output: self._observe(
                    _join(name, "output"), _numbered(output))))

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._settings.close()

    def _warn_of_unseen(self) -> None:
        names = [name or "the model itself" for name, _ in self._modules
                 if all(_join(name, kind) in self._unseen
                        for kind in self._record)]
        if names:
            more = len(names) - _MOST_NAMED
            _warn("modules that did not run, of which nothing was counted: " +
                  ", ".join(names[:_MOST_NAMED]) +
                  (f" and {more} more" if more > 0 else ""))

    def _hook_inputs(self, name: str, module: torch.nn.Module) -> Any:
        name = _join(name, "input")
        places = _places(module)

        def observe(_: Any, inputs: Any, keywords: Any) -> None:
            values = _numbered(inputs)
            for key, value in keywords.items():
                values[places.get(key, key)] = value
            self._observe(name, values)

        if _HOOKS_TAKE_KEYWORDS:
            # pylint: disable-next=unexpected-keyword-arg
            return module.register_forward_pre_hook(observe, with_kwargs=True)
        return module.register_forward_pre_hook(
            lambda module, inputs: observe(module, inputs,
                                           _keywords_of_call(module)))

    def __exit__(self, exception_type: Any, *unused: object) -> None:
        """Delivers what is pending; after an exception gives it up at once,
        with a warning: what is on its way may be counted all the same, and the
        next block of this source waits for it as it is entered."""
        self._remove_hooks()
        try:
            if exception_type is None:
                self._warn_of_unseen()
                self.flush()
        finally:
            # In a forked process there is nothing to end.
            if self._process_id == os.getpid():
                self._end()

    def _end(self) -> None:
        with self._changed:
            self._is_ending = True
            count = len(self._waiting) + self._round_count + len(self._states)
            self._waiting.clear()
            self._pending_bytes = 0
            self._changed.notify_all()
        if count:
            # The thread may wait for retries, and ends by itself.
            _warn("the block ended with an exception; contributions that were "
                  f"not sent, or not answered: {count}")
            return
        assert self._thread is not None
        self._thread.join()

    def flush(self) -> None:
        """Waits until everything seen so far is counted for good.

        Raises: QuantdError where it can not be, and on_error is "raise".
        """
        if self._is_forked():
            return
        with self._gathering:
            for name in list(self._states):
                self._contribute_state(name)
        with self._changed:
            while self._pending_bytes and self._error is None:
                self._changed.wait()
            self._raise_error()

    def _is_forked(self) -> bool:
        """True if this process lacks the thread that sends: one would wait for
        it for ever. Raises: PROCESS_FORKED, unless on_error is "warn"."""
        if self._process_id == os.getpid():
            return False
        if self._on_error == "raise":
            raise errors.process_forked()
        return True

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _observe(self, name: str, values: Mapping[Union[int, str], Any]
                 ) -> None:
        """Observes what goes into a module, or comes out, by place or keyword,
        for a hook."""
        self._unseen.discard(name)
        if not self.is_enabled or _is_going_backward():
            return
        if self._features is not None:
            # The weight has no other factor.
            values = {0: values.get(0)}
        for place, tensor in values.items():
            if isinstance(tensor, torch.Tensor) and (
                    tensor.dtype in _ELEMENT_TYPES and tensor.numel() and
                    self._is_own(name, tensor)):
                self._add(f"{name}.{place}" if place else name, tensor)

    def _is_own(self, name: str, tensor: torch.Tensor) -> bool:
        """True if the inputs are not those of another layer too, where they are
        counted."""
        if self._features is None:
            return True
        with self._changed:
            counted, has_changed = self._shared.name_of(
                name, self._layers[name], tensor)
        if has_changed:
            _warn(f"{name} was counted with that of another layer, and is "
                  "another tensor now: it is counted by itself from here on, "
                  "without what came before")
        return counted == name

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if not _sharding.is_counted_here(tensor):
            return
        if self._is_forked():
            _warn_of(name, errors.process_forked())
            return
        with self._changed:
            known = name in self._sequences
            if time.monotonic() < self._silent_until:
                # Seen, and lost.
                if known:
                    self._sequences[name] += 1
                return
        begin = time.monotonic()
        # Asked once for each tensor, outside of the lock.
        try:
            first, counted = (0, 0) if known else self._first_sequence(name)
        except errors.QuantdError as error:
            if self._on_error == "raise":
                raise
            with self._changed:
                self._be_silent(begin)
            _warn_of(name, error)
            return
        if self._is_on_device:
            self._gather(name, tensor, first, counted)
            return
        # The model may write over it before it is sent.
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        size = _size_bytes(copy)
        with self._changed:
            self._await_room(size)
            if self._is_ending:
                return
            sequence = self._sequences.setdefault(name, first) + 1
            self._sequences[name] = sequence
            self._waiting.append((name, sequence, copy))
            self._pending_bytes += size
            self._changed.notify_all()

    def _await_room(self, size: int) -> None:
        """Until so many bytes may wait to be sent. Requires: _changed is
        held."""
        while self._pending_bytes and self._error is None and (
                self._pending_bytes + size > self._max_pending_bytes):
            self._changed.wait()
        self._raise_error()

    def _gather(self, name: str, tensor: torch.Tensor, first: int, counted: int
                ) -> None:
        """Adds a tensor to its state. first, counted: see _first_sequence,
        where they are not known yet."""
        with self._gathering:
            with self._changed:
                self._raise_error()
                sequence = self._sequences.setdefault(name, first) + 1
                self._sequences[name] = sequence
                counted = self._counted.setdefault(name, counted)
            # A job that was started again repeats it.
            if sequence <= counted:
                return
            state = self._states.get(name)
            if state is None:
                steps = None
                if self._features is not None:
                    steps = self._find_steps(name)
                    if steps is None:
                        # Its data set them, or hear of those of another rank.
                        self._queue(name, tensor.detach().to(
                            "cpu", copy=True).contiguous())
                        return
                state = State(self._granularity, self._mantissa_bits, steps)
            state.update(tensor if self._features is None else
                         _torch_gram.rows(self._layers[name], tensor))
            self._states[name] = state
            if sequence % self._every == 0:
                self._contribute_state(name)

    def _contribute_state(self, name: str) -> None:
        """Requires: _gathering is held."""
        self._queue(name, self._states.pop(name))

    def _queue(self, name: str, value: Union[torch.Tensor, State]) -> None:
        """Queues what was seen of a tensor up to now. Requires: _gathering is
        held."""
        size = _size_bytes(value)
        with self._changed:
            self._await_room(size)
            if self._is_ending:
                return
            self._waiting.append((name, self._sequences[name], value))
            self._pending_bytes += size
            self._changed.notify_all()

    def _find_steps(self, name: str) -> Optional[Sequence[int]]:
        """Exponents of the tensor's Gram matrix that are stored. Requires:
        _gathering is held. Raises: QuantdError, unless on_error is "warn"."""
        if name not in self._steps:
            with self._changed:
                # The first batch may be on its way.
                while self._pending_bytes and self._error is None and (
                        self._sequences[name] - self._counted[name] > 1):
                    self._changed.wait()
                self._raise_error()
            try:
                gram = self._client.get_statistics(self._name(name)).gram
            except errors.QuantdError as error:
                if self._on_error == "raise" and (
                        error.reason != "STATISTICS_NOT_FOUND"):
                    raise
                return None
            if gram is None:
                return None
            self._steps[name] = gram.step_exponent
        return self._steps[name]

    def _first_sequence(self, name: str) -> tuple[int, int]:
        """Number of times that the tensor was seen before the first of this
        block, and how many of those the service has counted; that is of use on
        the device only."""
        counted = self._counted_by_service(name) if (
            self._start is None or self._is_on_device) else 0
        if self._start is None:
            return counted, counted
        return self._start if isinstance(self._start, int) else (
            self._start.get(name, 0)), counted

    def _counted_by_service(self, name: str) -> int:
        """The last sequence of the source."""
        try:
            stored = self._client.get_statistics(self._name(name))
        except errors.QuantdError as error:
            if error.reason == "STATISTICS_NOT_FOUND":
                return 0
            raise
        return max((source.sequence for source in stored.sources
                    if source.source == self._source), default=0)

    def _name(self, tensor: str) -> TensorName:
        return TensorName(self._model_name, tensor, self._revision)

    def _send(self) -> None:
        try:
            self._send_rounds()
        finally:
            _sending.discard(self)

    def _send_rounds(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_ending:
                    self._changed.wait()
                if self._is_ending or self._error is not None:
                    return
                round_ = self._take_round()
                self._round_count = len(round_)
            self._deliver(round_)
            # Not to be kept until there is another.
            del round_

    def _take_round(self) -> list[_Item]:
        """The oldest of each tensor: were a later one counted first, the
        earlier one would look like one that was counted."""
        round_: dict[str, _Item] = {}
        rest: collections.deque[_Item]
        rest = collections.deque()
        for item in self._waiting:
            if item[0] in round_:
                rest.append(item)
            else:
                round_[item[0]] = item
        self._waiting = rest
        return list(round_.values())

    def _deliver(self, round_: list[_Item]) -> None:
        def jobs() -> Iterator[CalibrateJob]:
            for name, sequence, value in round_:
                if self._has_ended():
                    return
                features = None
                if self._features is not None and not isinstance(value, State):
                    value = _torch_gram.rows(self._layers[name], value)
                    features = FeatureStatistics(gram=True)
                yield CalibrateJob(
                    value, self._name(name), contribution=Contribution(
                        self._source, sequence, self._granularity,
                        self._mantissa_bits,
                        force_statistics=self._force_statistics,
                        features=features))

        answered = 0
        begin = time.monotonic()
        try:
            answers = self._client.calibrate_many(jobs(), on_error="return")
            for answer in answers:
                if self._on_error == "warn" and getattr(
                        answer, "reason", "") == "SERVER_UNREACHABLE":
                    self._lose_waiting(begin)
                self._settle(round_[answered], answer)
                answered += 1
        except Exception as fault:  # pylint: disable=broad-except
            # Otherwise nobody would be told, and flush would wait.
            for item in round_[answered:]:
                self._settle(item, fault)

    def _be_silent(self, begin: float) -> None:
        """After retries since then, in vain. Requires: _changed is held."""
        now = time.monotonic()
        self._silent_until = max(self._silent_until, now + max(
            _SILENCE_FACTOR * (now - begin), _LEAST_SILENCE_S))

    def _lose_waiting(self, begin: float) -> None:
        """Drops what waits behind what a server that is away did not take, and
        what comes in the next while."""
        with self._changed:
            self._be_silent(begin)
            count = len(self._waiting)
            self._pending_bytes -= sum(
                _size_bytes(value) for _, _, value in self._waiting)
            self._waiting.clear()
            seconds = self._silent_until - time.monotonic()
            self._changed.notify_all()
        if count or seconds >= 1:
            _warn(f"the server is away; for {seconds:.0f} s nothing is sent to "
                  f"it, and {count} contributions that waited are not counted")

    def _settle(self, item: _Item, answer: Any) -> None:
        """Takes the answer to a tensor."""
        name, _, value = item
        error = None
        if isinstance(answer, Exception):
            # Its frames hold tensors.
            traceback.clear_frames(answer.__traceback__)
            error = answer if isinstance(answer, errors.QuantdError) else (
                errors.argument_invalid(f"{type(answer).__name__}: {answer}"))
        if error is not None and self._on_error == "warn" and (
                not self._has_ended()):
            _warn_of(name, error)
        if error is None and self._features is not None:
            self._warn_of_clipped(name, answer)
        with self._changed:
            # _end() has told of those that were left.
            if self._is_ending:
                return
            self._round_count -= 1
            if error is not None and self._on_error == "raise":
                self._error = self._error or error.with_traceback(None)
            self._pending_bytes -= _size_bytes(value)
            self._changed.notify_all()

    def _warn_of_clipped(self, name: str, answer: CalibrateResult) -> None:
        gram = answer.contribution and answer.contribution.gram
        if gram and name not in self._clipped and (
                gram.clipped_count > _CLIPPED_SHARE * answer.statistics.count):
            self._clipped.add(name)
            _warn(f"{name}: {gram.clipped_count} elements of a batch are more "
                  "than 256 times as large as those of the first batch, and "
                  "limited in the Gram matrix; delete the statistics and begin "
                  "with a batch of larger values")

    def _has_ended(self) -> bool:
        with self._changed:
            return self._is_ending


def _size_bytes(value: Union[torch.Tensor, State]) -> int:
    if isinstance(value, State):
        return value.size_bytes
    size: int = value.element_size() * value.nelement()
    return size


def _warn_of(name: str, error: errors.QuantdError) -> None:
    """A contribution."""
    _warn(f"{name} was not counted: {error.reason or error.code.name}: "
          f"{error.message}")


def _warn(text: str) -> None:
    try:
        warnings.warn(f"quantd: {text}", RuntimeWarning)
    except RuntimeWarning:
        # Warnings are errors here, but not those of training.
        pass


def _is_going_backward() -> bool:
    """True if this thread is in the backward pass, where modules run only
    because checkpointing computes once more what it did not keep."""
    task_id = getattr(torch._C, "_current_graph_task_id", None)
    if task_id is not None:
        return bool(task_id() != -1)
    # torch before 2.0: the engine calls Python from the thread that called it,
    # or from one of its own.
    engine = {torch.autograd.backward.__code__, torch.autograd.grad.__code__,
              torch.autograd.function.BackwardCFunction.apply.__code__}
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code in engine or (
                code.co_name == "unpack" and
                code.co_filename == torch.utils.checkpoint.__file__):
            return True
        frame = frame.f_back
    return False


def _keywords_of_call(module: torch.nn.Module) -> Mapping[str, Any]:
    """For a hook of torch before 2.0: the keywords that the module is called
    with."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.nn.Module._call_impl.__code__ and (
                frame.f_locals["self"] is module):
            keywords: Mapping[str, Any] = frame.f_locals["kwargs"]
            return keywords
        frame = frame.f_back
    return {}


def _numbered(value: Any) -> dict[Union[int, str], Any]:
    return dict(enumerate(value if isinstance(value, (tuple, list))
                          else (value,)))


def _places(module: torch.nn.Module) -> dict[str, int]:
    """Places of the parameters of forward() that have one."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {parameter.name: place
            for place, parameter in enumerate(parameters)
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD}


def _join(name: str, kind: str) -> str:
    return f"{name}.{kind}" if name else kind


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Model that DataParallel and the like run."""
    if isinstance(model, (torch.nn.DataParallel,
                          torch.nn.parallel.DistributedDataParallel)):
        return model.module
    return model


def _chosen(model: torch.nn.Module, modules: Any
            ) -> Iterator[tuple[str, torch.nn.Module]]:
    model = _unwrapped(model)
    if modules is None:
        # They take the weight of this one, and do not run it.
        idle = {id(module.out_proj) for module in model.modules()
                if isinstance(module, torch.nn.MultiheadAttention)}

        def has_weights(name: str, module: Any) -> bool:
            return id(module) not in idle and _has_weights(name, module)

        modules = has_weights
    elif not callable(modules):
        patterns = [modules] if isinstance(modules, str) else list(modules)

        def matches(name: str, module: Any) -> bool:
            del module
            return any(_globs.matches(pattern, name) for pattern in patterns)

        _globs.check_all_match(patterns, dict(model.named_modules()),
                               "a module", "modules")
        modules = matches
    for name, module in model.named_modules():
        if modules(name, module):
            yield name, module


def _has_weights(name: str, module: Any) -> bool:
    del name
    if isinstance(module, torch.nn.MultiheadAttention):
        return True
    is_parametrized = parametrize.is_parametrized(module)
    return all(isinstance(child, (QuantizedWeight, FakeQuantize)) or
               is_parametrized and child is module.parametrizations
               for child in module.children()) and _has_matrix(module)


def _has_matrix(module: Any) -> bool:
    """True if the module's weight has two dimensions or more."""
    if parametrize.is_parametrized(module, "weight"):
        # To compute a weight may change the model: spectral_norm does.
        own = module.parametrizations.weight
        if any(tensor.dim() >= 2 for tensor in (
                *own.parameters(recurse=False), *own.buffers(recurse=False))):
            return True
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.dim() >= 2
