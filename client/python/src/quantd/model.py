"""A whole model from files to files, by quantctl quantize."""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any, Iterable, Mapping, Optional, Sequence, Union

from quantd import _engine, errors, imatrix
from quantd._engine_flags import input_flags, spec_flags, tie_flags
from quantd._input_squares import InputSquares
from quantd._model_importance import InputsLike
from quantd._model_rounding import ModelRounding
from quantd._progress import ProgressLike
from quantd._specs import SpecsLike
from quantd._tables import ResultList, Tabular
from quantd._ties import TiesLike
from quantd.client import Client
from quantd.files import Path
from quantd.results import OutputNoise
from quantd.tensor import TensorName


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


def quantize_model(
        source: Path, target: Path, specs: Optional[SpecsLike] = None, *,
        client: Client, model: str = "", revision: str = "main",
        store: bool = False, include: Iterable[str] = (),
        exclude: Iterable[str] = (), min_rank: int = 2,
        nan_policy: Optional[str] = None, keep_going: bool = False,
        overwrite: bool = False, restart: bool = False,
        requantize: bool = False, streams: int = 2, ties: TiesLike = True,
        part: Union[tuple[int, int], str, None] = None,
        progress: ProgressLike = False,
        rounding: Optional[ModelRounding] = None, inputs: InputsLike = None,
        importance: Optional[Mapping[str, InputSquares]] = None,
        layout: str = "", scheme: str = "", activations: str = "",
        kv_cache: str = "", ignore: Optional[Iterable[str]] = None
        ) -> QuantizedModel:
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
        tls_credentials(). Its channel_options do not.
    store: keep the encodings in the store, under `model` and `revision`, which
        are otherwise of use with importance and activations alone. The default
        of the model is the name of the source. Readers of the revision see
        those that were there before until all files are written, and then all
        new ones: meanwhile these are in a draft, see "Drafts" in
        client/README.md. Encodings of other tensors stay.
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
        ModelRounding that says which; default that of `rounding`, or `model`.
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

    What the target may lack is warned of: NaN and infinities, coarse scales,
    one scale in the place of groups, what a runtime does not take.
    nan_policy="reject" refuses tensors with NaN or infinities.

    Only the tensors under way are in memory: a model may be larger than that.

    Raises: the error of a tensor, and then nothing is written, in a folder not
        that tensor's shard; ARGUMENT_INVALID where nothing is quantized, once
        the target has all tensors as they were; FILE_EXISTS, FILE_UNREADABLE,
        FILE_UNWRITABLE, FILE_MALFORMED, FILE_UNSUPPORTED, ARGUMENT_INVALID;
        FILE_CHANGED for a source that is changed or cut short while it is read;
        ENGINE_MISSING without quantctl, ENGINE_ENDED where something ended it.
    """
    flags = [f"--streams={streams}"]
    if part is not None:
        flags.append("--part=" + (part if isinstance(part, str) else
                                  "/".join(map(str, part))))
    flags += [flag for flag, is_set in (
        ("--keep-going", keep_going), ("--restart", restart)) if is_set]
    return _quantize(
        source, target, specs, client, model, revision, store, include, exclude,
        min_rank, nan_policy, overwrite, requantize, ties, rounding, inputs,
        importance, layout, scheme, activations, kv_cache, ignore, flags,
        part is None, progress)


def join_model(
        source: Path, target: Path, specs: Optional[SpecsLike] = None, *,
        client: Optional[Client] = None, model: str = "",
        revision: str = "main", store: bool = False,
        include: Iterable[str] = (), exclude: Iterable[str] = (),
        min_rank: int = 2, nan_policy: Optional[str] = None,
        overwrite: bool = False, requantize: bool = False,
        ties: TiesLike = True,
        rounding: Optional[ModelRounding] = None, inputs: InputsLike = None,
        importance: Optional[Mapping[str, InputSquares]] = None,
        layout: str = "", scheme: str = "", activations: str = "",
        kv_cache: str = "", ignore: Optional[Iterable[str]] = None
        ) -> QuantizedModel:
    """Makes the target of the parts of quantize_model(), once all are done; the
    target is that of one run. The arguments are those of the parts.

    client: only with store, whose encodings it publishes, and where something
        stored is read: with rounding, activations, kv_cache, and a spec that
        has importance.

    Raises: FILE_INCOMPLETE, with the parts that are missing; those of
        quantize_model().
    """
    if client is None and (store or rounding is not None or
                           _name_importance(specs)):
        raise errors.argument_invalid(
            "expected a client with store, rounding and importance", "client")
    return _quantize(
        source, target, specs, client, model, revision, store, include, exclude,
        min_rank, nan_policy, overwrite, requantize, ties, rounding, inputs,
        importance, layout, scheme, activations, kv_cache, ignore, ["--join"],
        True, False)


def _name_importance(specs: Optional[SpecsLike]) -> bool:
    """True if a spec may take importance from stored statistics."""
    if specs is None:
        return False
    some = specs.values() if isinstance(specs, Mapping) else (
        specs if isinstance(specs, (list, tuple)) else [specs])
    return any("importance" in spec or spec.startswith("@")
               if isinstance(spec, str) else
               getattr(spec, "importance", None) is not None for spec in some)


def _quantize(
        source: Path, target: Path, specs: Optional[SpecsLike],
        client: Optional[Client], model: str, revision: str, store: bool,
        include: Iterable[str], exclude: Iterable[str], min_rank: int,
        nan_policy: Optional[str], overwrite: bool, requantize: bool,
        ties: TiesLike, rounding: Optional[ModelRounding], inputs: InputsLike,
        importance: Optional[Mapping[str, InputSquares]], layout: str,
        scheme: str, activations: str, kv_cache: str,
        ignore: Optional[Iterable[str]], more: Sequence[str], is_whole: bool,
        progress: ProgressLike) -> QuantizedModel:
    if (model or revision != "main") and not (
            store or activations or kv_cache or scheme or
            rounding is None and inputs is None and _name_importance(specs)):
        raise errors.argument_invalid(
            "expected store=True with a model or a revision, under which "
            "nothing is kept otherwise", "store")
    flags = [f"--output={_engine.path_of(target)}", f"--min-rank={min_rank}",
             "--store" if store else "--no-store", *more]
    flags += [flag for flag, is_set in (
        ("--force", overwrite), ("--requantize", requantize)) if is_set]
    flags += [f"--{name}={value}" for name, value in (
        ("model", model), ("revision", revision if model or store else ""),
        ("nan-policy", (nan_policy or "").replace("_", "-")),
        ("layout", layout), ("scheme", scheme), ("activations", activations),
        ("kv-cache", kv_cache)) if value]
    for name, patterns in (("include", include), ("exclude", exclude),
                           ("ignore", () if ignore is None else
                            list(ignore) or [""])):
        flags += [f"--{name}={pattern}" for pattern in patterns]
    flags += tie_flags(ties)
    with _engine.Texts() as texts:
        flags += spec_flags(specs, texts)
        flags += input_flags(rounding, inputs, texts)
        if importance is not None:
            flags.append(
                f"--importance={texts.add(imatrix.to_bytes(importance))}")
        document, told = _engine.run(
            None if client is None else client.access(),
            ["quantize", _engine.path_of(source), *flags], texts, progress)
    tensors: ResultList[ModelTensor] = ResultList(
        _tensor_of(tensor) for tensor in document["tensors"]
        if tensor["result"] != "not written" or "error" in tensor)
    failed = [tensor.error for tensor in tensors if tensor.error is not None]
    if failed and not document["written"]:
        raise _with_note(
            failed[0], f"; {len(failed)} of {len(document['tensors'])} tensors "
            f"failed, so {os.fspath(target)} is not "
            f"{'complete' if os.path.isdir(source) else 'written'}; "
            "keep_going leaves such tensors as they are")
    if is_whole and not failed and not any(
            tensor.format for tensor in tensors):
        raise errors.argument_invalid(
            f"nothing is quantized: {os.fspath(target)} has all tensors as "
            "they were", "specs")
    for text in told:
        warnings.warn(f"quantd: {text}", RuntimeWarning, stacklevel=3)
    return QuantizedModel(os.fspath(target), tensors, document["file_bytes"],
                          _left_out(os.fspath(source), os.fspath(target)))


def _tensor_of(document: dict[str, Any]) -> ModelTensor:
    error, noise = document.get("error"), document.get("output_noise")
    failed = None if error is None else _engine.error_of(error)
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
            noise["noise_to_signal"], noise["source"],
            noise["clipped_input_count"]),
        document.get("importance", False))


def _left_out(source: str, target: str) -> tuple[str, ...]:
    if not os.path.isdir(source):
        return ()
    return tuple(sorted(
        name for name in os.listdir(source) if not name.startswith(".") and
        not os.path.lexists(os.path.join(target, name))))


def _with_note(error: errors.QuantdError, note: str) -> errors.QuantdError:
    told = errors.QuantdError(error.code, error.reason, error.message + note,
                              field=error.field)
    told.name = error.name
    return told
