"""The rules, the dashboard and the runbook of deploy/ are about this quantd.

  monitoring_test.py --quantd BINARY [unittest arguments]

promtool checks and tests the rules; a Prometheus scrapes a live quantd with
them, and every query of the dashboard has to bring something back. Skipped
where there is no Prometheus.
"""

import argparse
import collections
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.parse
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                "../../client/python"))
import package  # pylint: disable=unused-import,wrong-import-position
# pylint: disable=wrong-import-order,wrong-import-position
import numpy as np
import yaml

import certificates
import live_server
import quantd
from fleet import free_port

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()

if not (shutil.which("prometheus") and shutil.which("promtool")):
    print("skipped: Prometheus is not installed")
    sys.exit(77)

DEPLOY = os.path.join(live_server.ROOT, "deploy")
RULES = os.path.join(DEPLOY, "prometheus/rules.yml")
CONFIG = os.path.join(DEPLOY, "prometheus/prometheus.yml")
RUNBOOK = os.path.join(DEPLOY, "prometheus/RUNBOOK.md")
README = os.path.join(DEPLOY, "prometheus/README.md")
DASHBOARD = os.path.join(DEPLOY, "grafana/quantd.json")
TEXTS = [RULES, RUNBOOK, README, DASHBOARD]
RULES_TESTS = [os.path.join(live_server.ROOT, "tests/deploy/prometheus", name)
               for name in ("rules_test.yml", "rules_slow_test.yml")]
TIMEOUT_S = live_server.PATIENCE_S

# What is empty where all is well, and why.
EMPTY_WHEN_HEALTHY = {
    "resets(": "a counter that was reset is a replica that started again",
}
# What Prometheus itself makes.
PROMETHEUS_METRICS = {"up", "ALERTS", "scrape_samples_scraped"}


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def rules():
    return [rule for group in yaml.safe_load(read(RULES))["groups"]
            for rule in group["rules"]]


def alerts():
    return [rule for rule in rules() if "alert" in rule]


def dashboard():
    return json.loads(read(DASHBOARD))


def panels():
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def dashboard_queries():
    queries = [target["expr"] for panel in panels()
               for target in panel["targets"]]
    queries += [annotation["expr"]
                for annotation in dashboard()["annotations"]["list"]
                if "expr" in annotation]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            series = re.fullmatch(r"label_values\((.*), \w+\)",
                                  variable["query"]["query"])
            queries.append(series.group(1))
    return queries


def promtool(*command):
    return subprocess.run(["promtool", *command], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False)


