#!/usr/bin/python3
"""What most people would write in Python: grpcio and torch on the same protocol.

  python_server.py    prints its port and runs until it is ended

Float32 tensors, encodings inline, one scale.
"""

import concurrent.futures
import os
import sys
import tempfile

import grpc
import torch

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, os.path.join(HERE, "../../e2e/python"))
# pylint: disable=wrong-import-position
import live_server

stub_folder = tempfile.TemporaryDirectory()
live_server.generate_stubs(stub_folder.name)
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import quantization_service_pb2_grpc as qs_grpc


def tensors(requests):
    """Each tensor's header and an iterator over its chunks."""

    def chunks(request):
        left = 1 if isinstance(request, qs.DequantizeRequest) else 4
        for dimension in request.header.tensor.shape:
            left *= dimension
        while True:
            yield request.offset, request.data
            left -= len(request.data)
            if left <= 0:
                return
            request = next(requests)

    for request in requests:
        yield request.header, chunks(request)


class Service(qs_grpc.QuantizationServiceServicer):
    """Chunk by chunk, as they come."""

    def Quantize(self, request_iterator, context):
        for header, chunks in tensors(request_iterator):
            encoding = header.encoding
            zero_point = encoding.zero_point[0] if encoding.zero_point else 0
            response = qs.QuantizeResponse()
            response.header.shape.extend(header.tensor.shape)
            for offset, data in chunks:
                reals = torch.frombuffer(bytearray(data), dtype=torch.float32)
                codes = torch.clamp(
                    torch.round(reals / encoding.scale[0]) + zero_point,
                    encoding.qmin, encoding.qmax).to(torch.int8)
                response.offset = offset // 4
                response.data = codes.numpy().tobytes()
                yield response
                response = qs.QuantizeResponse()
            response.summary.SetInParent()
            yield response

    def Dequantize(self, request_iterator, context):
        for header, chunks in tensors(request_iterator):
            encoding = header.encoding
            zero_point = encoding.zero_point[0] if encoding.zero_point else 0
            response = qs.DequantizeResponse()
            response.header.shape.extend(header.tensor.shape)
            for offset, data in chunks:
                codes = torch.frombuffer(bytearray(data), dtype=torch.int8)
                reals = (codes.to(torch.float32) -
                         zero_point) * encoding.scale[0]
                response.offset = offset * 4
                response.data = reals.numpy().tobytes()
                yield response
                response = qs.DequantizeResponse()
            response.summary.SetInParent()
            yield response

    def Calibrate(self, request_iterator, context):
        for _, chunks in tensors(request_iterator):
            low, high, count = float("inf"), float("-inf"), 0
            for _, data in chunks:
                reals = torch.frombuffer(bytearray(data), dtype=torch.float32)
                chunk_low, chunk_high = torch.aminmax(reals)
                low = min(low, chunk_low.item())
                high = max(high, chunk_high.item())
                count += reals.numel()
            response = qs.CalibrateResponse()
            response.summary.statistics.count = count
            response.summary.statistics.min = low
            response.summary.statistics.max = high
            yield response


def main():
    server = grpc.server(
        concurrent.futures.ThreadPoolExecutor(max_workers=4),
        options=[("grpc.max_receive_message_length", -1),
                 ("grpc.max_send_message_length", -1)])
    qs_grpc.add_QuantizationServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
