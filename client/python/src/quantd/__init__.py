"""Client of quantd, a quantization service.

    import quantd

    with quantd.Client("127.0.0.1:8430") as client:
        quantized = client.quantize(weight, "int8:per-channel")
        restored = client.dequantize(quantized)

The messages of the protocol are in quantd.v1, generated from proto/.
"""

try:
    from quantd.v1 import tensor_pb2 as _tensor_pb2
except ImportError as error:
    raise ImportError(
        "quantd: no stubs of its protocol; in a checkout run "
        f"client/python/generate first ({error})") from error

from quantd._chunks import DequantizedChunks, QuantizedChunks
from quantd._credentials import tls_credentials
from quantd._model_rounding import ModelRounding
from quantd._requests import (CalibrateJob, Contribution, FeatureStatistics,
                              QuantizeJob, Rounding, gram_steps)
from quantd._tables import ResultList
from quantd.client import Client
from quantd.encoding import (Encoding, EncodingReference, EncodingSpec,
                             Granularity, Importance, blocks, group,
                             per_channel, per_tensor)
from quantd.errors import QuantdError
from quantd.files import TensorFile, TensorInfo, load, save
from quantd.interchange import (ExportedEncodings, ImportedEncodings,
                                InterchangeLoss, TensorHint)
from quantd.model import (ModelTensor, QuantizedModel, join_model,
                          quantize_model)
from quantd.results import (CalibrateResult, CandidateMetrics,
                            ComputedEncoding, ContributionResult,
                            EncodingProvenance, ErrorHistogram, ErrorMetrics,
                            Evaluation, FeatureMoments, GramResult,
                            MixtureOption, Model, MomentsResult, OutputNoise,
                            Prediction, PublishedRevision, QuantizedTensor, QuantizeSummary, Revision,
                            StatisticsEntry, StatisticsSource, StoredEncoding,
                            StoredGram, StoredStatistics, SweepCandidate,
                            SweepMixture, SweepResult, SweepTensor, SweepTotal,
                            TensorStatistics)
from quantd.sweep import (MeasuredCandidate, MeasuredTensor, ModelMixture,
                          ModelSweep, sweep_model)
from quantd.tensor import (FormatInfo, Slice, TensorName, format_info,
                           unpack)

__version__ = "0.1.0"

__all__ = [
    "CalibrateJob", "CalibrateResult", "CandidateMetrics", "Client",
    "ComputedEncoding", "Contribution", "ContributionResult",
    "DequantizedChunks", "Encoding", "EncodingProvenance",
    "EncodingReference", "EncodingSpec",
    "ErrorHistogram", "ErrorMetrics", "Evaluation", "ExportedEncodings",
    "FeatureMoments", "FeatureStatistics", "FormatInfo", "GramResult",
    "Granularity", "Importance", "ImportedEncodings", "InterchangeLoss",
    "MeasuredCandidate", "MeasuredTensor", "MixtureOption", "Model",
    "ModelMixture", "ModelRounding", "ModelSweep", "ModelTensor",
    "MomentsResult", "OutputNoise", "Prediction", "PublishedRevision",
    "QuantdError",
    "QuantizeJob", "QuantizeSummary", "QuantizedChunks", "QuantizedModel",
    "QuantizedTensor", "ResultList", "Revision", "Rounding",
    "Slice", "StatisticsEntry", "StatisticsSource", "StoredEncoding",
    "StoredGram", "StoredStatistics", "SweepCandidate", "SweepMixture",
    "SweepResult", "SweepTensor", "SweepTotal", "TensorFile", "TensorHint", "TensorInfo",
    "TensorName", "TensorStatistics", "blocks", "format_info", "gram_steps",
    "group", "join_model", "load", "per_channel", "per_tensor",
    "quantize_model", "save", "sweep_model", "tls_credentials", "unpack",
]
