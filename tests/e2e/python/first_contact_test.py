"""What a newcomer sees of quantctl: servers that are not there or want something
else, lines of a terminal of 80 columns, help, and mistyped words.

  first_contact_test.py --quantd BINARY --quantctl BINARY
"""

import argparse
import fcntl
import json
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import termios
import threading
import unittest

import live_server
from quantctl_case import QuantctlCase, write_safetensors

try:
    import certificates
except ImportError:
    # There is no python3-cryptography.
    certificates = None

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl", required=True)
options, unittest_arguments = arguments.parse_known_args()

DATA = os.path.join(live_server.ROOT, "tests/data/digits-cnn")
WEIGHTS = os.path.join(DATA, "model.safetensors")
COLUMNS = 80
# More than the six that there were before.
RETRIES = 7


def listener(answer):
    """A server on loopback that calls answer(connection) for each; its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        kept = []
        while True:
            try:
                connection, _ = server.accept()
                kept.append(connection)
                answer(connection)
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    return server, server.getsockname()[1]


class FirstContactTest(QuantctlCase):
    quantd = options.quantd
    quantctl = options.quantctl

    def on_terminal(self, *command, environment=None):
        """The exit code, and all that is written to a terminal."""
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(self.quantctl, [self.quantctl, *command],
                      dict(environment or self.environment, TERM="xterm",
                           COLUMNS=""))
        fcntl.ioctl(terminal, termios.TIOCSWINSZ,
                    struct.pack("HHHH", 24, COLUMNS, 0, 0))
        text = all_of(terminal)
        os.close(terminal)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text.decode()

    def fails(self, server, *flags, code=3, retried=False):
        """What is written to stderr for a server, which is asked once unless it
        is `retried`."""
        result = self.run_quantctl("--server", server, *flags, "models",
                                   code=code)
        # Not a line of gRPC's own, whatever there is about connections.
        for line in result.stderr.splitlines():
            self.assertRegex(line, "^quantctl: ")
        self.assertEqual("trying again" in result.stderr, retried,
                         result.stderr)
        return result.stderr

    def test_ServersAreFoundAsPeopleWriteThem(self):
        host, port = self.server.address.rsplit(":", 1)
        self.run_quantctl("--server", f"localhost:{port}", "models")
        self.run_quantctl("--server", f"ipv4:{host}:{port}", "models")
        for url in ("http://localhost:8430", "https://localhost"):
            self.assertIn(f'leave out "{url[:url.index("//") + 2]}": localhost',
                          self.fails(url, code=2))
        # The port of quantd, not 443.
        self.assertIn("localhost:8430",
                      self.run_quantctl(
                          "--server", "localhost", "--retry-for", "0",
                          "models", "--json",
                          code=3).stdout if not port_is_open(8430)
                      else "localhost:8430")

    def test_CausesAreToldApart(self):
        self.assertIn("nothing listens at 127.0.0.1:1 (Connection refused)\n"
                      "quantctl: start quantd there",
                      self.fails("127.0.0.1:1", "--retry-for", "0"))
        self.assertIn("(No such file or directory)",
                      self.fails(self.path("none"), "--retry-for", "0"))
        self.assertIn("no address is known of nowhere.invalid:8430",
                      self.fails("nowhere.invalid", "--retry-for", "0"))
        # None of these is tried again, whatever --retry-for is.
        plain = self.server.address
        text = self.fails(plain, "--tls-ca", self.some_authority())
        self.assertIn(f"what listens at {plain} does not speak TLS\n"
                      "quantctl: leave out --tls", text)
        server, port = listener(lambda connection: connection.sendall(
            b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"))
        with server:
            self.assertIn(f"what listens at 127.0.0.1:{port} is no gRPC server"
                          "\nquantctl: say where quantd is",
                          self.fails(f"127.0.0.1:{port}"))
        server, port = listener(lambda connection: connection.close())
        with server:
            self.assertIn("closes connections at once",
                          self.fails(f"127.0.0.1:{port}", "--retry-for", "0"))
        server, port = listener(lambda connection: None)
        with server:
            self.assertIn("takes connections and says nothing",
                          self.fails(f"127.0.0.1:{port}", "--retry-for", "0"))

    def some_authority(self):
        if certificates is None:
            self.skipTest("there is no python3-cryptography")
        return certificates.replace(
            self.path("ca.crt"), certificates.Authority("some").certificate)

    def test_CausesBehindTlsAreToldApart(self):
        if certificates is None:
            self.skipTest("there is no python3-cryptography")
        authority = certificates.Authority("authority")
        ca = certificates.replace(self.path("ca.crt"), authority.certificate)
        certificate, key = authority.issue(
            "server", names=["127.0.0.1"]).write(self.folder, "server")
        tls = ("--tls-certificate", certificate, "--tls-key", key)
        with live_server.LiveServer(options.quantd, flags=tls) as server:
            address = server.address
            self.run_quantctl("--server", address, "--tls-ca", ca, "models")
            self.assertIn(f"{address} wants TLS, and this client does not use "
                          "it\nquantctl: say --tls", self.fails(address))
            self.assertIn("is of no authority that this client knows",
                          self.fails(address, "--tls"))
        with live_server.LiveServer(
                options.quantd, flags=(*tls, "--tls-client-ca", ca)) as server:
            self.assertIn("wants TLS", self.fails(server.address))
            # What is no pair, and what is something else than its option says.
            mine, my_key = authority.issue("me").write(self.folder, "me")
            for files in ((ca, mine, key), (my_key, mine, my_key),
                          (ca, my_key, mine)):
                text = self.fails(server.address, *(
                    word for pair in zip(("--tls-ca", "--tls-certificate",
                                          "--tls-key"), files)
                    for word in pair))
                self.assertIn("cannot begin: the key is not that of the "
                              "certificate", text)
                self.assertIn("quantctl: check that --tls-key", text)
            # It may be a proxy without a server behind it, so this is tried
            # again, for less long than another failure.
            text = self.fails(server.address, "--tls-ca", ca, "--retries", "1",
                              retried=True)
            self.assertIn("wants a client's certificate, or another one", text)
            self.assertIn("trying again for 5 s", text)
            self.assertIn(
                "show a certificate with --tls-certificate",
                self.fails(server.address, "--tls-ca", ca, "--retry-for", "0"))

    def test_WaitingForAServerIsOneLine(self):
        nobody = self.path("nobody")
        code, text = self.on_terminal("--server", nobody, "--retries", "4",
                                      "models")
        self.assertEqual(code, 3)
        lines = re.split("\r\x1b\\[K", text)
        waits = [line for line in lines if "trying again for" in line]
        self.assertEqual(len(waits), 4)
        for line in waits:
            self.assertLess(len(line), COLUMNS)
            self.assertNotIn("\n", line)
        # It is gone in the end, and what is left says it once.
        self.assertEqual(lines[-1].count("nothing listens"), 1)
        self.assertNotIn("trying again", lines[-1])
        # Without a terminal it is said once as well; with --quiet not at all.
        flags = ("--server", nobody, "--retry-for", "99", "--retries", "2",
                 "models")
        told = self.run_quantctl(*flags, code=3).stderr
        self.assertEqual(told.count("trying again"), 1)
        self.assertIn("trying again for 99 s", told)
        self.assertNotIn("trying again",
                         self.run_quantctl(*flags, "-q", code=3).stderr)

    def test_AServerThatComesBackIsWaitedFor(self):
        target = "unix:" + self.path("socket")
        # On a terminal every retry is told of.
        terminal, stderr = pty.openpty()
        self.addCleanup(os.close, terminal)
        with subprocess.Popen(
                [self.quantctl, "--server", target, "quantize", WEIGHTS, "-o",
                 self.path("out"), "--no-store", "--spec", "int8", "--json",
                 "--streams", "1"], encoding="utf-8",
                env=dict(os.environ, TERM="xterm"), stdout=subprocess.PIPE,
                stderr=stderr) as process:
            os.close(stderr)
            said = []
            reader = threading.Thread(target=all_of, args=(terminal, said))
            reader.start()
            self.assertTrue(live_server.eventually(
                lambda: process.poll() is not None or
                b"".join(said).count(b"trying again") >= RETRIES))
            with live_server.LiveServer(options.quantd,
                                        flags=("--listen", target)):
                output, _ = process.communicate()
            reader.join()
        self.assertEqual(process.returncode, 0, b"".join(said))
        self.assertGreaterEqual(json.loads(output)["retries"], RETRIES)

    def help_of(self, *words):
        text = self.run_quantctl(*words).stdout
        for line in text.splitlines():
            self.assertLessEqual(len(line), COLUMNS, (words, line))
        return text

    def test_TheHelpFitsTheTerminalAndShowsWhatThereIs(self):
        text = self.help_of("--help")
        self.assertEqual(self.help_of("help"), text)
        self.assertIn("--retry-for SECONDS", text)
        commands = re.findall(r"^  (\w+)  ", text.partition("Commands:\n")[2]
                              .partition("\n\n")[0], re.M)
        self.assertGreater(len(commands), 12)
        for command in commands:
            with self.subTest(command):
                text = self.help_of(command, "--help")
                self.assertEqual(self.help_of("help", command), text)
                self.assertIn("Options of every command:\n", text)
                self.assertNotIn("Exit codes", text)
                # Types are words of ours.
                self.assertNotRegex(text, r"TEXT|INT:|UINT|FLOAT|REQUIRED|:\{")
                subs = re.findall(r"^  (\w+)  ", text.partition("Commands:\n")
                                  [2].partition("\n\n")[0], re.M)
                for sub in subs:
                    text = self.help_of("help", command, sub)
                    self.assertEqual(self.help_of(command, sub, "--help"), text)
                    self.assertIn(f"  quantctl {command} {sub}", text)
                if not subs:
                    self.assertIn(f"  quantctl {command}", text)
        for topic in ("specs", "servers", "json", "exit-codes", "environment"):
            self.help_of("help", topic)
        self.assertIn("What granularity costs",
                      self.help_of("help", "specs"))
        for command in ("quantize", "calibrate", "sweep"):
            self.assertIn("group:", self.help_of("help", command))
        self.assertIn('no help about "qantize"; did you mean quantize?',
                      self.run_quantctl("help", "qantize", code=2).stderr)

    def test_WhatIsStoredIsShownAsPeopleLookAtIt(self):
        write_safetensors(self.path("in"), {
            f"layers.{n}.w": ("F32", [2, 4],
                              struct.pack("<8f", -3, -1, 0, 0, 0, 0, 1, 3))
            for n in (10, 9, 1)})
        names = ("--model", "look")
        self.run_quantctl("calibrate", self.path("in"), *names, "--source", "a",
                          "--sequence", "1", "--spec", "int8")
        wanted = ["layers.1.w", "layers.9.w", "layers.10.w"]
        for command in (("statistics", "list"), ("encodings", "list"),
                        ("encodings", "compute", "--spec", "int4")):
            text = self.run_quantctl(*command, *names).stdout
            self.assertEqual(re.findall(r"^layers\S+", text, re.M), wanted)
        text = self.run_quantctl("encodings", "list", *names).stdout
        self.assertRegex(text, r"UPDATED UTC +ETAG\n.* 20\d\d-\d\d-\d\d ")
        for spec, granularity in (("int8", "per-tensor"),
                                  ("int8:per-channel", "per-channel"),
                                  ("int8:per-channel:1", "per-channel:1"),
                                  ("int4:group:2", "group:2"),
                                  ("int4:block=2,2", "block=2,2"),
                                  ("mxint8", "group:32")):
            self.run_quantctl("quantize", self.path("in"), "-o",
                              self.path(f"{spec}.safetensors"), "--model",
                              "granularities", "--spec", spec)
            text = self.run_quantctl("encodings", "list", "--model",
                                     "granularities").stdout
            self.assertRegex(text, rf"layers.1.w +\w+ +{granularity} ")
        text = self.run_quantctl("statistics", "get", *names,
                                 "layers.9.w").stdout
        self.assertIn("mean 0, standard deviation 1.581\n", text)
        self.assertRegex(text, r"PART +0.1% +1% +25% +50% +75% +99% +99.9%\n"
                               r"below +-3")
        self.assertRegex(text, r"\n +-3 +1 +#+\n")
        for line in text.splitlines():
            self.assertLessEqual(len(line), COLUMNS)
        document = self.json("statistics", "get", *names, "layers.9.w")
        self.assertEqual(document["json_version"], 1)
        self.assertEqual(document["summary"]["mean"], 0)
        self.assertEqual(sum(document["summary"]["histogram"]["counts"]), 8)

    def test_DocumentsHaveAVersion(self):
        for command in (("models",), ("health",),
                        ("quantize", WEIGHTS, "-o", self.path("q.safetensors"),
                         "--no-store", "--spec", "int8"),
                        ("evaluate", WEIGHTS, "--spec", "int8")):
            document = self.json(*command)
            self.assertEqual(list(document)[0], "json_version", command)
            self.assertEqual(document["json_version"], 1)
        document = self.json("encodings", "get", "--model", "none", "w", code=1)
        self.assertEqual(document["error"]["reason"], "ENCODING_NOT_FOUND")


def all_of(terminal, parts=None):
    """What is written to a terminal, which also goes to `parts` as it comes."""
    parts = [] if parts is None else parts
    try:
        while part := os.read(terminal, 65536):
            parts.append(part)
    except OSError:
        # Nobody has the other end.
        pass
    return b"".join(parts)


def port_is_open(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