class FilesTest(unittest.TestCase):
    """What can be told without a server."""

    def test_PromtoolTakesTheConfigurationAndTheRules(self):
        # "check config" checks the rules that it names, too.
        checked = promtool("check", "config", CONFIG)
        self.assertEqual(checked.returncode, 0, checked.stdout)

    def test_EveryAlertFiresWhenItShall(self):
        tested = promtool("test", "rules", *RULES_TESTS)
        self.assertEqual(tested.returncode, 0, tested.stdout)

    def test_EveryAlertIsTestedBothWays(self):
        tested = collections.defaultdict(set)
        for path in RULES_TESTS:
            for test in yaml.safe_load(read(path))["tests"]:
                for at in test.get("alert_rule_test", []):
                    tested[at["alertname"]].add(bool(at["exp_alerts"]))
        self.assertEqual(
            tested, {rule["alert"]: {True, False} for rule in alerts()})

    def test_EveryAlertHasItsSectionInTheRunbook(self):
        sections = re.findall(r"^## (.*)$", read(RUNBOOK), re.M)
        self.assertEqual(sections, [rule["alert"] for rule in alerts()])
        for rule in alerts():
            with self.subTest(rule["alert"]):
                self.assertEqual(
                    rule["annotations"]["runbook_url"],
                    "deploy/prometheus/RUNBOOK.md#" + rule["alert"].lower())
                self.assertTrue(rule["annotations"]["summary"])
                self.assertIn(rule["labels"]["severity"], ("page", "ticket"))
        for text in re.split(r"^## ", read(RUNBOOK), flags=re.M)[1:]:
            title = text.split("\n")[0]
            with self.subTest(title):
                severity = next(rule["labels"]["severity"]
                                for rule in alerts() if rule["alert"] == title)
                self.assertTrue(text.split("\n")[2].startswith(
                    severity.capitalize() + ". "))
                for part in ("See it", "Do first", "Escalate"):
                    self.assertIn(part.lower(), text.lower())

    def test_NothingAsksForTheNameOfAJob(self):
        for path in (RULES, DASHBOARD):
            self.assertNotRegex(read(path), r'job\s*=\\*"')

    def test_EveryPanelSaysWhatItShows(self):
        ids = collections.Counter(p["id"] for p in dashboard()["panels"])
        self.assertEqual(set(ids.values()), {1})
        taken = set()
        for panel in panels():
            with self.subTest(panel["title"]):
                self.assertTrue(panel["title"])
                self.assertTrue(panel["description"])
                defaults = panel["fieldConfig"]["defaults"]
                self.assertTrue(defaults["unit"])
                self.assertTrue(defaults["thresholds"]["steps"])
                self.assertEqual(panel["datasource"]["uid"], "${datasource}")
                place = panel["gridPos"]
                self.assertLessEqual(place["x"] + place["w"], 24)
                cells = {(x, y)
                         for x in range(place["x"], place["x"] + place["w"])
                         for y in range(place["y"], place["y"] + place["h"])}
                self.assertFalse(cells & taken)
                taken |= cells
        names = [v["name"] for v in dashboard()["templating"]["list"]]
        self.assertEqual(names, ["datasource", "job", "instance", "rpc"])

    def test_TextsNameOnlyPanelsAndFlagsThatThereAre(self):
        help_text = subprocess.run([options.quantd, "--help"], check=True,
                                   stdout=subprocess.PIPE, text=True).stdout
        flags = set(re.findall(r"--[a-z][a-z-]+", help_text))
        named = set()
        for path in TEXTS:
            named |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", read(path)))
        self.assertGreater(len(named), 15)
        self.assertEqual(named - flags, set())
        titles = {panel["title"] for panel in panels()}
        quoted = set(re.findall(r'"([A-Z][^"]*)"', re.sub(
            r"\s+", " ", read(RUNBOOK))))
        self.assertGreater(len(quoted), 10)
        self.assertEqual(quoted - titles - {"Errors and limits"}, set())


