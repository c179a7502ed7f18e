"""A whole model from files to files, as quantctl quantize does it."""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import os
import threading
import warnings
from typing import (Any, Collection, Iterable, Iterator, Mapping, Optional,
                    Sequence, Union)

from google.protobuf.message import DecodeError

from quantd import _compressed, _files, _layout, errors
from quantd._files import FileTensor, InputFile, SafetensorsWriter
from quantd._input_squares import InputSquares
from quantd._model_importance import (InputsLike, ModelImportance,
                                      source_of)
from quantd._model_rounding import ModelRounding, StoredInputs
from quantd._parts import (PART_KEY, Part, as_part, find_parts, share_out)
from quantd._plain import open_plain
from quantd._progress import Progress, ProgressLike
from quantd._requests import QuantizeJob
from quantd._scale_stream import xxh3_64
from quantd._specs import (Filter, SpecSet, SpecsLike, Template,
                           warn_of_one_scale)
from quantd._tables import ResultList, Tabular
from quantd._ties import Group, Ties, TiesLike
from quantd._values import (coarse_scale_count, warn_of_coarse_scales,
                            warn_of_not_finite)
from quantd.client import Client
from quantd.encoding import EncodingSpec
from quantd.files import Path
from quantd.results import OutputNoise, QuantizedTensor
from quantd.tensor import TensorName, format_info
from quantd.v1 import quantization_service_pb2 as qs

# Keys of metadata as quantctl names them: see client/cli/quantize.cc.
_COMMAND_KEY = "quantctl.command"
_RUN_KEY = "quantctl.run"
_TENSORS_KEY = "quantctl.tensors"
_CHECKSUM_KEY = "quantctl.checksum"
_LAYOUT = "quantd"
_MOST_NAMES = 10
# Bytes of data from which on a file has room; see _header_room.
_ROOM_FROM_BYTES = 16 << 20
_OTHER_PART = (", made from another source or with other arguments than these; "
               "all parts need the same ones")
_RECORDED = ("clipped_low", "clipped_high", "nan", "infinity",
             "coarse_scales", "mantissa_bits")
_NAN_POLICIES = (None, "zero_point", "qmin", "reject")


