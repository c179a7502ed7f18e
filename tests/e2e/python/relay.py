"""A gRPC server between a client and quantd."""

from concurrent import futures

import grpc


class Relay(grpc.GenericRpcHandler):
    """A server that passes calls on to another one; a context manager.

    What `before` has under the name of an RPC is called, with the context, when
    such a call comes. What `change` has there makes another message of each
    message of an answer, both as bytes.
    """

    def __init__(self, address):
        self.before = {}
        self.change = {}
        self._channel = grpc.insecure_channel(address)
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        self._server.add_generic_rpc_handlers((self,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"

    def service(self, handler_call_details):
        method = handler_call_details.method
        name = method.rsplit("/", 1)[1]

        def call(requests, context):
            self.before.get(name, lambda _: None)(context)
            change = self.change.get(name, lambda message: message)
            onward = self._channel.stream_stream(method)(requests)
            try:
                yield from map(change, onward)
            except grpc.RpcError as error:
                context.set_trailing_metadata(error.trailing_metadata())
                context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(call)

    def __enter__(self):
        self._server.start()
        return self

    def __exit__(self, *unused):
        self._server.stop(grace=None).wait()
        self._channel.close()
