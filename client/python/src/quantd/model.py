"""A whole model from files to files, by quantctl quantize."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from typing import Any, Iterable, Mapping, Optional, Union

from quantd import _engine, errors
from quantd._engine_flags import (SpecsLike, importance_flags, input_flags,
                                  part_text, spec_flags, tie_flags)
from quantd._input_squares import InputSquares
from quantd._model_importance import InputsLike
from quantd._model_rounding import ModelRounding
from quantd._progress import ProgressLike
from quantd._tables import ResultList, Tabular
from quantd._ties import TiesLike
from quantd.client import Client
from quantd.files import Path
from quantd.results import OutputNoise
from quantd.tensor import TensorName

_MOST_NAMES = 10


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
    coarse_scale_count: float16 scales below 2^-20, where it has few numbers.
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
    coarse_scale_count: int = 0


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


def quantize_model(
        source: Path, target: Path, specs: Optional[SpecsLike] = None, *,
        client: Optional[Client] = None, model: str = "",
        revision: str = "main",
        store: Optional[bool] = None, include: Iterable[str] = (),
        exclude: Iterable[str] = (), min_rank: int = 2,
        nan_policy: Optional[str] = None, keep_going: bool = False,
        overwrite: bool = False, restart: bool = False,
        requantize: bool = False, streams: Optional[int] = None,
        ties: TiesLike = True,
        part: Union[tuple[int, int], str, None] = None,
        progress: ProgressLike = False,
        rounding: Optional[ModelRounding] = None, inputs: InputsLike = None,
        importance: Optional[Mapping[str, InputSquares]] = None,
        layout: str = "", scheme: str = "", activations: str = "",
        kv_cache: str = "", ignore: Optional[Iterable[str]] = None,
        gguf_metadata: Optional[Path] = None) -> QuantizedModel:
    """Quantizes the tensors of a file or of the folder of a model, and copies
    the others:

        quantd.quantize_model("llm", "llm-int4", {"*_proj.weight":
                              "int4:group:128"}, client=client)
        quantd.quantize_model("llm", "llm-fp8", scheme="FP8_DYNAMIC",
                              client=client)

    quantctl quantize does the work, in a process of its own: the quantctl in
    the package, in PATH, or at QUANTD_QUANTCTL. Its help has more on each
    argument that has the name of an option.

    source: a safetensors, .npy, .gguf or .onnx file, or a folder with
        model.safetensors.index.json or model.safetensors.
    target: a safetensors or .gguf file, or a folder for a folder and for
        compressed-tensors. Finished shards of an earlier run with the same
        arguments are kept.
    specs: a spec of all tensors, such as "int8:per-channel", or by pattern: a
        tensor has that of the first pattern that matches its name, and stays as
        it is where none does. A list of SPEC and PATTERN=SPEC, or
        "@mixture.txt" as quantctl sweep writes it, is also taken. None: what
        the scheme says, or "int8".
    client: its server, TLS, token and times count; credentials are those of
        tls_credentials(). Its channel_options do not. Blocks of GGUF, such as
        "q4_K", need none.
    store: keep the encodings in the store, under `model` and `revision`. None:
        where there is a model, whose default is the name of the source. Readers
        of the revision see those that were there before until all files are
        written, and then all new ones: meanwhile these are in a draft, see
        "Drafts" in client/README.md. Encodings of other tensors stay.
    include, exclude: patterns of names; min_rank: see Client.quantize_many.
    keep_going: write the target even if tensors fail, with these as they were.
    overwrite: replace a file, or the files of other runs in a folder.
    restart: do finished shards again as well.
    requantize: take blocks of GGUF and checkpoints of other programs too, and
        quantize what they decode to.
    streams: tensors on their way at once, each on a stream of its own. None: as
        many as the server has threads for a caller, 2 to 16.
    ties: tensors that share one outer scale, such as nvfp4 has. True: q/k/v,
        gate/up and w1/w3, which runtimes fuse, by their usual names. False:
        none. Patterns, such as "{layer}.self_attn.{q,k,v}_proj.weight", come
        before these.
    part: (i, n) does share i of n, from 0 on; any part may be done again, in
        any process that sees the files, and join_model() makes the target of
        them.
    progress: see Client.quantize_many.
    rounding: weights whose inputs have a Gram matrix are rounded for the output
        of their layer, the others to the nearest code: `rounding` of
        ModelTensor says which.
    inputs: the model whose stored statistics have the moments or the Gram
        matrices of layers' inputs, for specs with importance, or a
        ModelRounding that says which; without rounding, which says it too.
        Default `model`.
    importance: an importance matrix of llama.cpp as imatrix.load() gives it, by
        names of weights or llama.cpp's names for them: how much errors in each
        column count for specs with mse, sqnr or best-of. Tensors for which
        there is none are quantized without: `importance` of ModelTensor says
        which.
    layout: "compressed-tensors" or "pack-quantized" for the layout that vLLM
        reads, with config.json. scheme: what vLLM calls it, such as "W4A16" or
        "FP8_DYNAMIC", which sets specs, activations and layout.
    activations, kv_cache: how runtimes quantize the inputs of modules, and the
        cache of keys and values, in compressed-tensors.
    ignore: patterns of modules that a compressed-tensors model leaves as they
        are, in place of the default.
    gguf_metadata: GGUF file whose metadata a .gguf target gets; default those
        of the source.

    Warns of what the target may lack: of NaN and infinities, coarse scales, one
    scale in the place of groups, what a runtime does not take, and of what was
    asked for and copied. nan_policy="reject" refuses tensors with NaN or
    infinities. Errors have no field.

    Only the tensors under way are in memory: a model may be larger than that.

    Raises: the error of a tensor, and then nothing is written, in a folder not
        that tensor's shard; ARGUMENT_INVALID where nothing is quantized, once
        the target has all tensors as they were; FILE_EXISTS, FILE_UNREADABLE,
        FILE_UNWRITABLE, FILE_MALFORMED, FILE_UNSUPPORTED, ARGUMENT_INVALID;
        FILE_CHANGED for a source that is changed or cut short while it is read;
        ENGINE_MISSING without quantctl, ENGINE_ENDED where something ended it.
    """
    return _quantize(joins=False, **locals())


def join_model(
        source: Path, target: Path, specs: Optional[SpecsLike] = None, *,
        client: Optional[Client] = None, model: str = "",
        revision: str = "main", store: Optional[bool] = None,
        include: Iterable[str] = (), exclude: Iterable[str] = (),
        min_rank: int = 2, nan_policy: Optional[str] = None,
        overwrite: bool = False, requantize: bool = False,
        ties: TiesLike = True,
        rounding: Optional[ModelRounding] = None, inputs: InputsLike = None,
        importance: Optional[Mapping[str, InputSquares]] = None,
        layout: str = "", scheme: str = "", activations: str = "",
        kv_cache: str = "", ignore: Optional[Iterable[str]] = None,
        gguf_metadata: Optional[Path] = None) -> QuantizedModel:
    """Makes the target of the parts of quantize_model(), once all are done; the
    target is that of one run. The arguments are those of the parts.

    client: only with store, whose encodings it publishes, and where something
        stored is read: with rounding, static activations, kv_cache, and a spec
        that has importance.

    Raises: FILE_INCOMPLETE, with the parts that are missing; those of
        quantize_model().
    """
    return _quantize(joins=True, **locals())


def _quantize(
        *, joins: bool, source: Path, target: Path, specs: Optional[SpecsLike],
        client: Optional[Client], model: str, revision: str,
        store: Optional[bool], include: Iterable[str], exclude: Iterable[str],
        min_rank: int, nan_policy: Optional[str], overwrite: bool,
        requantize: bool, ties: TiesLike, rounding: Optional[ModelRounding],
        inputs: InputsLike, importance: Optional[Mapping[str, InputSquares]],
        layout: str, scheme: str, activations: str, kv_cache: str,
        ignore: Optional[Iterable[str]], gguf_metadata: Optional[Path],
        keep_going: bool = False, restart: bool = False,
        streams: Optional[int] = None,
        part: Union[tuple[int, int], str, None] = None,
        progress: ProgressLike = False) -> QuantizedModel:
    if client is None and (bool(model) if store is None else store):
        raise errors.argument_invalid(
            "expected a client to keep encodings in the store", "client")
    if revision not in ("", "main") and not model and not store:
        raise errors.argument_invalid(
            "expected a model or store=True with a revision", "revision")
    flags = [f"--output={_engine.path_of(target, 'target')}",
             f"--min-rank={min_rank}"]
    if streams is not None:
        flags.append(f"--streams={streams}")
    flags += [flag for flag, is_set in (
        ("--store", store), ("--no-store", store is False), ("--join", joins),
        ("--force", overwrite), ("--requantize", requantize),
        ("--keep-going", keep_going), ("--restart", restart)) if is_set]
    flags += [f"--{name}={value}" for name, value in (
        ("model", model), ("revision", revision), ("part", part_text(part)),
        ("nan-policy", (nan_policy or "").replace("_", "-")),
        ("layout", layout), ("scheme", scheme), ("activations", activations),
        ("kv-cache", kv_cache),
        ("metadata", gguf_metadata and os.fsdecode(gguf_metadata))) if value]
    for name, patterns in (("include", include), ("exclude", exclude),
                           ("ignore", () if ignore is None else
                            list(ignore) or [""])):
        flags += [f"--{name}={pattern}" for pattern in patterns]
    flags += [*spec_flags(specs), *tie_flags(ties)]
    with _engine.Texts() as texts:
        flags += input_flags(rounding, inputs, texts)
        flags += importance_flags(importance, texts)
        document, told = _engine.run(
            None if client is None else client.access(),
            ["quantize", _engine.path_of(source, "source"), *flags], texts,
            progress)
        tensors: ResultList[ModelTensor] = ResultList(
            _tensor_of(tensor, texts) for tensor in document["tensors"]
            if tensor["result"] != "not written" or "error" in tensor)
    failed = [tensor.error for tensor in tensors if tensor.error is not None]
    if failed and not document["written"]:
        raise _with_note(
            failed[0], f"; {len(failed)} of {len(document['tensors'])} tensors "
            f"failed, so {os.fsdecode(target)} is not "
            f"{'complete' if os.path.isdir(source) else 'written'}; "
            "keep_going leaves such tensors as they are")
    if part is None and not failed and not any(
            tensor.format for tensor in tensors):
        ignored = document["ignored"]
        raise errors.argument_invalid(
            f"nothing is quantized: {os.fsdecode(target)} has all tensors as "
            "they were" + (
                "; left as they are unless specs name them: " +
                ", ".join(ignored[:_MOST_NAMES]) if ignored else ""), "specs")
    for text in told:
        warnings.warn(f"quantd: {text}", RuntimeWarning, stacklevel=3)
    return QuantizedModel(
        os.fsdecode(target), tensors, document["file_bytes"],
        _left_out(os.fsdecode(source), os.fsdecode(target)))


def _tensor_of(document: dict[str, Any], texts: _engine.Texts) -> ModelTensor:
    error, noise = document.get("error"), document.get("output_noise")
    failed = None if error is None else texts.error_of(error)
    if failed is not None:
        failed.name = TensorName(tensor=document["name"])
    return ModelTensor(
        document["name"], tuple(document["shape"]), document["dtype"],
        "failed" if failed is not None else document["result"],
        document["bytes_before"], document["bytes_after"],
        document.get("format"), document.get("clipped_low_count", 0),
        document.get("clipped_high_count", 0), document.get("nan_count", 0),
        document.get("infinity_count", 0), failed, document.get("rounding"),
        None if noise is None else OutputNoise(
            math.inf if noise["noise_to_signal"] is None else
            noise["noise_to_signal"], noise["source"],
            noise["clipped_input_count"]),
        document.get("importance", False),
        document.get("coarse_scale_count", 0))


def _left_out(source: str, target: str) -> tuple[str, ...]:
    if not os.path.isdir(source):
        return ()
    return tuple(sorted(
        name for name in os.listdir(source)
        if not name.startswith(".") and not name.endswith((
            ".safetensors", ".safetensors.index.json")) and
        not os.path.lexists(os.path.join(target, name))))


def _with_note(error: errors.QuantdError, note: str) -> errors.QuantdError:
    told = errors.QuantdError(error.code, error.reason, error.message + note)
    told.name = error.name
    return told
