"""What a fleet takes beside quantd: PostgreSQL, and nginx in front."""

import glob
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import certificates
from live_server import (PATIENCE_S, ROOT, die_with_parent, which,
                         with_parent)


class PostgresqlCluster:
    """A private PostgreSQL on a unix socket; a context manager.

    Runs as the user "postgres" when the test runs as root, because PostgreSQL
    does not run as root.
    """

    def __init__(self):
        self._folder = tempfile.mkdtemp()
        self._user = None
        if os.geteuid() == 0:
            self._user = pwd.getpwnam("postgres")
            os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        self._programs = sorted(glob.glob("/usr/lib/postgresql/*/bin"))[-1]
        self._data = os.path.join(self._folder, "data")
        self._run("initdb", "-D", self._data, "-U", "postgres", "--auth=trust",
                  "--encoding=UTF8", "--locale=C", "--no-sync")
        self._process = None
        self.start()

    @property
    def url(self):
        return ("postgresql://postgres@/postgres?host="
                + self._folder.replace("/", "%2F"))

    def start(self):
        self._process = subprocess.Popen(
            [os.path.join(self._programs, "postgres"), "-D", self._data,
             "-k", self._folder, "-c", "listen_addresses=", "-c", "fsync=off"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, preexec_fn=self._become)
        deadline = time.monotonic() + PATIENCE_S
        while subprocess.run(
                [os.path.join(self._programs, "pg_isready"), "-q", "-h",
                 self._folder], check=False).returncode != 0:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("PostgreSQL did not start")
            time.sleep(0.02)

    def stop(self):
        """Ends sessions and the server; the data stay."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(timeout=PATIENCE_S)
            self._process = None

    def _become(self):
        if self._user is not None:
            os.setgid(self._user.pw_gid)
            os.setuid(self._user.pw_uid)
        die_with_parent()

    def _run(self, program, *arguments):
        subprocess.run([os.path.join(self._programs, program), *arguments],
                       check=True, stdout=subprocess.DEVNULL,
                       preexec_fn=self._become)

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.stop()
        shutil.rmtree(self._folder)


def start_at(start):
    """What start() returns once the address is free: another connection may
    have the port for a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return start()
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def stop_all(servers):
    """Lets all of them drain at once."""
    for server in servers:
        server.begin_stop()
    for server in servers:
        server.stop()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Nginx:
    """nginx with the configuration that is shipped; a context manager.

    Only the port, the replicas and the certificate are other ones; the
    authority of that is the file `certificate`. `calls_per_s`: of one address,
    if not those that are shipped.
    """

    def __init__(self, replicas, calls_per_s=1000):
        self._folder = tempfile.mkdtemp()
        authority = certificates.Authority("authority")
        self.certificate = certificates.replace(
            os.path.join(self._folder, "authority.pem"), authority.certificate)
        pair = authority.issue("localhost", names=["localhost"])
        for name, content in (("server.pem", pair.certificate),
                              ("server.key", pair.key)):
            certificates.replace(os.path.join(self._folder, name), content)
        port = free_port()
        self.address = f"localhost:{port}"
        with open(os.path.join(ROOT, "deploy/nginx/quantd.conf"),
                  encoding="utf-8") as file:
            text = file.read()
        for shipped, here in (
                ("listen 8443", f"listen 127.0.0.1:{port}"),
                ("rate=1000r/s", f"rate={calls_per_s}r/s")):
            assert text.count(shipped) == 1, shipped
            text = text.replace(shipped, here)
        with open(os.path.join(self._folder, "replicas.conf"), "w",
                  encoding="utf-8") as file:
            file.writelines(f"server {replica} max_fails=0;\n"
                            for replica in replicas)
        path = os.path.join(self._folder, "quantd.conf")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        self._log = os.path.join(self._folder, "log")
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                with_parent(which("nginx"), "-p", self._folder, "-c", path,
                            "-g", "daemon off;"),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                if self._process.poll() is not None or (
                        time.monotonic() > deadline):
                    raise RuntimeError("nginx did not start:\n" + self.log())
                time.sleep(0.01)

    def log(self):
        with open(self._log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self._process.send_signal(signal.SIGQUIT)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder)
