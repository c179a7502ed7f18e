"""The compose file: it is one, and it agrees with quantd, its image, and the
files beside it.

  compose_test.py --quantd BINARY [unittest arguments]
"""

import argparse
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest

import yaml

import configuration

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()

DEPLOY = os.path.join(configuration.ROOT, "deploy")
# What is made there is in no repository.
SECRETS = os.path.join(DEPLOY, "secrets")


def read(*path):
    with open(os.path.join(DEPLOY, *path), encoding="utf-8") as file:
        return file.read()


class ComposeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        done = subprocess.run(
            ["docker-compose", "-f", os.path.join(DEPLOY, "compose.yaml"),
             "config"], check=False, text=True, capture_output=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
        cls.compose = yaml.safe_load(done.stdout)
        cls.services = cls.compose["services"]
        cls.replicas = {name: service for name, service in cls.services.items()
                        if service["image"] == "quantd"}
        cls.image = configuration.image()
        cls.quantd = configuration.Quantd(options.quantd)

    def each(self, services):
        for name, service in services.items():
            with self.subTest(name):
                yield service

    def effective(self, service):
        return self.quantd.effective(
            {**self.image.environment, **service["environment"]},
            service.get("command", ()))

    def mounts(self, service):
        """{where: what} of files and folders of the machine."""
        return {where: what for what, where, _ in (
            text.split(":") for text in service.get("volumes", ()))
            if what.startswith("/")}

    def test_ReplicasTakeTheirConfiguration(self):
        self.assertEqual(len(self.replicas), 3)
        for service in self.each(self.replicas):
            effective = self.effective(service)
            self.assertEqual(effective["store"],
                             "postgresql:///?service=quantd")
            self.assertEqual(effective["access-file"],
                             "/run/quantd-access/access.txt")
            self.assertLessEqual(
                {name for name in service["environment"]
                 if name.startswith("QUANTD_")}, self.quantd.variables)
            configuration.check_memory(self, effective, service["mem_limit"])
            self.assertGreater(
                configuration.seconds(service["stop_grace_period"]),
                configuration.drain_s(effective))
            self.assertLessEqual(
                len(self.replicas) * (effective["store-connections"] + 1),
                configuration.POSTGRESQL_CONNECTIONS)

    def test_ReplicasWriteWhereTheImageDoes(self):
        user, group = self.image.user.split(":")
        for service in self.each(self.replicas):
            self.assertEqual(
                set(service["tmpfs"]),
                {f"{path}:uid={user},gid={group},mode=0750"
                 for path in self.image.volumes})

    def test_OthersFindTheReplicas(self):
        grpc_port, metrics_port = sorted(self.image.ports)
        networks = [service["networks"]["fleet"]
                    for service in self.replicas.values()]
        self.assertEqual(
            re.findall(r"^server (\S+)", read("compose/replicas.conf"), re.M),
            [f"{network['ipv4_address']}:{grpc_port}"
             for network in networks])
        job, = yaml.safe_load(read("prometheus/prometheus.yml"))[
            "scrape_configs"]
        found, = job["dns_sd_configs"]
        self.assertEqual(found["port"], metrics_port)
        for network in networks:
            self.assertEqual(network["aliases"], found["names"])

    def test_NothingIsReachableFromOtherMachines(self):
        self.assertTrue(self.compose["networks"]["fleet"]["internal"])
        for service in self.each(self.services):
            for text in service.get("ports", ()):
                self.assertTrue(text.startswith("127.0.0.1:"), text)
        for service in [*self.replicas.values(), self.services["postgresql"]]:
            self.assertEqual(set(service["networks"]), {"fleet"})
            self.assertNotIn("ports", service)

    def test_ServicesAreShutInAndComeBack(self):
        for service in self.each(self.services):
            self.assertTrue(service["read_only"])
            self.assertEqual(service["cap_drop"], ["ALL"])
            self.assertEqual(service["security_opt"],
                             ["no-new-privileges:true"])
            self.assertEqual(service["restart"], "unless-stopped")
            self.assertIn("mem_limit", service)
            self.assertIn("max-size", service["logging"]["options"])
            if service["image"] != "quantd":
                self.assertRegex(service["image"], r":v?[0-9.]+$")
                self.assertIn("healthcheck", service)

    def test_PasswordsComeFromFilesThatInitMakes(self):
        for service in self.each(self.services):
            for name in service.get("environment", {}):
                if "PASSWORD" in name:
                    self.assertTrue(name.endswith("_FILE"), name)
        taken = {item["file"] for item in self.compose["secrets"].values()}
        for service in self.services.values():
            taken |= set(self.mounts(service).values())
        with tempfile.TemporaryDirectory() as folder:
            made = os.path.join(folder, "secrets")
            init = [os.path.join(DEPLOY, "compose/init"), made]
            subprocess.run(init, check=True, stdout=subprocess.DEVNULL)
            self.assertEqual(stat.S_IMODE(os.stat(made).st_mode), 0o700)
            for path in sorted(taken):
                own = path.replace(SECRETS, made)
                self.assertTrue(os.path.exists(own), path)
                # By the users of the containers.
                self.assertTrue(os.stat(own).st_mode & stat.S_IROTH, path)
            password = self.content(made, "postgres_password")
            self.assertIn("password=" + password,
                          self.content(made, "pg_service.conf"))
            # Again: what is there stays.
            again = subprocess.run(init, check=True, text=True,
                                   capture_output=True)
            self.assertEqual(again.stdout, "")
            self.assertEqual(self.content(made, "postgres_password"), password)
            self.check_nginx(made)

    def content(self, *path):
        with open(os.path.join(*path), encoding="utf-8") as file:
            return file.read()

    def check_nginx(self, secrets):
        """nginx takes the files as they are mounted."""
        if not shutil.which("nginx", path="/usr/sbin:/usr/bin"):
            return
        service = self.services["nginx"]
        with tempfile.TemporaryDirectory() as folder:
            for where, what in self.mounts(service).items():
                shutil.copy(what.replace(SECRETS, secrets),
                            os.path.join(folder, os.path.basename(where)))
            own = {"/tmp": folder, "/etc/nginx/quantd/quantd.conf":
                   os.path.join(folder, "quantd.conf")}
            command = [own.get(text, text) for text in service["entrypoint"]]
            done = subprocess.run(
                [*command, "-t"], check=False, text=True, capture_output=True,
                env={"PATH": "/usr/sbin:/usr/bin"})
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_GrafanaFindsTheDashboard(self):
        mounts = self.mounts(self.services["grafana"])
        provider, = yaml.safe_load(
            read("grafana/provisioning/dashboards/quantd.yml"))["providers"]
        self.assertIn(provider["options"]["path"] + "/quantd.json", mounts)
        source, = yaml.safe_load(
            read("grafana/provisioning/datasources/prometheus.yml"))["datasources"]
        self.assertEqual(source["url"], "http://prometheus:9090")


if __name__ == "__main__":
    if not shutil.which("docker-compose"):
        print("skipped: there is no docker-compose")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1] + unittest_arguments)
