"""Who may do what: tokens, certificates, tenants, and files that change.

  access_test.py --quantd BINARY [--quantctl BINARY] [unittest arguments]

QUANTD_ROTATIONS says how often certificates change under load; 3 are what the
service promises to go through without losing a call.
"""

import argparse
import base64
import datetime
import hashlib
import itertools
import json
import os
import secrets
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import unittest

import grpc

import certificates
import live_server
from live_server import eventually

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl")
options, unittest_arguments = arguments.parse_known_args()

stub_folder = tempfile.TemporaryDirectory()
live_server.generate_stubs(stub_folder.name)
# pylint: disable=wrong-import-position
from quantd.v1 import encoding_pb2 as en
from quantd.v1 import encoding_service_pb2 as es
from quantd.v1 import encoding_service_pb2_grpc as es_grpc
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import quantization_service_pb2_grpc as qs_grpc
from quantd.v1 import tensor_pb2 as te

TIMEOUT_S = live_server.PATIENCE_S
ROTATIONS = int(os.environ.get("QUANTD_ROTATIONS", "1"))
OURS = "acme/net"
THEIRS = "rival/net"
TENSOR = "weight"
DATA = bytes(4 * 4)
UNAUTHENTICATED = "UNAUTHENTICATED"
DENIED = "PERMISSION_DENIED"
BAD_CONFIG = 2


def name_of(model):
    return te.TensorName(model=model, tensor=TENSOR)


def description(model):
    return te.TensorDescription(name=name_of(model), shape=[4],
                                element_type=te.ELEMENT_TYPE_FLOAT32)


def inline():
    return en.Encoding(format=en.NUMBER_FORMAT_INT8, scale=[0.5],
                       zero_point=[0])


def spec():
    return en.EncodingSpec(format=en.NUMBER_FORMAT_INT8)


def reference(model):
    return en.EncodingReference(name=name_of(model))


