"""The Python client with tokens and certificates.

  credentials_test.py --quantd BINARY
"""

import argparse
import asyncio
import hashlib
import os
import sys
import tempfile
import unittest

import package  # pylint: disable=unused-import
# pylint: disable=wrong-import-order
import numpy as np

import certificates
import live_server
import quantd
import quantd.aio
from quantd import _credentials

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()

ARRAY = np.arange(8, dtype=np.float32)


class CredentialsTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.access_path = os.path.join(self.folder, "access")

    def write(self, name, text):
        return certificates.replace(os.path.join(self.folder, name),
                                    text.encode())

    def serve(self, *flags):
        server = live_server.LiveServer(options.quantd, self.folder, flags)
        self.addCleanup(server.stop)
        return server

    def use(self, client):
        """A call of each kind."""
        codes = client.quantize(ARRAY, "int8")
        self.assertEqual(client.dequantize(codes).shape, ARRAY.shape)
        self.assertEqual(list(client.list_models()), [])
        return client

    def test_sends_the_token_that_the_file_has_now(self):
        def line(token):
            digest = hashlib.sha256(token.encode()).hexdigest()
            return f"me sha256:{digest} read,quantize *\n"

        self.write("access", line("first") + line("second"))
        path = self.write("token", "first\n")
        server = self.serve("--access-file", self.access_path)
        with quantd.Client(server.address) as nobody:
            with self.assertRaises(quantd.QuantdError) as caught:
                list(nobody.list_models())
            self.assertEqual(caught.exception.reason, "TOKEN_MISSING")
            with self.assertRaises(quantd.QuantdError) as caught:
                nobody.quantize(ARRAY, "int8")
            self.assertEqual(caught.exception.reason, "TOKEN_MISSING")
        with quantd.Client(server.address, token_file=path) as client:
            self.use(client)
            with self.assertRaises(quantd.QuantdError) as caught:
                client.quantize(ARRAY, "int8", store=True,
                                name=quantd.TensorName("net", "t"))
            self.assertEqual(caught.exception.reason, "SCOPE_MISSING")

        async def use():
            async with quantd.aio.Client(server.address,
                                         token_file=path) as client:
                codes = await client.quantize(ARRAY, "int8")
                self.assertEqual((await client.dequantize(codes)).shape,
                                 ARRAY.shape)
                self.assertEqual([one async for one in client.list_models()],
                                 [])
                self.assertEqual(
                    [one async for one in client.quantize_chunks(
                        [ARRAY], codes.encoding, shape=ARRAY.shape)][0].size,
                    ARRAY.size)
                with self.assertRaises(quantd.QuantdError) as caught:
                    async for _ in client.compute_encodings("m", "int8"):
                        pass
                self.assertNotEqual(caught.exception.reason, "TOKEN_MISSING")

        asyncio.run(use())
        file = _credentials.TokenFile(path)
        self.assertEqual(file.metadata()[1], "Bearer first")
        self.write("token", "second\n")
        file._time -= 2  # pylint: disable=protected-access
        self.assertEqual(file.metadata()[1], "Bearer second")
        self.write("token", "two words\n")
        file._time -= 2  # pylint: disable=protected-access
        self.assertEqual(file.metadata()[1], "Bearer second")
        for bad in (self.write("token", "\n"), self.folder, path + "-none"):
            with self.assertRaises(quantd.QuantdError) as caught:
                quantd.Client(server.address, token_file=bad)
            self.assertEqual(caught.exception.field, "token_file")

    def test_no_token_leaves_the_machine_in_plaintext(self):
        path = self.write("token", "secret\n")
        for target in ("db:8430", "10.0.0.1:8430", "127.evil.example:1",
                       "ipv4:127.0.0.1:1,10.0.0.1:1", "dns:///db:1"):
            for kind in (quantd.Client, quantd.aio.Client):
                with self.assertRaises(quantd.QuantdError) as caught:
                    kind(target, token_file=path)
                self.assertIn("expected TLS", str(caught.exception))
        for target in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/x",
                       "ipv4:127.0.0.1:1,127.0.0.2:1"):
            quantd.Client(target, token_file=path).close()
        quantd.Client("db:8430", token_file=path,
                      credentials=quantd.tls_credentials()).close()

    def connections(self, address):
        """How many there are to it."""
        port = f":{int(address.rsplit(':', 1)[1]):04X}"
        rows = []
        # gRPC has sockets of IPv6 for both.
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with open(table, encoding="ascii") as file:
                rows += [line.split() for line in file][1:]
        # 01 is ESTABLISHED.
        return sum(row[2].endswith(port) and row[3] == "01" for row in rows)

    def test_tls_streams_have_connections_of_their_own(self):
        authority = certificates.Authority("authority")
        certificate, key = authority.issue("server", names=[
            "127.0.0.1"]).write(self.folder, "server")
        ca = self.write("ca", authority.certificate.decode())
        server = self.serve("--tls-certificate", certificate, "--tls-key", key)
        credentials = quantd.tls_credentials(ca)

        def open_stream(client):
            """Has a stream as long as it is not closed."""
            answers = client.quantize_many(
                [("a", ARRAY), ("b", ARRAY)], "int8", min_rank=0)
            next(answers)
            return answers

        with quantd.Client(server.address, credentials=credentials) as client:
            for _ in range(3):
                self.use(client)
            # The stream of each method serves one call after another.
            self.assertEqual(self.connections(server.address), 2)
            streams = [open_stream(client) for _ in range(6)]
            self.assertEqual(self.connections(server.address), 4)
            for stream in streams:
                stream.close()

    def test_speaks_tls(self):
        authority = certificates.Authority("authority")
        server_paths = authority.issue("server", names=["127.0.0.1"]).write(
            self.folder, "server")
        certificate, key = authority.issue("me").write(self.folder, "me")
        ca = self.write("ca", authority.certificate.decode())
        server = self.serve("--tls-certificate", server_paths[0], "--tls-key",
                            server_paths[1], "--tls-client-ca", ca)
        with quantd.Client(server.address, credentials=quantd.tls_credentials(
                ca, certificate, key)) as client:
            self.use(client)
        with self.assertRaises(quantd.QuantdError):
            quantd.tls_credentials(ca, certificate)
        with self.assertRaises(quantd.QuantdError):
            quantd.tls_credentials(ca + "-none")

        other_ca = self.write(
            "other", certificates.Authority("other").certificate.decode())
        plain = self.serve()

        async def fail(**keywords):
            async with quantd.aio.Client(**keywords) as client:
                await client.quantize(ARRAY, "int8")

        for address, paths, said, cause in (
                (server.address, (other_ca, certificate, key),
                 "no authority that this client", "untrusted"),
                (server.address, (ca, certificate, server_paths[1]),
                 "the key is not that of the certificate", "lasting"),
                (server.address, (key, certificate, key),
                 "something else than PEM", "lasting"),
                (plain.address, (ca, None, None), "does not speak TLS",
                 "lasting"),
                (server.address, (ca, None, None), "or a client's certificate",
                 "closed"),
                (server.address, None, "wants TLS", "closed")):
            # Longer than a test may take: no retry helps.
            keywords = {
                "target": address, "retry_for": 3600.,
                "credentials": paths and quantd.tls_credentials(*paths)}
            with self.subTest(said), quantd.Client(**keywords) as client:
                for call in (lambda client=client: list(client.list_models()),
                             lambda client=client: client.quantize(
                                 ARRAY, "int8"),
                             lambda keywords=keywords: asyncio.run(
                                 fail(**keywords))):
                    with self.assertRaises(quantd.QuantdError) as caught:
                        call()
                    self.assertEqual(caught.exception.reason,
                                     "SERVER_UNREACHABLE")
                    self.assertIn(said, str(caught.exception))
                    self.assertEqual(caught.exception.cause, cause)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments])