@dataclasses.dataclass(frozen=True)
class ModelTensor(Tabular):
    """Result of one tensor.

    result: "quantized", "copied", "kept" from an earlier run, or "failed",
        which is copied too.
    bytes_after: with all that lies beside the codes.
    format: of the codes; None where there are none.
    error: why it failed.
    rounding: "compensated" for the output of its layer, or "nearest"; None
        where it is not quantized.
    output_noise: what compensated rounding makes of that output.
    importance: whether it weighed the errors in the search for scales.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    result: str
    bytes_before: int
    bytes_after: int
    format: Optional[str] = None
    clipped_low_count: int = 0
    clipped_high_count: int = 0
    nan_count: int = 0
    infinity_count: int = 0
    error: Optional[errors.QuantdError] = None
    rounding: Optional[str] = None
    output_noise: Optional[OutputNoise] = None
    importance: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedModel(Tabular):
    """Report of what quantize_model() wrote.

    tensors: in the order of the files, with to_dicts() for a table.
    file_bytes: of the files with tensors.
    left_out: names of files of the source folder that are not in the target.
    """

    path: str
    tensors: ResultList[ModelTensor]
    file_bytes: int
    left_out: tuple[str, ...]


@dataclasses.dataclass(eq=False)
class _Outcome:
    """Result of a tensor so far."""

    error: Optional[errors.QuantdError] = None
    is_quantized: bool = False
    format: str = ""
    output_bytes: int = 0
    clipped_low: int = 0
    clipped_high: int = 0
    nan: int = 0
    infinity: int = 0
    coarse_scales: int = 0
    mantissa_bits: int = 0
    is_compensated: bool = False
    output_noise: Optional[OutputNoise] = None

    def record(self) -> dict[str, Any]:
        """Record that a shard keeps of it for the runs after this one."""
        record = {"format": self.format, "bytes": self.output_bytes,
                  **{key: getattr(self, key) for key in _RECORDED}}
        if self.is_compensated:
            record["rounding"] = "compensated"
        if self.output_noise is not None:
            record["output_noise"] = base64.b64encode(qs.OutputNoise(
                noise_to_signal=self.output_noise.noise_to_signal,
                source=qs.OUTPUT_NOISE_SOURCE_GRAM,
                clipped_input_count=self.output_noise.clipped_input_count,
            ).SerializeToString()).decode()
        return record

    @classmethod
    def of_record(cls, record: Any) -> Optional[_Outcome]:
        """None where it is not sound."""
        keys = ("bytes", *_RECORDED)
        if not isinstance(record, dict) or not isinstance(
                record.get("format"), str) or not all(
                    type(record.get(key)) is int and record[key] >= 0
                    for key in keys):
            return None
        outcome = cls(None, True, record["format"],
                      *(record[key] for key in keys))
        outcome.is_compensated = "rounding" in record
        if "output_noise" in record:
            try:
                outcome.output_noise = OutputNoise.from_proto(
                    qs.OutputNoise.FromString(
                        base64.b64decode(record["output_noise"])))
            except (TypeError, ValueError, DecodeError):
                return None
        return outcome


@dataclasses.dataclass(eq=False)
class _Shard:
    """One file of the source and what it becomes."""

    file: InputFile
    name: str
    output_path: str
    selected: list[FileTensor] = dataclasses.field(default_factory=list)
    command: str = ""
    run: str = ""
    is_kept: bool = False
    overwrite: bool = False


@dataclasses.dataclass(eq=False)
class _Target:
    """One file that a run writes: a shard, or a part of one."""

    shard: _Shard
    # The tensors that are quantized.
    tensors: Sequence[FileTensor]
    path: str
    part: Optional[Part] = None
    is_kept: bool = False
    overwrite: bool = False

    @property
    def covered(self) -> Sequence[FileTensor]:
        """Tensors of the shard that this run has to do with."""
        return (list(self.shard.file.tensors.values()) if self.part is None
                else self.tensors)


def quantize_model(
        source: Path, target: Path, specs: SpecsLike, *, client: Client,
        model: str = "", revision: str = "main", store: bool = False,
        include: Iterable[str] = (), exclude: Iterable[str] = (),
        min_rank: int = 2, nan_policy: Optional[str] = None,
        keep_going: bool = False, overwrite: bool = False,
        restart: bool = False, requantize: bool = False, streams: int = 2,
        ties: TiesLike = True, part: Union[tuple[int, int], str, None] = None,
        progress: ProgressLike = False,
        rounding: Optional[ModelRounding] = None, inputs: InputsLike = None,
        importance: Optional[Mapping[str, InputSquares]] = None
        ) -> QuantizedModel:
    """Quantizes the tensors of a file or of the folder of a model, and copies
    the others; with the bytes that quantctl quantize writes:

        quantd.quantize_model("llm", "llm-int4", {"*_proj.weight":
                              "int4:group:128"}, client=client)

    source: a safetensors, .npy or .gguf file, or a folder with
        model.safetensors.index.json or model.safetensors.
    target: a safetensors file, or a folder for a folder. Finished shards of an
        earlier run with the same arguments are kept.
    specs: a spec of all tensors, such as "int8:per-channel", or by pattern: a
        tensor has that of the first pattern that matches its name, and stays as
        it is where none does. A list of SPEC and PATTERN=SPEC, or
        "@mixture.txt" as quantctl sweep writes it, is also taken.
    store: keep the encodings in the store, under `model` and `revision`, which
        are of use with it, and with importance, alone. The default of the model
        is the name of the source. Readers of the revision see those that were
        there before until all files are written, and then all new ones:
        meanwhile these are in a draft, see "Drafts" in client/README.md.
        Encodings of other tensors stay.
    include, exclude: patterns of names; min_rank: see Client.quantize_many.
    keep_going: write the target even if tensors fail, with these as they were.
    overwrite: replace a file, or the files of other runs in a folder.
    restart: do finished shards again as well.
    requantize: take blocks of GGUF and checkpoints of other programs too, and
        quantize what they decode to.
    streams: tensors on their way at once, each on a stream of its own.
    ties: tensors that share one outer scale, such as nvfp4 has. True: q/k/v,
        gate/up and w1/w3, which runtimes fuse, by their usual names. False:
        none. Patterns, such as "{layer}.self_attn.{q,k,v}_proj.weight", come
        before these; see --tie in the help of quantctl quantize.
    part: (i, n) does share i of n, from 0 on; any part may be done again, in
        any process that sees the files, and join_model() makes the target of
        them. quantctl quantize --part does the same.
    progress: see Client.quantize_many.
    rounding: weights whose inputs have a Gram matrix are rounded for the output
        of their layer, the others to the nearest code: `rounding` of
        ModelTensor says which.
    inputs: the model whose stored statistics have the moments or the Gram
        matrices of layers' inputs, for specs with importance, or a
        ModelRounding that says which; default that of `rounding`, or `model`.
    importance: an importance matrix of llama.cpp as imatrix.load() gives it, by
        names of weights or llama.cpp's names for them: how much errors in each
        column count for specs with mse, sqnr or best-of. Tensors for which
        there is none are quantized without: `importance` of ModelTensor says
        which.

    Tensors with NaN or infinities are warned of; nan_policy="reject" refuses
    them. So are those with float16 scales below 2^-20, where it has few
    numbers, and those of one dimension that have one scale for groups.

    Only the tensors under way are in memory, and codes go to a file without a
    name in the target's folder: a model may be larger than memory.

    Raises: the error of a tensor, and then nothing is written, in a folder not
        that tensor's shard; ARGUMENT_INVALID where nothing is quantized, once
        the target has all tensors as they were; FILE_EXISTS, FILE_UNREADABLE,
        FILE_UNWRITABLE, FILE_MALFORMED, FILE_UNSUPPORTED, ARGUMENT_INVALID;
        FILE_CHANGED for a source that is changed or cut short while it is read.
    """
    if nan_policy not in _NAN_POLICIES:
        raise errors.argument_invalid(
            f"expected one of {', '.join(map(str, _NAN_POLICIES))}, got "
            f"{nan_policy!r}", "nan_policy")
    if streams < 1:
        raise errors.argument_invalid(
            f"expected at least 1, got {streams}", "streams")
    if part is not None and keep_going:
        raise errors.argument_invalid("expected part without keep_going",
                                      "part")
    parsed = SpecSet(specs)
    run = _Run(os.fspath(source), os.fspath(target), parsed,
               Filter(tuple(include), tuple(exclude), min_rank), client, model,
               revision, store, nan_policy, keep_going, overwrite, restart,
               requantize, streams, Ties(ties),
               None if part is None else as_part(part), False, rounding,
               ModelImportance(importance, source_of(
                   inputs, rounding, model, revision, parsed.has_importance,
                   store)))
    run.plan()
    return run.write(progress)


def join_model(
        source: Path, target: Path, specs: SpecsLike, *,
        client: Optional[Client] = None, model: str = "",
        revision: str = "main", store: bool = False,
        include: Iterable[str] = (), exclude: Iterable[str] = (),
        min_rank: int = 2, nan_policy: Optional[str] = None,
        overwrite: bool = False, requantize: bool = False,
        ties: TiesLike = True,
        rounding: Optional[ModelRounding] = None, inputs: InputsLike = None,
        importance: Optional[Mapping[str, InputSquares]] = None
        ) -> QuantizedModel:
    """Makes the target of the parts of quantize_model(), once all are done; the
    target is that of one run. The arguments are those of the parts.

    client: only with store, whose encodings it publishes, with rounding, and
        with a spec that has importance.

    Raises: FILE_INCOMPLETE, with the parts that are missing; those of
        quantize_model().
    """
    parsed = SpecSet(specs)
    if client is None and (store or rounding is not None or
                           parsed.has_importance):
        raise errors.argument_invalid(
            "expected a client with store, rounding and importance", "client")
    run = _Run(os.fspath(source), os.fspath(target), parsed,
               Filter(tuple(include), tuple(exclude), min_rank), client, model,
               revision, store, nan_policy, False, overwrite, False,
               requantize, 1, Ties(ties), None, True, rounding,
               ModelImportance(importance, source_of(
                   inputs, rounding, model, revision, parsed.has_importance,
                   store)))
    run.plan()
    return run.write(False)


def _hash(text: bytes) -> str:
    if xxh3_64 is None:
        raise errors.argument_invalid(
            "a folder, a part and store=True need xxhash (on Debian "
            "python3-xxhash)", "target")
    return f"{xxh3_64(text).intdigest():016x}"


def _file_text(path: str) -> str:
    """Text that tells the contents of a file from those of another time."""
    status = os.stat(path)
    return (f"{status.st_size} {status.st_mtime_ns // 10**9} "
            f"{status.st_mtime_ns % 10**9}\n")


def _stem(path: str) -> str:
    name = os.path.basename(path.rstrip("/"))
    dot = name.rfind(".")
    return name[:dot] if dot > 0 else name


def _is_same(a: str, b: str) -> bool:
    return os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)


class _Run:
    """One call of quantize_model()."""

    def __init__(self, source: str, target: str, specs: SpecSet,
                 taken: Filter, client: Optional[Client], model: str,
                 revision: str, store: bool, nan_policy: Optional[str],
                 keep_going: bool, overwrite: bool, restart: bool,
                 requantize: bool, streams: int, ties: Ties,
                 part: Optional[Part], joins: bool,
                 rounding: Optional[ModelRounding],
                 importance: ModelImportance) -> None:
        self._source = source
        self._target = target
        self._specs = specs
        self._filter = taken
        self._client = client
        self._model = model or _stem(source)
        self._revision = revision
        self._store = store
        self._nan_policy = nan_policy
        self._keep_going = keep_going
        self._overwrite = overwrite
        self._restart = restart
        self._requantize = requantize
        self._streams = streams
        self._ties = ties
        self._part = part
        self._joins = joins
        self._rounding = rounding
        self._importance = importance
        # With rounding, once the plan is made.
        self._inputs: Optional[StoredInputs] = None
        self._targets: list[_Target] = []
        self._is_folder = os.path.isdir(source)
        self._index = _files.ShardIndex({})
        self._weight_map: dict[str, str] = {}
        self._shards: list[_Shard] = []
        self._outcomes: dict[str, _Outcome] = {}
        self._groups: list[Group] = []
        # By tensor.
        self._tied: dict[str, Group] = {}
        # By tensor; other ones once their importance is found.
        self._spec_of: dict[str, EncodingSpec] = {}
        self._is_cleared = False
        # Revision that the encodings are in until all files are written.
        self._draft = ""

    # Before anything is sent or written.

    def plan(self) -> None:
        """Opens all inputs, decides what is to be done with each, and finds
        what is there already."""
        self._open()
        self._check_target()
        self._select()
        self._groups = self._ties.find(
            [(tensor, self._message(tensor)) for shard in self._shards
             for tensor in shard.selected])
        self._tied = {tensor.name: group for group in self._groups
                      for tensor in group.tensors}
        self._find_inputs()
        # Behind the ties: tensors that share a scale may weigh errors
        # differently.
        self._importance.find(
            [(tensor.name, tensor.shape) for shard in self._shards
             for tensor in shard.selected],
            lambda name: [self._template(name).spec], self._client)
        self._spec_of.clear()
        if self._has_keys:
            for shard in self._shards:
                self._set_keys(shard)
        self._make_targets()
        if self._is_folder:
            self._check_folder()
        self._check_parts()
        if self._joins:
            self._check_join()
        unread = [name for shard in self._shards
                  for name in shard.file.unread]
        if unread and not self._keep_going:
            raise _files.unsupported(
                self._source, f"{len(unread)} tensors are of types that are "
                "not read; keep_going leaves them out: " +
                ", ".join(unread[:_MOST_NAMES]))
        if not self._keep_going:
            self._raise_failed()

    def _find_inputs(self) -> None:
        if self._rounding is None:
            return
        assert self._client is not None
        self._inputs = StoredInputs(self._rounding, self._client)
        for shard in self._shards:
            for tensor in shard.selected:
                self._outcomes[tensor.name].is_compensated = (
                    self._inputs.of(tensor.name) is not None)
        self._inputs.check_any(any(outcome.is_compensated for outcome in
                                   self._outcomes.values()))

    @property
    def _has_keys(self) -> bool:
        """True if anything says what files were made from."""
        return (self._is_folder or self._joins or self._part is not None or
                self._store)

    def _make_targets(self) -> None:
        """All shards, or a part of them."""
        if self._part is None:
            self._targets = [
                _Target(shard, shard.selected, shard.output_path)
                for shard in self._shards]
            return
        shares = share_out([shard.selected for shard in self._shards],
                           self._part.count)
        for shard, found in zip(self._shards, shares):
            own = [share for share in found if share.part == self._part.index]
            # A single file is there once it is joined, never before.
            if own and len(found) == 1 and self._is_folder:
                self._targets.append(_Target(shard, shard.selected,
                                             shard.output_path))
            elif own:
                self._targets.append(_Target(
                    shard, own[0].tensors, self._part.path(shard.output_path),
                    self._part))

    def _open(self) -> None:
        if self._is_folder:
            self._index = _files.read_index(self._source)
            self._weight_map = self._index.weight_map
        files = open_plain(self._source, self._requantize)
        if self._weight_map:
            # A tensor is where its codes were.
            self._weight_map = {name: os.path.basename(file.path)
                                for file in files for name in file.tensors}
        for file in files:
            name = os.path.basename(file.path)
            self._shards.append(_Shard(
                file, name, self._output(name) if self._is_folder
                else self._target))
            if not self._requantize:
                self._check_blocks(file)

    def _check_blocks(self, file: InputFile) -> None:
        for tensor in file.tensors.values():
            if tensor.decode is not None:
                raise _files.unsupported(
                    self._source, f"expected plain tensors, but {tensor.name!r}"
                    " is quantized already; begin with the model that it was "
                    "made from, or take requantize=True, which quantizes what "
                    "it decodes to")

    def _output(self, name: str) -> str:
        return os.path.join(self._target, name)

    def _check_target(self) -> None:
        if _is_same(self._source, self._target):
            raise errors.argument_invalid(
                f"expected a target other than the source, got "
                f"{self._target!r}", "target")
        if not self._is_folder:
            if os.path.isdir(self._target) or self._target.endswith("/"):
                raise errors.argument_invalid(
                    "expected the name of a safetensors file, got "
                    f"{self._target!r}", "target")
            _files.check_extension(self._target, "target")
            _files.check_writable(self._target, self._overwrite)
            self._shards[0].overwrite = self._overwrite
        elif not os.path.isdir(self._target) and (
                os.path.lexists(self._target) or
                _files.stands_for_another_format(self._target) or
                self._target.lower().endswith(".safetensors")):
            raise errors.argument_invalid(
                f"expected the name of a folder, got {self._target!r}",
                "target")

    def _select(self) -> None:
        tensors = [tensor for shard in self._shards
                   for tensor in shard.file.tensors.values()]
        selected = {tensor.name for tensor in
                    self._filter.select(tensors, self._specs)}
        for shard in self._shards:
            for name, tensor in shard.file.tensors.items():
                outcome = self._outcomes[name] = _Outcome()
                if name not in selected or 0 in tensor.shape:
                    continue
                try:
                    self._check_names(shard.file, name)
                    self._spec(tensor)
                    shard.selected.append(tensor)
                except errors.QuantdError as error:
                    error.name = TensorName(tensor=name)
                    outcome.error = error

    def _template(self, name: str) -> Template:
        template = self._specs.of(name)
        assert template is not None
        return template

    def _spec(self, tensor: FileTensor) -> EncodingSpec:
        spec = self._spec_of.get(tensor.name)
        if spec is None:
            spec = self._spec_of[tensor.name] = self._importance.apply(
                tensor.name, self._template(tensor.name).spec_of(tensor.shape))
        return spec

    def _message(self, tensor: FileTensor) -> Any:
        return self._spec(tensor).to_proto()

    @staticmethod
    def _check_names(file: InputFile, name: str) -> None:
        """Checks that the names that a quantized tensor takes are free."""
        for suffix in _layout.SUFFIXES:
            if name + suffix in file.tensors:
                raise errors.argument_invalid(
                    f"the file has a tensor {name + suffix!r} of its own")

    def _raise_failed(self) -> None:
        failed = [name for name, outcome in self._outcomes.items()
                  if outcome.error is not None]
        if not failed:
            return
        error = self._outcomes[failed[0]].error
        assert error is not None
        raise _with_note(error, f"; {len(failed)} of {len(self._outcomes)} "
                         f"tensors failed, so {self._target} is not "
                         f"{'complete' if self._is_folder else 'written'}; "
                         "keep_going leaves such tensors as they are")

    # Files that earlier runs left.

    def _check_folder(self) -> None:
        has_own = False
        for target in self._targets:
            shard = target.shard
            if not os.path.lexists(shard.output_path):
                continue
            metadata = _metadata_of(shard.output_path)
            shard.is_kept = not self._restart and self._keep(shard, metadata)
            is_own = shard.is_kept or (
                metadata.get(_COMMAND_KEY) == shard.command)
            has_own = has_own or is_own
            if not is_own and not self._overwrite:
                raise _files.exists(
                    shard.output_path,
                    ", made from another source or with other arguments"
                    if metadata.get(_COMMAND_KEY) else "")
            shard.overwrite = True
        index = self._output(_files.INDEX_NAME)
        has_index = os.path.lexists(index)
        if has_index and not self._weight_map:
            raise errors.argument_invalid(
                "expected a folder for a model in one file, but "
                f"{index} is there", "target")
        if has_index and not has_own and not self._overwrite:
            raise _files.exists(index)
        self._check_others()

    def _check_others(self) -> None:
        """No weights are to stay beside those of this run that loaders take for
        a part of the model: they prefer model.safetensors to an index, and
        some read all files, above all where there is no index. With overwrite
        those of quantctl are taken away."""
        names = {shard.name for shard in self._shards}
        for name in sorted(os.listdir(self._target) if os.path.isdir(
                self._target) else ()):
            if name in names or not name.endswith(".safetensors") or (
                    self._weight_map and not name.startswith("model")):
                continue
            path = self._output(name)
            if not _metadata_of(path).get(_COMMAND_KEY):
                raise errors.argument_invalid(
                    "expected a folder without weights of others, which "
                    f"loaders would take for a part of the model, but {path} "
                    "is there", "target")
            if not self._overwrite:
                raise _files.exists(path)

    def _check_parts(self) -> None:
        """Files of parts that are there are kept, or done again."""
        for target in self._targets:
            shard = target.shard
            target.is_kept, target.overwrite = shard.is_kept, shard.overwrite
            if target.part is None or shard.is_kept:
                continue
            target.overwrite = False
            if not os.path.lexists(target.path):
                continue
            metadata = _metadata_of(target.path)
            is_own = metadata.get(_RUN_KEY) == shard.run
            if not is_own and not self._overwrite:
                raise _files.exists(target.path, _OTHER_PART)
            target.is_kept = (
                not self._restart and is_own and _is_intact(target.path) and
                self._take_records(target.tensors, metadata))
            target.overwrite = True

    def _check_join(self) -> None:
        """All parts of all shards are there and belong together."""
        missing = []
        for number, shard in enumerate(self._shards):
            if shard.is_kept:
                # A part that has a shard to itself wrote it in its place.
                _check_data(_files.open_safetensors(shard.output_path))
                continue
            parts = find_parts(shard.output_path)
            if not parts:
                missing.append(shard.output_path)
                continue
            count = parts[0].count
            if parts[-1].count != count:
                raise _files.incomplete(
                    shard.output_path, f"there are files of {count} parts and "
                    f"of {parts[-1].count} parts; delete those that are of no "
                    "use")
            shares = share_out([shard.selected for shard in self._shards],
                               count)[number]
            for share in shares:
                part = Part(count, share.part)
                path = part.path(shard.output_path)
                if not os.path.lexists(path):
                    missing.append(f"part {part} of {shard.output_path}")
                    continue
                metadata = _files.open_safetensors(path).metadata
                if metadata.get(_RUN_KEY) != shard.run or (
                        not self._take_records(share.tensors, metadata)):
                    raise _files.incomplete(path, _OTHER_PART[2:])
        if missing:
            more = len(missing) - _MOST_NAMES
            raise _files.incomplete(
                self._target, "not there: " + ", ".join(missing[:_MOST_NAMES]) +
                (f" and {more} more" if more > 0 else "") +
                "; run these parts, then join again")

    def _set_keys(self, shard: _Shard) -> None:
        policy = (self._nan_policy or "").replace("_", "-")
        command = (f"{_LAYOUT}\n{policy}".encode() + self._specs.text() +
                   (self._inputs.command_text() if self._inputs else b"") +
                   self._importance.command_text(self._specs.has_importance) +
                   self._ties.text() + self._filter.text())
        shard.command = _hash(
            f"{os.path.realpath(shard.file.path)}\n".encode() + command)
        where = (self._client.target if self._store and self._client is not None
                 else "")
        text = command + (f"\n{self._model}\n{self._revision}\n0\n{where}\n"
                          f"{_file_text(shard.file.path)}").encode()
        for source in shard.file.sources:
            told = _file_text(source) if os.path.exists(source) else ""
            text += f"source {os.path.basename(source)} {told}".encode()
        for tensor in shard.selected:
            text += tensor.name.encode() + b"\n" + self._message(
                tensor).SerializeToString(deterministic=True) + b"\n"
        if self._inputs:
            text += b"".join(self._inputs.run_text(tensor.name)
                             for tensor in shard.selected)
        text += b"".join(self._importance.run_text(tensor.name,
                                                   self._spec(tensor))
                         for tensor in shard.selected)
        # Tied tensors of other shards decide on a scale too.
        for group in self._groups:
            names = {tensor.name for tensor in group.tensors}
            if not names & shard.file.tensors.keys():
                continue
            text += f"tie {group.label}\n".encode()
            for other in self._shards:
                if names & other.file.tensors.keys():
                    text += (f"{other.name} "
                             f"{_file_text(other.file.path)}").encode()
            for tensor in group.tensors:
                text += f"{tensor.name}\n".encode()
        shard.run = _hash(text)

    def _keep(self, shard: _Shard, metadata: Mapping[str, str]) -> bool:
        """True if an earlier run has written that shard; takes over what it
        tells."""
        if metadata.get(_RUN_KEY) != shard.run or self._has_failed(shard):
            return False
        # A join fails of it instead.
        if not self._joins and not _is_intact(shard.output_path):
            return False
        if not self._take_records(shard.selected, metadata):
            return False
        for tensor in shard.file.tensors.values():
            outcome = self._outcomes[tensor.name]
            if not outcome.is_quantized:
                outcome.output_bytes = tensor.size_bytes
        return True

    def _take_records(self, tensors: Sequence[FileTensor],
                      metadata: Mapping[str, str]) -> bool:
        """Takes over what a file tells of the tensors that it has; False where
        it is not all there."""
        try:
            records = json.loads(metadata.get(_TENSORS_KEY, ""))
        except (ValueError, RecursionError):
            return False
        if not isinstance(records, dict) or len(records) != len(tensors):
            return False
        found = {tensor.name: _Outcome.of_record(records.get(tensor.name))
                 for tensor in tensors}
        if any(outcome is None for outcome in found.values()):
            return False
        self._outcomes.update((name, outcome) for name, outcome in
                              found.items() if outcome is not None)
        return True

    def _has_failed(self, shard: _Shard) -> bool:
        return any(self._outcomes[name].error is not None
                   for name in shard.file.tensors)

    # Sending and writing.

    def write(self, wanted: ProgressLike) -> QuantizedModel:
        """Does what is to be done."""
        if self._store:
            # A token that may not do this is not to be found out at the end.
            self._find_draft()
        if self._is_folder:
            try:
                os.makedirs(self._target, exist_ok=True)
            except OSError as error:
                raise _files.unwritable(self._target, error) from error
        targets = [target for target in self._targets if not target.is_kept]
        total = sum(tensor.size_bytes for target in targets
                    for tensor in target.tensors)
        with Progress(wanted, "quantize", total) as progress:
            for target in targets:
                self._write_target(target, progress)
        if self._part is None:
            if self._joins:
                self._remove_parts()
            if self._weight_map:
                # The last, because it makes a model of the shards.
                self._write_index()
            if self._store:
                self._publish()
            if not any(outcome.is_quantized or outcome.error is not None
                       for outcome in self._outcomes.values()):
                raise errors.argument_invalid(
                    f"nothing is quantized: {self._target} has all tensors as "
                    "they were", "specs")
        return self._result()

    def _write_target(self, target: _Target, progress: Progress) -> None:
        shard = target.shard
        with SafetensorsWriter(target.path, target.overwrite) as writer:
            writer.metadata.update(shard.file.metadata)
            if self._joins:
                self._take_parts(shard, writer)
            else:
                assert self._client is not None
                _Sender(self._client, self._streams, self._job, writer,
                        self._outcomes, progress).send(target.tensors)
            has_failed = self._has_failed(shard)
            if has_failed and not self._keep_going:
                self._raise_failed()
            for number, tensor in enumerate(target.covered):
                outcome = self._outcomes[tensor.name]
                if not outcome.is_quantized:
                    outcome.output_bytes = writer.add_view(
                        (1, number, 0), tensor.name, tensor.dtype,
                        tensor.shape, tensor.bytes)
            if self._is_folder or target.part is not None:
                writer.metadata[_COMMAND_KEY] = shard.command
                # One that failed in part is done again.
                if not has_failed:
                    writer.metadata[_RUN_KEY] = shard.run
                    writer.metadata[_TENSORS_KEY] = _files.to_json(
                        {tensor.name: self._outcomes[tensor.name].record()
                         for tensor in target.tensors
                         if self._outcomes[tensor.name].is_quantized})
            if target.part is not None:
                writer.metadata[PART_KEY] = str(target.part)
            elif self._is_folder:
                self._clear()
            try:
                writer.finish(self._header_room(target),
                              _CHECKSUM_KEY if _RUN_KEY in writer.metadata
                              else "")
            except errors.QuantdError as error:
                # This part may be under way elsewhere too, and be first.
                if error.reason != "FILE_EXISTS" or not shard.run or (
                        _metadata_of(target.path).get(_RUN_KEY) != shard.run):
                    raise

    def _header_room(self, target: _Target) -> int:
        """Room for the header of a large file: enough, whatever becomes of the
        tensors. quantctl leaves it, so that codes come to where they stay."""
        specs = {tensor.name: self._template(tensor.name).of(tensor.shape)
                 for tensor in target.tensors}
        entries = [entry for tensor in target.tensors
                   for entry in _layout.expected_entries(
                       tensor.name, specs[tensor.name], tensor.shape)]
        entries += [(tensor.name, tensor.dtype, tensor.shape)
                    for tensor in target.covered if tensor.name not in specs]
        if sum(_files.size_of(dtype, shape)
               for _, dtype, shape in entries) < _ROOM_FROM_BYTES:
            return 0
        metadata = dict(target.shard.file.metadata)
        records: dict[str, Any] = {}
        for tensor in target.tensors:
            spec = specs[tensor.name]
            encoding, _ = _layout.expected(spec, tensor.shape)
            most = 2**64 - 1
            compensated = self._outcomes[tensor.name].is_compensated
            records[tensor.name] = _Outcome(
                None, True, "u" + encoding.format, most, most, most, most,
                most, most, most, compensated,
                OutputNoise(1, "gram", most) if compensated else None
            ).record()
            metadata[_layout.KEY_PREFIX + tensor.name] = (
                "u" + _layout.record_text(
                    dataclasses.replace(encoding, qmin=-2**31, qmax=-2**31),
                    tensor.shape, tensor.element_type or ""))
        if self._is_folder or target.part is not None:
            metadata[_COMMAND_KEY] = target.shard.command
            metadata[_RUN_KEY] = target.shard.run
            metadata[_CHECKSUM_KEY] = _files.NO_CHECKSUM
            metadata[_TENSORS_KEY] = _files.to_json(records)
        if target.part is not None:
            metadata[PART_KEY] = str(target.part)
        entries.sort(key=lambda entry: -_files.DTYPES[entry[1]].itemsize)
        return len(_files.header_text(target.path, entries, metadata))

    def _take_parts(self, shard: _Shard, writer: SafetensorsWriter) -> None:
        places = {tensor.name: number
                  for number, tensor in enumerate(shard.selected)}
        for part in find_parts(shard.output_path):
            file = _files.open_safetensors(part.path(shard.output_path))
            _check_data(file)
            for name in json.loads(file.metadata[_TENSORS_KEY]):
                for at, suffix in enumerate(_layout.SUFFIXES_AS_WRITTEN):
                    tensor = file.tensors.get(name + suffix)
                    if tensor is not None:
                        writer.add_view((0, places[name], at), tensor.name,
                                        tensor.dtype, tensor.shape,
                                        tensor.bytes)
                key = _layout.KEY_PREFIX + name
                writer.metadata[key] = file.metadata[key]

    def _remove_parts(self) -> None:
        for shard in self._shards:
            for part in find_parts(shard.output_path):
                path = part.path(shard.output_path)
                if _metadata_of(path).get(_RUN_KEY) == shard.run:
                    os.unlink(path)

    def _job(self, tensor: FileTensor) -> QuantizeJob:
        spec, outer_maximum = self._spec(tensor), None
        if tensor.name in self._tied:
            spec, outer_maximum = self._tied[tensor.name].tie(spec)
        return QuantizeJob(
            tensor.array(), spec,
            self._draft_name(tensor.name) if self._store else None,
            self._store, self._nan_policy, element_type=tensor.element_type,
            outer_maximum=outer_maximum,
            rounding=self._inputs.of(tensor.name) if self._inputs else None)

    def _find_draft(self) -> None:
        """Parts of one run share their draft. Any other run has its own; one
        that goes on where parts stopped goes on with theirs."""
        runs = "".join(shard.run for shard in self._shards)
        prefix = f"{self._revision or 'main'}.draft-"
        shared = prefix + _hash(runs.encode())
        folder, name = os.path.split(self._target.rstrip("/"))
        place = f"{os.path.realpath(folder or '.')}/{name}"
        own = prefix + _hash(os.fsencode(f"{runs}\n{place}"))
        is_shared = self._part is not None or self._joins
        self._draft = shared if is_shared else own
        if not self._tensors_in(self._draft) and not is_shared and any(
                shard.is_kept for shard in self._shards):
            self._draft = shared

    def _draft_name(self, tensor: str) -> TensorName:
        return TensorName(self._model, tensor, self._draft)

    def _publish(self) -> None:
        """Makes the encodings of all files those of the revision."""
        assert self._client is not None
        there = self._tensors_in(self._draft)
        if not there and all(shard.is_kept for shard in self._shards) and (
                not any(self._missing(self._tensors_in(self._revision)))):
            # The run that wrote them has published.
            return
        # An earlier run published these with the rest, or somebody deleted
        # them.
        for shard, missing in zip(self._shards, self._missing(there)):
            if not missing:
                continue
            file = _files.open_safetensors(shard.output_path)
            for tensor in missing:
                stored = _layout.read(
                    file.path, file.tensors, tensor,
                    file.metadata[_layout.KEY_PREFIX + tensor])
                assert stored.encoding is not None
                self._client.put_encoding(self._draft_name(tensor),
                                          stored.encoding)
        try:
            self._client.publish_revision(self._model, self._draft,
                                          self._revision, keep_others=True)
        except errors.QuantdError as error:
            # All tensors failed, its answer was lost, or another process has
            # published it.
            if error.reason != "REVISION_NOT_FOUND":
                raise

    def _tensors_in(self, revision: str) -> set[str]:
        """Names of the tensors that have encodings in the store."""
        assert self._client is not None
        return {stored.name.tensor for stored in
                self._client.list_encodings(self._model, revision)}

    def _missing(self, there: Collection[str]) -> list[list[str]]:
        """For each shard, the quantized tensors whose encodings are not
        there."""
        return [[tensor.name for tensor in shard.selected
                 if self._outcomes[tensor.name].is_quantized and
                 tensor.name not in there] for shard in self._shards]

    def _clear(self) -> None:
        """Before the first shard is in its place: takes away what would make a
        model of new and old shards."""
        if self._is_cleared:
            return
        self._is_cleared = True
        stale = [_files.INDEX_NAME] if self._weight_map else []
        names = {shard.name for shard in self._shards}
        if self._overwrite:
            if _compressed.METHOD == _method_in(self._target):
                stale.append("config.json")
            stale += [name for name in os.listdir(self._target)
                      if name.endswith(".safetensors") and name not in names and
                      _metadata_of(self._output(name)).get(_COMMAND_KEY)]
        for name in stale:
            try:
                os.unlink(self._output(name))
            except FileNotFoundError:
                pass
            except OSError as error:
                raise _files.unwritable(self._output(name), error) from error

    def _write_index(self) -> None:
        weight_map, total = {}, 0
        for shard in self._shards:
            written = _files.open_safetensors(shard.output_path)
            for name, tensor in written.tensors.items():
                weight_map[name] = shard.name
                total += tensor.size_bytes
        metadata = {"total_size": total}
        if self._index.total_parameters is not None:
            metadata["total_parameters"] = self._index.total_parameters
        if self._index.other_fields:
            warnings.warn(
                f"quantd: of {os.path.join(self._source, _files.INDEX_NAME)} "
                f"not kept: {', '.join(self._index.other_fields)}",
                RuntimeWarning, stacklevel=4)
        document = {"metadata": metadata,
                    "weight_map": dict(sorted(weight_map.items()))}
        _files.write_text(self._output(_files.INDEX_NAME),
                          _files.to_json(document, indent=2) + "\n")

    def _result(self) -> QuantizedModel:
        tensors: ResultList[ModelTensor] = ResultList()
        for target in self._targets:
            for tensor in target.covered:
                outcome = self._outcomes[tensor.name]
                warn_of_not_finite(tensor.name, outcome.format, outcome.nan,
                                   outcome.infinity, 4)
                warn_of_coarse_scales(tensor.name, outcome.coarse_scales, 4)
                if outcome.is_quantized:
                    warn_of_one_scale(
                        tensor.name, self._template(tensor.name).granularity,
                        tensor.shape, 4)
                result = ("kept" if target.is_kept else
                          "failed" if outcome.error is not None else
                          "quantized" if outcome.is_quantized else "copied")
                tensors.append(ModelTensor(
                    tensor.name, tensor.shape, tensor.dtype, result,
                    tensor.size_bytes, outcome.output_bytes,
                    outcome.format or None, outcome.clipped_low,
                    outcome.clipped_high, outcome.nan, outcome.infinity,
                    outcome.error, None if not outcome.is_quantized else
                    "compensated" if outcome.is_compensated else "nearest",
                    outcome.output_noise,
                    outcome.is_quantized and
                    self._spec(tensor).importance is not None))
        names = {_files.INDEX_NAME, *(shard.name for shard in self._shards)}
        left_out = sorted(
            name for name in os.listdir(self._source)
            if name not in names and not name.startswith(".")
        ) if self._is_folder else []
        return QuantizedModel(
            self._target, tensors,
            # A part whose shard was joined meanwhile has no file.
            sum(os.stat(target.path).st_size for target in self._targets
                if os.path.exists(target.path)),
            tuple(left_out))


def _with_note(error: errors.QuantdError, note: str) -> errors.QuantdError:
    told = errors.QuantdError(error.code, error.reason, error.message + note,
                              field=error.field,
                              retry_after=error.retry_after)
    told.name = error.name
    return told


def _check_data(file: InputFile) -> None:
    """Checks that a file still has the data that its checksum is of. Raises:
    FILE_MALFORMED."""
    expected = file.metadata.get(_CHECKSUM_KEY, "not kept")
    got = _files.data_checksum(file)
    if got != expected:
        raise _files.malformed(
            file.path, f"the XXH3 of its data is {got}, and was {expected} when "
            "it was written; run its part again")


def _is_intact(path: str) -> bool:
    """True if a file has the data that were written, all of which this reads;
    warns where it does not."""
    try:
        _check_data(_files.open_safetensors(path))
        return True
    except errors.QuantdError as error:
        if error.reason != "FILE_MALFORMED":
            raise
    warnings.warn(f"quantd: {path}: done again, as its data are not those that "
                  "were written", RuntimeWarning, stacklevel=5)
    return False


def _metadata_of(path: str) -> Mapping[str, str]:
    """Metadata of a safetensors file; none where it is none."""
    try:
        return _files.open_safetensors(path).metadata
    except errors.QuantdError:
        return {}


def _method_in(folder: str) -> str:
    try:
        return _compressed.method_of(folder)
    except errors.QuantdError:
        return ""


def _is_too_large(error: errors.QuantdError, job: QuantizeJob) -> bool:
    """True if the server cannot hold the tensor, which it need not where it is
    given the encoding."""
    # Anything else that it would hold is not in an encoding.
    return (error.reason == "MEMORY_BUDGET" and job.outer_maximum is None and
            job.rounding is None and isinstance(job.source, EncodingSpec) and
            job.source.importance is None)


class _Sender:
    """Quantizes the tensors of one shard on several streams."""

    def __init__(self, client: Client, streams: int, job: Any,
                 writer: SafetensorsWriter, outcomes: dict[str, _Outcome],
                 progress: Progress) -> None:
        self._client = client
        self._streams = streams
        self._job = job
        self._writer = writer
        self._outcomes = outcomes
        self._progress = progress
        self._lock = threading.Lock()
        self._fault: Optional[BaseException] = None

    def send(self, tensors: Sequence[FileTensor]) -> None:
        """Errors of a tensor go to its outcome.

        Raises: those that end all, such as of a server that is away.
        """
        jobs = iter(enumerate(tensors))
        threads = [threading.Thread(target=self._run, args=(jobs,),
                                    daemon=True)
                   for _ in range(min(self._streams, len(tensors)))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:
            # Ctrl-C: no more are sent, and who is interrupted waits for those
            # under way.
            self._fault = error
            for thread in threads:
                thread.join()
            raise
        if self._fault is not None:
            raise self._fault

    def _run(self, jobs: Iterator[tuple[int, FileTensor]]) -> None:
        try:
            self._send(jobs)
        except BaseException as error:  # pylint: disable=broad-except
            self._fault = self._fault or error

    def _send(self, jobs: Iterator[tuple[int, FileTensor]]) -> None:
        # Tensors on their way: their place, and where their codes go.
        pending: collections.deque[
            tuple[int, FileTensor, int, QuantizeJob]] = collections.deque()

        def items() -> Iterator[QuantizeJob]:
            while self._fault is None:
                with self._lock:
                    number, tensor = next(jobs, (0, None))
                if tensor is None:
                    return
                job = self._job(tensor)
                size = format_info(job.source.format).size_bytes(job.array.size)
                out, offset = self._writer.reserve(size)
                job = dataclasses.replace(job, out=out)
                pending.append((number, tensor, offset, job))
                yield job

        for result in self._client.quantize_many(items(), on_error="return",
                                                 min_rank=0):
            number, tensor, offset, job = pending.popleft()
            outcome = self._outcomes[tensor.name]
            if (isinstance(result, errors.QuantdError) and
                    _is_too_large(result, job)):
                result = self._in_two_passes(job, result)
            if isinstance(result, errors.QuantdError):
                if errors.ends_all(result):
                    raise result
                result.name = TensorName(tensor=tensor.name)
                outcome.error = result
            else:
                self._take(number, tensor.name, result, offset, outcome)
            with self._lock:
                self._progress.add(tensor.size_bytes)
            del result, job

    def _in_two_passes(self, job: QuantizeJob, why: errors.QuantdError
                       ) -> Union[QuantizedTensor, errors.QuantdError]:
        """Calibrates the tensor first, from histograms where the method needs
        them, and then quantizes it: the server need not hold it then."""
        spec = job.source
        assert isinstance(spec, EncodingSpec)
        try:
            calibrated = self._client.calibrate(
                job.array, spec=spec, element_type=job.element_type)
            return self._client.quantize(
                job.array, calibrated.encoding, name=job.name,
                store=bool(job.store),
                nan_policy=job.nan_policy, out=job.out,
                element_type=job.element_type)
        except errors.QuantdError as error:
            # Its scales do not fit a message.
            return why if error.reason == "SCALE_COUNT_LIMIT" else error

    def _take(self, number: int, name: str, result: QuantizedTensor,
              offset: int, outcome: _Outcome) -> None:
        summary, encoding = result.summary, result.encoding
        assert encoding is not None
        outcome.output_bytes = _layout.write(
            self._writer, (0, number), name, result,
            lambda key, dtype, shape: self._writer.add_reserved(
                key, name, dtype, shape, offset))
        outcome.is_quantized = True
        outcome.format = encoding.format
        outcome.clipped_low = summary.clipped_low_count
        outcome.clipped_high = summary.clipped_high_count
        outcome.nan = summary.nan_count
        outcome.coarse_scales = coarse_scale_count(encoding)
        outcome.output_noise = summary.output_noise
        outcome.mantissa_bits = result.mantissa_bits
        outcome.infinity = (summary.positive_infinity_count +
                            summary.negative_infinity_count)