class Stubs:
    """Every RPC as a function of a model's name."""

    def __init__(self, channel, token=None, scheme="Bearer"):
        self._metadata = ((("authorization", f"{scheme} {token}"),)
                          if token is not None else ())
        self.streams = qs_grpc.QuantizationServiceStub(channel)
        self.encodings = es_grpc.EncodingServiceStub(channel)
        self.channel = channel

    def call(self, method, request):
        return method(request, timeout=TIMEOUT_S, metadata=self._metadata)

    def stream(self, method, *requests):
        return self.call(method, iter(requests))

    def quantize(self, **fields):
        model = fields.pop("model", "")
        return self.stream(self.streams.Quantize, qs.QuantizeRequest(
            header=qs.QuantizeHeader(tensor=description(model), **fields),
            data=DATA))

    def calibrate(self, model="", **fields):
        return self.stream(self.streams.Calibrate, qs.CalibrateRequest(
            header=qs.CalibrateHeader(tensor=description(model), **fields),
            data=DATA))

    def rpcs(self):
        """Name: (scope, whether it writes, function of a model)."""
        encodings = self.encodings
        return {
            "Calibrate": ("calibrate", True, lambda model: self.calibrate(
                model, spec=spec())),
            "Calibrate a contribution": (
                "calibrate", True, lambda model: self.calibrate(
                    model, contribution=qs.Contribution(source="s",
                                                        sequence=1))),
            "Quantize": ("quantize", False, lambda model: self.quantize(
                model=model, reference=reference(model))),
            "Dequantize": ("quantize", False, lambda model: self.stream(
                self.streams.Dequantize, qs.DequantizeRequest(
                    header=qs.DequantizeHeader(
                        tensor=description(model),
                        reference=reference(model)), data=bytes(4)))),
            "Evaluate": ("quantize", False, lambda model: self.stream(
                self.streams.Evaluate, qs.EvaluateRequest(
                    header=qs.EvaluateHeader(
                        tensor=description(model), candidates=[
                            qs.EvaluateCandidate(
                                reference=reference(model))]), data=DATA))),
            "ListEncodings": ("read", False, lambda model: self.call(
                encodings.ListEncodings,
                es.ListEncodingsRequest(model=model))),
            "GetEncoding": ("read", False, lambda model: self.call(
                encodings.GetEncoding,
                es.GetEncodingRequest(name=name_of(model)))),
            "PutEncoding": ("calibrate", True, lambda model: self.call(
                encodings.PutEncoding, es.PutEncodingRequest(
                    name=name_of(model), encoding=inline()))),
            "ReadEncoding": ("read", False, lambda model: self.call(
                encodings.ReadEncoding,
                es.ReadEncodingRequest(name=name_of(model)))),
            "WriteEncoding": ("calibrate", True, lambda model: self.stream(
                encodings.WriteEncoding, es.WriteEncodingRequest(
                    name=name_of(model),
                    encoding=en.Encoding(format=en.NUMBER_FORMAT_INT8,
                                         scales_in_chunks=True),
                    scales=en.ScaleChunk(scale=bytes([0, 0, 0, 63]))))),
            "PublishRevision": ("calibrate", True, lambda model: self.call(
                encodings.PublishRevision, es.PublishRevisionRequest(
                    model=model, source_revision="draft", keep_others=True))),
            "DeleteRevision": ("admin", False, lambda model: self.call(
                encodings.DeleteRevision, es.DeleteRevisionRequest(
                    model=model, revision="draft"))),
            "DeleteEncoding": ("admin", False, lambda model: self.call(
                encodings.DeleteEncoding,
                es.DeleteEncodingRequest(name=name_of(model)))),
            "ListRevisions": ("read", False, lambda model: self.call(
                encodings.ListRevisions,
                es.ListRevisionsRequest(model=model))),
            "ComputeEncodings": ("calibrate", False, lambda model: self.call(
                encodings.ComputeEncodings, es.ComputeEncodingsRequest(
                    model=model, default_spec=spec()))),
            "Sweep": ("read", False, lambda model: self.call(
                encodings.Sweep,
                es.SweepRequest(model=model, specs=[spec()]))),
            "ChooseMixture": ("read", False, lambda model: self.call(
                encodings.ChooseMixture, es.ChooseMixtureRequest(
                    tensors=[es.MixtureTensor(options=[es.MixtureOption()])],
                    targets=[es.MixtureTarget(min_sqnr_db=1)]))),
            "GetStatistics": ("read", False, lambda model: self.call(
                encodings.GetStatistics,
                es.GetStatisticsRequest(name=name_of(model)))),
            "ListStatistics": ("read", False, lambda model: self.call(
                encodings.ListStatistics,
                es.ListStatisticsRequest(model=model))),
            "DeleteStatistics": ("admin", False, lambda model: self.call(
                encodings.DeleteStatistics,
                es.DeleteStatisticsRequest(name=name_of(model)))),
            "ListModels": ("read", False, lambda model: self.call(
                encodings.ListModels, es.ListModelsRequest())),
            "GetServerInfo": ("read", False, lambda model: self.call(
                encodings.GetServerInfo, es.GetServerInfoRequest())),
            "ExportEncodings": ("read", False, lambda model: self.call(
                encodings.ExportEncodings,
                es.ExportEncodingsRequest(
                    model=model, format=es.INTERCHANGE_FORMAT_JSON))),
            "ImportEncodings": ("calibrate", True, lambda model: self.stream(
                encodings.ImportEncodings,
                es.ImportEncodingsRequest(
                    model=model, format=es.INTERCHANGE_FORMAT_JSON,
                    data=b"{}"))),
            # What comes before it has something to find.
            "DeleteModel": ("admin", False, lambda model: self.call(
                encodings.DeleteModel, es.DeleteModelRequest(model=model))),
        }


def outcome(call):
    """What a call answers, to the byte: (code, reason, all the rest)."""
    try:
        answer = call()
        responses = ([answer] if not hasattr(answer, "__iter__")
                     else list(answer))
    except grpc.RpcError as error:
        details = dict(error.trailing_metadata() or ())
        return (error.code().name, error.details().split(":")[0],
                (error.details(), details.get("grpc-status-details-bin")))
    for response in responses:
        fields = [field.name for field, _ in response.ListFields()]
        if "error" in fields:
            code = next(code.name for code in grpc.StatusCode
                        if code.value[0] == response.error.code)
            return (code, response.error.reason,
                    response.error.SerializeToString(deterministic=True))
    return ("OK", "", tuple(response.SerializeToString(deterministic=True)
                            for response in responses))


def token_line(name, token, scopes="read,quantize,calibrate,admin",
               models="*", expires=""):
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f"{name} sha256:{digest} {scopes} {models} {expires}\n"


def certificate_line(name, subject, scopes="read,quantize,calibrate,admin",
                     models="*"):
    return f"{name} certificate:{subject} {scopes} {models}\n"