class Prometheus:
    """Scrapes these targets with the shipped configuration and rules, only
    more often; a context manager."""

    def __init__(self, folder, targets):
        config = yaml.safe_load(read(CONFIG))
        config["global"] = {"scrape_interval": "500ms",
                            "scrape_timeout": "500ms",
                            "evaluation_interval": "500ms"}
        config["rule_files"] = [RULES]
        (scrape,) = config["scrape_configs"]
        # Whatever an operator calls it.
        scrape["job_name"] = "prod/fleet-1"
        del scrape["dns_sd_configs"]
        scrape["static_configs"] = [{"targets": targets}]
        path = os.path.join(folder, "prometheus.yml")
        with open(path, "w", encoding="utf-8") as file:
            yaml.safe_dump(config, file)
        address = f"127.0.0.1:{free_port()}"
        self._url = f"http://{address}/"
        self._log = os.path.join(folder, "prometheus.log")
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                live_server.with_parent(
                    "prometheus", "--config.file=" + path,
                    "--storage.tsdb.path=" + os.path.join(folder, "data"),
                    "--web.listen-address=" + address),
                cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def get(self, path, **parameters):
        """The data of an answer; what is not valid is an AssertionError."""
        url = (self._url + "api/v1/" + path + "?"
               + urllib.parse.urlencode(parameters))
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read()}") from error

    def wait_until_ready(self):
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(self._url + "-/ready",
                                       timeout=TIMEOUT_S).close()
                return
            except OSError as error:
                if (self._process.poll() is not None
                        or time.monotonic() > deadline):
                    raise RuntimeError(read(self._log)) from error
                time.sleep(0.02)

    def numbers(self, query):
        """Values of a query now; none that is no number."""
        result = self.get("query", query=query)["result"]
        values = [float(sample["value"][1]) for sample in result]
        return [value for value in values if not math.isnan(value)]

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self._process.terminate()
        try:
            self._process.wait(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def use(client):
    """Some of everything that quantd does, and some that it does not."""
    name = quantd.TensorName("acme/net", "w")
    array = np.linspace(-1, 1, 4096, dtype=np.float32)
    tensor = client.quantize(array, "int8", name=name, store=True)
    client.dequantize(tensor)
    client.evaluate(array, ["int8", "int4"])
    client.calibrate(array, name, contribution=quantd.Contribution(
        "rank-0", time.time_ns()))
    client.get_encoding(name)
    list(client.list_encodings("acme/net"))
    client.get_statistics(name)
    list(client.compute_encodings("acme/net", "int8"))
    missing = quantd.TensorName("acme/net", "missing")
    for fails in (lambda: client.get_encoding(missing),
                  lambda: client.quantize(
                      array, quantd.EncodingReference(missing))):
        try:
            fails()
        except quantd.QuantdError as error:
            assert error.reason == "ENCODING_NOT_FOUND", error


class LiveTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        certificate, key = certificates.Authority("ca").issue(
            "server", names=["127.0.0.1"]).write(self.folder, "server")
        self.server = self.enterContext(live_server.LiveServer(
            options.quantd, folder=self.folder,
            flags=["--listen", f"unix:{self.folder}/socket", "--drain-delay",
                   "0", "--tls-certificate", certificate, "--tls-key", key]))
        self.client = self.enterContext(quantd.Client(
            f"unix:{self.folder}/socket", timeout=TIMEOUT_S))

    def test_EveryQueryBringsSomethingBack(self):
        with Prometheus(self.folder,
                        [self.server.metrics_address]) as prometheus:
            prometheus.wait_until_ready()
            expressions = {
                self.fill_in(query): query for query in dashboard_queries()}
            expressions.update({rule["record"]: rule["record"]
                                for rule in rules() if "record" in rule})
            waiting = set()
            for expression in expressions:
                # That it can be parsed at all; whatever it brings.
                prometheus.numbers(expression)
                if not any(text in expression for text in EMPTY_WHEN_HEALTHY):
                    waiting.add(expression)
            self.assertGreater(len(waiting), 40)
            deadline = time.monotonic() + TIMEOUT_S
            while waiting:
                # A rate is one of what moves between two scrapes.
                use(self.client)
                waiting = {expression for expression in waiting
                           if not prometheus.numbers(expression)}
                self.assertLess(time.monotonic(), deadline,
                                "empty: " + "\n".join(sorted(waiting)))
            self.assertEqual(
                [rule["name"] + ": " + rule["lastError"]
                 for group in prometheus.get("rules")["groups"]
                 for rule in group["rules"] if rule.get("lastError")], [])
            firing = prometheus.get("query",
                                    query='ALERTS{alertstate="firing"}')
            self.assertEqual(firing["result"], [])
            self.expect_known_metrics(prometheus)

    @staticmethod
    def fill_in(query):
        for variable, value in (("$__rate_interval", "1m"),
                                ("$job", ".*"), ("$instance", ".*"),
                                ("$rpc", ".*")):
            query = query.replace(variable, value)
        assert "$" not in query, query
        return query

    def expect_known_metrics(self, prometheus):
        known = set(prometheus.get("label/__name__/values"))
        known |= PROMETHEUS_METRICS
        # Those that are there with the first of their kind.
        url = f"http://{self.server.metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            known |= set(re.findall(r"^# TYPE (\S+)",
                                    response.read().decode(), re.M))
        for path in TEXTS:
            with self.subTest(path):
                named = set(re.findall(
                    r"(?<![\w#:/])(?:job\w*:)?"
                    r"(?:quantd|grpc_server|process|scrape)_\w+(?::\w+)?",
                    read(path)))
                self.assertGreater(len(named), 10)
                self.assertEqual(named - known, set())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + unittest_arguments)