class AccessCase(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.access_path = os.path.join(self.folder, "access")

    def write_access(self, *lines):
        certificates.replace(self.access_path, "".join(lines).encode())

    def serve(self, *flags):
        server = live_server.LiveServer(options.quantd, self.folder,
                                        ("--drain-delay=0", *flags))
        self.addCleanup(server.stop)
        return server

    def stubs(self, server, token=None, credentials=None, scheme="Bearer"):
        # A connection of its own, for a handshake of its own.
        arguments_ = (("grpc.use_local_subchannel_pool", 1),)
        channel = (grpc.insecure_channel(server.address, arguments_)
                   if credentials is None else
                   grpc.secure_channel(server.address, credentials,
                                       arguments_))
        self.addCleanup(channel.close)
        return Stubs(channel, token, scheme)


class LogTest(AccessCase):

    def test_what_is_deleted_and_denied_is_logged_with_who_asked(self):
        self.write_access(token_line("ops", "of-ops"),
                          token_line("job", "of-job", "read,quantize",
                                     "acme/"))
        server = self.serve("--access-file", self.access_path,
                            "--log-format=json")
        channel = grpc.insecure_channel(server.address)
        self.addCleanup(channel.close)
        stub = es_grpc.EncodingServiceStub(channel)

        def call(rpc, request, token):
            try:
                getattr(stub, rpc)(request, timeout=live_server.PATIENCE_S,
                                   metadata=[
                                       ("authorization", f"Bearer {token}"),
                                       ("x-request-id", f"id of {rpc}")])
            except grpc.RpcError as error:
                return error.code().name
            return "OK"

        name = te.TensorName(model="acme/m", revision="draft", tensor="w")
        put = es.PutEncodingRequest(name=name, encoding=en.Encoding(
            format=en.NUMBER_FORMAT_INT8, scale=[1]))
        publish = es.PublishRevisionRequest(
            model="acme/m", source_revision="draft", revision="v1")
        self.assertEqual(call("PutEncoding", put, "of-ops"), "OK")
        self.assertEqual(call("PublishRevision", publish, "of-ops"), "OK")
        remove = es.DeleteRevisionRequest(model="acme/m", revision="v1")
        self.assertEqual(call("DeleteRevision", remove, "of-job"), DENIED)
        self.assertEqual(call("DeleteRevision", remove, "unknown"),
                         "UNAUTHENTICATED")
        self.assertEqual(call("DeleteRevision", remove, "of-ops"), "OK")
        server.stop()
        lines = [json.loads(line) for line in server.log().splitlines()]
        told = [{key: line.get(key, "") for key in
                 ("level", "message", "rpc", "reason", "model", "revision",
                  "caller", "address", "request_id")}
                for line in lines if "rpc" in line]
        expected = [
            ("info", "a revision was published", "PublishRevision", "",
             "acme/m", "v1", "ops"),
            ("warning", "a call was denied", "DeleteRevision",
             "SCOPE_MISSING", "", "", "job"),
            ("warning", "a call was denied", "DeleteRevision",
             "TOKEN_INVALID", "", "", ""),
            ("info", "a revision was deleted", "DeleteRevision", "",
             "acme/m", "v1", "ops")]
        self.assertEqual([tuple(line.values()) for line in told], [
            (*fields, "ipv4:127.0.0.1", f"id of {fields[2]}")
            for fields in expected])


class RpcsTest(AccessCase):

    def test_every_rpc_is_called_by_the_tests_below(self):
        with grpc.insecure_channel("unused") as channel:
            called = {name.split()[0] for name in Stubs(channel).rpcs()}
        self.assertEqual(called, {
            method for file in (qs, es)
            for service in file.DESCRIPTOR.services_by_name.values()
            for method in service.methods_by_name})


class TokenTest(AccessCase):

    def setUp(self):
        super().setUp()
        self.tokens = {name: secrets.token_urlsafe(32) for name in (
            "root", "acme", "rival", "expired", "wrong", "read", "quantize",
            "calibrate", "admin")}
        self.lines = [
            "# Callers.\n",
            token_line("root", self.tokens["root"]),
            token_line("acme", self.tokens["acme"], models="acme/"),
            token_line("rival", self.tokens["rival"], models="rival/"),
            token_line("expired", self.tokens["expired"],
                       expires="2020-01-31T00:00:00Z")]
        for scope in ("read", "quantize", "calibrate", "admin"):
            self.lines.append(token_line(scope, self.tokens[scope], scope))
        self.write_access(*self.lines)
        self.server = self.serve("--access-file", self.access_path)

    def as_(self, name):
        return self.stubs(self.server, self.tokens[name])

    def test_publishing_over_others_is_deleting(self):
        channel = grpc.insecure_channel(self.server.address)
        self.addCleanup(channel.close)
        stub = es_grpc.EncodingServiceStub(channel)

        def publish(name, **keywords):
            metadata = [("authorization", f"Bearer {self.tokens[name]}")]
            stub.PutEncoding(es.PutEncodingRequest(
                name=te.TensorName(model="m", revision="draft", tensor="w"),
                encoding=en.Encoding(format=en.NUMBER_FORMAT_INT8, scale=[1])),
                             timeout=live_server.PATIENCE_S, metadata=[
                                 ("authorization",
                                  f"Bearer {self.tokens['calibrate']}")])
            return outcome(lambda: stub.PublishRevision(
                es.PublishRevisionRequest(
                    model="m", source_revision="draft", **keywords),
                timeout=live_server.PATIENCE_S, metadata=metadata))[:2]

        self.assertEqual(publish("calibrate"), ("OK", ""))
        self.assertEqual(publish("calibrate"), (DENIED, "SCOPE_MISSING"))
        self.assertEqual(publish("calibrate", keep_others=True), ("OK", ""))
        self.assertEqual(publish("root"), ("OK", ""))

    def denied(self, reason):
        return self.server.metric("quantd_access_denied_total", reason=reason)

    def test_without_a_good_token_every_call_is_turned_away(self):
        texts = {}
        for stubs, reason in (
                (self.stubs(self.server), "TOKEN_MISSING"),
                (self.stubs(self.server, self.tokens["root"], scheme="Basic"),
                 "TOKEN_MISSING"),
                (self.as_("wrong"), "TOKEN_INVALID"),
                (self.as_("expired"), "TOKEN_INVALID")):
            before = self.denied(reason)
            rpcs = stubs.rpcs()
            for rpc, (_, _, call) in rpcs.items():
                with self.subTest(rpc=rpc, reason=reason):
                    answer = outcome(lambda: call(OURS))
                    self.assertEqual(answer[:2], (UNAUTHENTICATED, reason))
                    texts.setdefault(reason, set()).add(answer[2])
            self.assertEqual(self.denied(reason), before + len(rpcs))
        # Nor does the text tell which of them it was.
        self.assertEqual([len(text) for text in texts.values()], [1, 1])

    def test_every_call_needs_its_scope(self):
        # Those that delete come last.
        for scope in ("calibrate", "quantize", "read", "admin"):
            for rpc, (needed, _, call) in self.as_(scope).rpcs().items():
                with self.subTest(rpc=rpc, scope=scope):
                    answer = outcome(lambda: call(OURS))
                    if scope == needed:
                        self.assertNotIn(answer[0], (UNAUTHENTICATED, DENIED))
                    else:
                        self.assertEqual(answer[:2], (DENIED, "SCOPE_MISSING"))
                        self.assertIn(f'"{needed}"', answer[2][0])
        # Storing on the way is writing.
        answer = outcome(lambda: self.as_("quantize").quantize(
            model=OURS, spec=spec(), store=True))
        self.assertEqual(answer[:2], (DENIED, "SCOPE_MISSING"))

    def test_what_is_not_yours_does_not_exist(self):
        def answers(name, wanted):
            rpcs = self.as_(name).rpcs()
            return {rpc: outcome(lambda call=call: call(THEIRS))
                    for rpc, (_, writes, call) in rpcs.items()
                    if writes == wanted}

        empty = answers("root", False)
        before = answers("acme", False)
        written = answers("acme", True)
        # Now there is something of everything, but no draft to publish.
        for rpc, answer in answers("rival", True).items():
            self.assertIn(answer[0], ("OK", "UNIMPLEMENTED",
                                      "INVALID_ARGUMENT")
                          if rpc != "PublishRevision" else ("NOT_FOUND",))
        self.assertEqual(outcome(lambda: self.as_("rival").rpcs()[
            "GetEncoding"][2](THEIRS))[0], "OK")
        self.assertEqual(outcome(lambda: self.as_("rival").rpcs()[
            "GetStatistics"][2](THEIRS))[0], "OK")
        for rpc, answer in answers("acme", False).items():
            with self.subTest(rpc=rpc):
                self.assertEqual(answer, empty[rpc])
                self.assertEqual(answer, before[rpc])
        self.assertEqual(empty["GetEncoding"][0], "NOT_FOUND")
        for rpc, answer in answers("acme", True).items():
            with self.subTest(rpc=rpc):
                self.assertEqual(answer, written[rpc])
                self.assertEqual(answer[:2], (DENIED, "MODEL_DENIED"))
        answer = outcome(lambda: self.as_("acme").quantize(
            model=THEIRS, spec=spec(), store=True))
        self.assertEqual(answer[:2], (DENIED, "MODEL_DENIED"))

    def test_lists_leave_out_what_is_not_yours(self):
        root, acme = self.as_("root"), self.as_("acme")
        models = ["aaa/net", "acme", "acme-2/net", "acme/a", "acme/b", "acme/c",
                  "acme0/net", "rival/net"]
        for model in models:
            root.call(root.encodings.PutEncoding, es.PutEncodingRequest(
                name=name_of(model), encoding=inline()))

        def listed(stubs, size, token=""):
            found = []
            while True:
                page = stubs.call(stubs.encodings.ListModels,
                                  es.ListModelsRequest(page_size=size,
                                                       page_token=token))
                found.append([model.model for model in page.models])
                token = page.next_page_token
                if not token:
                    return found

        self.assertEqual(listed(root, 100), [models])
        # No page is short or empty because of what is left out.
        self.assertEqual(listed(acme, 1), [["acme/a"], ["acme/b"], ["acme/c"]])
        self.assertEqual(listed(acme, 3), [["acme/a", "acme/b", "acme/c"]])
        self.assertEqual(listed(acme, 100), [["acme/a", "acme/b", "acme/c"]])
        # Nor does a token that was made up show more.
        for after, rest in (("aaa", ["acme/a", "acme/b", "acme/c"]),
                            ("acme/b", ["acme/c"]), ("acme/c", []),
                            ("rival", [])):
            token = base64.urlsafe_b64encode(after.encode()).decode()
            self.assertEqual(listed(acme, 100, token.rstrip("=")), [rest])

    def test_a_stream_follows_the_access_file_tensor_by_tensor(self):
        asked = threading.Event()

        def requests():
            header = qs.QuantizeHeader(tensor=description(OURS),
                                       encoding=inline())
            yield qs.QuantizeRequest(header=header, data=DATA)
            asked.wait(TIMEOUT_S)
            yield qs.QuantizeRequest(header=header, data=DATA)

        acme, root = self.as_("acme"), self.as_("root")
        responses = acme.call(acme.streams.Quantize, requests())
        first = next(responses)
        while not first.HasField("summary"):
            first = next(responses)
        self.write_access(*(line for line in self.lines
                            if not line.startswith("acme")))
        rpc = acme.rpcs()["ListModels"][2]
        self.assertTrue(eventually(
            lambda: outcome(lambda: rpc(""))[1] == "TOKEN_INVALID"))
        asked.set()
        with self.assertRaises(grpc.RpcError) as caught:
            list(responses)
        self.assertEqual(caught.exception.code(),
                         grpc.StatusCode.UNAUTHENTICATED)
        self.assertIn("TOKEN_INVALID", caught.exception.details())
        self.assertEqual(outcome(lambda: root.rpcs()["ListModels"][2](""))[0],
                         "OK")

    def test_a_bad_access_file_leaves_the_last_good_one(self):
        def reloads(result):
            return self.server.metric("quantd_reloads_total", file="access",
                                      result=result)

        root = self.as_("root").rpcs()["ListModels"][2]
        self.write_access(*self.lines, "nonsense\n")
        self.assertTrue(eventually(lambda: reloads("error") == 1))
        self.assertEqual(outcome(lambda: root(""))[0], "OK")
        os.remove(self.access_path)
        self.assertTrue(eventually(lambda: reloads("error") == 2))
        self.assertEqual(outcome(lambda: root(""))[0], "OK")
        self.write_access(*self.lines[:1])
        self.assertTrue(eventually(lambda: reloads("ok") == 1))
        self.assertEqual(outcome(lambda: root(""))[1], "TOKEN_INVALID")
        log = self.server.log()
        self.assertIn("line 10", log)
        for token in self.tokens.values():
            self.assertNotIn(token, log)
            self.assertNotIn(hashlib.sha256(token.encode()).hexdigest(), log)

    def test_health_is_for_all_and_reflection_for_those_who_are_known(self):
        channel = self.stubs(self.server).channel
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        self.assertEqual(health(b"", timeout=TIMEOUT_S), b"\x08\x01")
        reflect = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        list_services = b"\x3a\x01*"
        known = reflect(iter([list_services]), timeout=TIMEOUT_S, metadata=(
            ("authorization", "Bearer " + self.tokens["read"]),))
        self.assertIn(b"quantd.v1.QuantizationService", b"".join(known))
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            told = b""
            with self.assertRaises(grpc.RpcError) as caught:
                for part in reflect(iter([list_services]), timeout=TIMEOUT_S,
                                    metadata=metadata):
                    told += part
            self.assertEqual(caught.exception.code(),
                             grpc.StatusCode.UNAUTHENTICATED)
            self.assertEqual(told, b"")

    def test_quantctl_brings_the_token_of_a_file(self):
        if options.quantctl is None:
            self.skipTest("no --quantctl")
        path = os.path.join(self.folder, "token")

        def run(*flags, **variables):
            return subprocess.run(
                [options.quantctl, "--server", self.server.address, "models",
                 *flags], capture_output=True, text=True, check=False,
                env={**os.environ, **variables}, timeout=TIMEOUT_S)

        self.assertIn("TOKEN_MISSING", run().stderr)
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.tokens["root"] + "\n")
        self.assertEqual(run("--token-file", path).returncode, 0)
        self.assertEqual(run(QUANTD_TOKEN_FILE=path).returncode, 0)
        missing = run("--token-file", path + "-missing")
        self.assertEqual(missing.returncode, 2, missing.stderr)


class CertificateTest(AccessCase):

    def setUp(self):
        super().setUp()
        self.authority = certificates.Authority("authority")
        self.other_authority = certificates.Authority("other authority")
        self.rotate(self.authority.issue("server", names=["127.0.0.1"]))
        self.ca_path = certificates.replace(
            os.path.join(self.folder, "ca.crt"), self.authority.certificate)
        self.flags = ("--tls-certificate", self.server_paths[0], "--tls-key",
                      self.server_paths[1], "--tls-client-ca", self.ca_path)

    def rotate(self, pair):
        self.server_paths = pair.write(self.folder, "server")

    def credentials(self, pair=None, authority=None):
        return grpc.ssl_channel_credentials(
            (authority or self.authority).certificate,
            pair and pair.key, pair and pair.certificate)

    def client(self, server, pair=None, token=None):
        return self.stubs(server, token, self.credentials(pair))

    def handshake(self, server, pair=None,
                  version=ssl.TLSVersion.TLSv1_3):
        """Speaks TLS and HTTP/2 as far as it comes: what the server sends, and
        the serial number of its certificate. In TLS 1.3 the client is through
        before the server has looked at its certificate."""
        context = ssl.create_default_context(
            cadata=self.authority.certificate.decode())
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        if pair is not None:
            context.load_cert_chain(*pair.write(self.folder, "handshake"))
        host, port = server.address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), TIMEOUT_S) as plain:
            with context.wrap_socket(plain, server_hostname=host) as secure:
                serial = int(secure.getpeercert()["serialNumber"], 16)
                secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                               b"\0\0\0\4\0\0\0\0\0")
                return secure.recv(1), serial

    def assert_refused(self, server, pair):
        with self.assertRaises(OSError):
            self.handshake(server, pair, ssl.TLSVersion.TLSv1_2)
        try:
            self.assertEqual(self.handshake(server, pair)[0], b"")
        except OSError:
            pass

    def test_strangers_do_not_get_through_the_handshake(self):
        server = self.serve(*self.flags)
        known = self.authority.issue("known")
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            self.assertEqual(len(self.handshake(server, known, version)[0]), 1)
        self.assertEqual(
            outcome(lambda: self.client(server, known).rpcs()[
                "ListModels"][2](""))[0], "OK")
        for who, pair in (
                ("none", None),
                ("expired", self.authority.issue("known", days=-1)),
                ("wrong authority", self.other_authority.issue("known"))):
            with self.subTest(who=who):
                self.assert_refused(server, pair)
                answer = outcome(lambda: self.client(server, pair).rpcs()[
                    "ListModels"][2](""))
                self.assertEqual(answer[0], "UNAVAILABLE")
        started = server.metric("grpc_server_started_total")
        self.assertEqual(started, 1)

    def test_every_call_with_a_certificate_is_that_of_a_caller(self):
        writer = self.authority.issue("writer", names=["writer.acme"])
        stranger = self.authority.issue("stranger")
        token = secrets.token_urlsafe(32)
        lines = [certificate_line("writer", "writer.acme", "read,calibrate",
                                  "acme/"),
                 certificate_line("leaver", "leaver"),
                 token_line("reader", token, "read")]
        self.write_access(*lines)
        server = self.serve(*self.flags, "--tls-client-auth", "request",
                            "--access-file", self.access_path)
        put = "PutEncoding"
        as_writer = self.client(server, writer).rpcs()
        self.assertEqual(outcome(lambda: as_writer[put][2](OURS))[0], "OK")
        self.assertEqual(outcome(lambda: as_writer[put][2](THEIRS))[:2],
                         (DENIED, "MODEL_DENIED"))
        self.assertEqual(
            outcome(lambda: as_writer["DeleteEncoding"][2](OURS))[:2],
            (DENIED, "SCOPE_MISSING"))
        # A token decides where there are both.
        both = self.client(server, writer, token).rpcs()
        self.assertEqual(outcome(lambda: both[put][2](OURS))[1],
                         "SCOPE_MISSING")
        self.assertEqual(outcome(lambda: both["GetEncoding"][2](OURS))[0], "OK")
        leaver = self.client(server, self.authority.issue("leaver")).rpcs()
        self.assertEqual(outcome(lambda: leaver["ListModels"][2](""))[0], "OK")
        self.write_access(lines[0], lines[2])
        self.assertTrue(eventually(
            lambda: outcome(lambda: leaver["ListModels"][2](""))[0] != "OK"))
        for rpcs, reason in (
                (leaver, "TOKEN_INVALID"),
                (self.client(server, stranger).rpcs(), "TOKEN_INVALID"),
                (self.client(server).rpcs(), "TOKEN_MISSING")):
            for rpc, (_, _, call) in rpcs.items():
                with self.subTest(rpc=rpc, reason=reason):
                    self.assertEqual(outcome(lambda: call(OURS))[:2],
                                     (UNAUTHENTICATED, reason))
        # In this mode, too, a bad certificate is worse than none.
        for pair in (self.authority.issue("writer", days=-1),
                     self.other_authority.issue("writer")):
            self.assert_refused(server, pair)

    def test_tokens_do_over_tls_without_certificates_of_clients(self):
        token = secrets.token_urlsafe(32)
        self.write_access(token_line("caller", token))
        server = self.serve(*self.flags[:4], "--access-file", self.access_path)
        for brought, reason in ((None, "TOKEN_MISSING"), (token, "")):
            rpcs = self.client(server, token=brought).rpcs()
            self.assertEqual(outcome(lambda: rpcs["ListModels"][2](""))[1],
                             reason)

    def test_a_revoked_certificate_is_of_no_use_on_an_open_connection(self):
        crl_path = certificates.replace(
            os.path.join(self.folder, "crl"), self.authority.revoke([]))
        server = self.serve(*self.flags, "--tls-client-crl", crl_path)
        thief, owner = (self.authority.issue(name) for name in ("a", "b"))
        as_thief = self.client(server, thief).rpcs()
        as_owner = self.client(server, owner).rpcs()
        for rpcs in (as_thief, as_owner):
            self.assertEqual(outcome(lambda: rpcs["ListModels"][2](""))[0],
                             "OK")
        certificates.replace(crl_path, self.authority.revoke([thief]))
        self.assertTrue(eventually(
            lambda: outcome(lambda: as_thief["ListModels"][2](""))[0] != "OK"))
        for rpc, (_, _, call) in as_thief.items():
            with self.subTest(rpc=rpc):
                self.assertEqual(outcome(lambda: call(OURS))[:2],
                                 (UNAUTHENTICATED, "TOKEN_INVALID"))
        self.assertEqual(outcome(lambda: as_owner["ListModels"][2](""))[0],
                         "OK")

    def test_what_a_revoked_authority_has_issued_is_of_no_use(self):
        crl_path = certificates.replace(
            os.path.join(self.folder, "crl"), self.authority.revoke([]))
        server = self.serve(*self.flags, "--tls-client-crl", crl_path)
        between = certificates.Authority("between", parent=self.authority)
        pair = between.issue("a")
        pair.certificate += between.certificate
        list_models = self.client(server, pair).rpcs()["ListModels"][2]
        self.assertEqual(outcome(lambda: list_models(""))[0], "OK")
        certificates.replace(crl_path, self.authority.revoke([between]))
        self.assertTrue(eventually(
            lambda: outcome(lambda: list_models(""))[:2] ==
            (UNAUTHENTICATED, "TOKEN_INVALID")))

    def test_a_revoked_authority_that_is_not_sent_is_of_no_use(self):
        between = certificates.Authority("between", parent=self.authority)
        bundle = self.authority.certificate + between.certificate
        certificates.replace(self.ca_path, bundle)
        crl_path = certificates.replace(
            os.path.join(self.folder, "crl"), self.authority.revoke([]))
        server = self.serve(*self.flags, "--tls-client-crl", crl_path)
        # Alone: the server has the authority in between itself.
        bare = between.issue("a")

        def answer():
            return outcome(lambda: self.client(server, bare).rpcs()[
                "ListModels"][2](""))[0]

        self.assertEqual(answer(), "OK")
        # On a connection that is open, too.
        list_models = self.client(server, bare).rpcs()["ListModels"][2]
        self.assertEqual(outcome(lambda: list_models(""))[0], "OK")
        certificates.replace(crl_path, self.authority.revoke([between]))
        self.assertTrue(eventually(lambda: answer() != "OK"))
        self.assertEqual(outcome(lambda: list_models(""))[:2],
                         (UNAUTHENTICATED, "TOKEN_INVALID"))
        self.assertEqual(outcome(lambda: self.client(
            server, self.authority.issue("b")).rpcs()["ListModels"][2](
                ""))[0], "OK")

    def test_certificates_change_under_load_and_no_call_is_lost(self):
        server = self.serve(*self.flags)
        pair = self.authority.issue("client")
        stop = threading.Event()
        failures, counts = [], [0, 0]

        def reloads(result):
            return server.metric("quantd_reloads_total", file="certificate",
                                 result=result)

        def stay():
            call = self.client(server, pair).rpcs()["ListModels"][2]
            while not stop.is_set():
                answer = outcome(lambda: call(""))
                counts[0] += 1
                if answer[0] != "OK":
                    failures.append(answer)

        def come_and_go():
            while not stop.is_set():
                stubs = self.client(server, pair)
                answer = outcome(lambda: stubs.rpcs()["ListModels"][2](""))
                stubs.channel.close()
                counts[1] += 1
                if answer[0] != "OK":
                    failures.append(answer)

        threads = [threading.Thread(target=stay),
                   threading.Thread(target=come_and_go)]
        for thread in threads:
            thread.start()
        try:
            for rotation in range(ROTATIONS):
                fresh = self.authority.issue("server", names=["127.0.0.1"])
                before = list(counts)
                # The key comes first, and is not taken alone.
                certificates.replace(self.server_paths[1], fresh.key)
                self.assertTrue(eventually(
                    lambda: reloads("error") == rotation + 1))
                self.rotate(fresh)
                self.assertTrue(eventually(
                    lambda: reloads("ok") == rotation + 1))
                self.assertEqual(self.handshake(server, pair)[1], fresh.serial)
                self.assertTrue(eventually(lambda: all(
                    now > then for now, then in zip(counts, before))))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        self.assertEqual(failures, [])
        print(f"{counts[0]} calls on one connection, {counts[1]} on one each",
              file=sys.stderr)
        expiry = server.metric(
            "quantd_tls_certificate_expiry_timestamp_seconds")
        self.assertEqual(expiry, fresh.not_valid_after.replace(
            tzinfo=datetime.timezone.utc).timestamp())

    def test_files_that_do_not_go_together_are_told_at_start(self):
        certificate, key = self.server_paths
        other = self.authority.issue("other").write(self.folder, "other")
        old = self.authority.issue("old", days=-1).write(self.folder, "old")
        no_pem = certificates.replace(os.path.join(self.folder, "no.pem"),
                                      b"nothing\n")
        half = {}
        for kind, whole in (("ca", self.authority.certificate),
                            ("crl", self.authority.revoke([]))):
            # One that is whole, and one whose middle is missing.
            head, *body, tail = whole.splitlines(keepends=True)
            half[kind] = certificates.replace(
                os.path.join(self.folder, "half." + kind),
                b"".join([whole, head, *body[:2], tail]))
        for flags, text in (
                ((certificate, other[1]), "--tls-key: expected the key of"),
                ((certificate, no_pem), "--tls-key: expected a private key"),
                ((no_pem, key), "--tls-certificate: expected a certificate"),
                ((self.folder, key), "expected a file that can be read"),
                (old, "expected a certificate that is valid now"),
                ((certificate, key, "--tls-client-ca", no_pem),
                 "--tls-client-ca: expected certificates of authorities"),
                ((certificate, key, "--tls-client-ca", self.ca_path,
                  "--tls-client-crl", no_pem),
                 "expected certificate revocation lists"),
                ((certificate, key, "--tls-client-ca", half["ca"]),
                 "--tls-client-ca: expected certificates of authorities"),
                ((certificate, key, "--tls-client-ca", self.ca_path,
                  "--tls-client-crl", half["crl"]),
                 "expected certificate revocation lists"),
                ((certificate, key, "--access-file", no_pem),
                 "--access-file: line 1")):
            with self.subTest(text=text):
                done = subprocess.run(
                    [options.quantd, "--listen", "127.0.0.1:0",
                     "--metrics-listen", "off", "--store",
                     "sqlite:" + os.path.join(self.folder, "start.db"),
                     "--tls-certificate", flags[0], "--tls-key", *flags[1:]],
                    capture_output=True, text=True, check=False,
                    timeout=TIMEOUT_S)
                self.assertEqual(done.returncode, BAD_CONFIG, done.stderr)
                self.assertIn(text, done.stderr.replace('\\"', '"'))

    def test_a_certificate_that_ends_soon_is_told(self):
        self.rotate(self.authority.issue("server", days=3,
                                         names=["127.0.0.1"]))
        server = self.serve(*self.flags)
        self.assertIn("expires soon", server.log())

    def test_quantctl_speaks_tls(self):
        if options.quantctl is None:
            self.skipTest("no --quantctl")
        server = self.serve(*self.flags)
        certificate, key = self.authority.issue("client").write(
            self.folder, "client")

        def run(*flags):
            return subprocess.run(
                [options.quantctl, "--server", server.address, *flags,
                 "--retry-for", "0", "models"], capture_output=True, text=True,
                check=False, timeout=TIMEOUT_S)

        done = run("--tls-ca", self.ca_path, "--tls-certificate", certificate,
                   "--tls-key", key)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotEqual(run("--tls-ca", self.ca_path).returncode, 0)
        self.assertEqual(run("--tls-ca", self.ca_path, "--tls-key",
                             key).returncode, 2)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments])
