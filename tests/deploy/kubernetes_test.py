"""The manifests of Kubernetes: they render, they are what the API takes, and
they agree with quantd, its image and each other.

  kubernetes_test.py --quantd BINARY --node FOLDER [unittest arguments]

FOLDER has the npm packages of tests/e2e/node/package.json: the API's types are
those of kubernetes-types, and TypeScript finds what they do not know. Without
them that part is skipped. A kubectl whose kustomize knows no components renders
the base only.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import yaml

import configuration

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--node", required=True)
options, unittest_arguments = arguments.parse_known_args()

FOLDER = os.path.join(configuration.ROOT, "deploy/kubernetes")
# Modules of kubernetes-types, by what stands before the version.
MODULES = {"": "core", "apps": "apps", "autoscaling": "autoscaling",
           "networking.k8s.io": "networking", "policy": "policy"}
# Types of the Prometheus operator, which kubernetes-types has not, and the keys
# that are used of them.
OPERATOR = "monitoring.coreos.com/v1"
OPERATOR_KEYS = {
    "PodMonitor": {"selector", "sampleLimit", "podMetricsEndpoints"},
    "PrometheusRule": {"groups"}}
ENDPOINT_KEYS = {"port", "path", "interval"}
# What pods of the profile "restricted" may mount.
RESTRICTED_VOLUMES = {"configMap", "emptyDir", "secret"}


def render(folder):
    done = subprocess.run(["kubectl", "kustomize", folder], check=True,
                          text=True, capture_output=True)
    assert not done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def knows_components():
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "kustomization.yaml"), "w",
                  encoding="utf-8") as file:
            file.write("components: []\n")
        done = subprocess.run(["kubectl", "kustomize", folder], check=False,
                              text=True, capture_output=True)
    return "unknown field" not in done.stderr


def render_all():
    """{name: objects} of the base, the example, and the base with all that can
    be added to it."""
    rendered = {"base": render(os.path.join(FOLDER, "base"))}
    if not knows_components():
        return rendered
    rendered["example"] = render(os.path.join(FOLDER, "overlays/example"))
    with tempfile.TemporaryDirectory() as folder:
        # kustomize takes no absolute paths.
        def path(*names):
            return os.path.relpath(os.path.join(FOLDER, *names),
                                   os.path.realpath(folder))

        components = sorted(os.listdir(os.path.join(FOLDER, "components")))
        with open(os.path.join(folder, "kustomization.yaml"), "w",
                  encoding="utf-8") as file:
            json.dump({"resources": [path("base")],
                       "components": [path("components", name)
                                      for name in components]}, file)
        rendered["everything"] = render(folder)
    return rendered


def type_errors(rendered):
    """What TypeScript finds wrong with {name: objects}: [(name, message)]."""
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(os.path.join(os.path.realpath(options.node),
                                "node_modules"),
                   os.path.join(folder, "node_modules"))
        for name, objects in rendered.items():
            with open(os.path.join(folder, name + ".ts"), "w",
                      encoding="utf-8") as file:
                for number, item in enumerate(objects):
                    if item["apiVersion"] == OPERATOR:
                        continue
                    group, version = ("/" + item["apiVersion"]).split("/")[-2:]
                    file.write(
                        f'export const object{number}: import("'
                        f'kubernetes-types/{MODULES[group]}/{version}'
                        f'").{item["kind"]} = {json.dumps(item, indent=1)};\n')
        with open(os.path.join(folder, "tsconfig.json"), "w",
                  encoding="utf-8") as file:
            json.dump({"compilerOptions": {
                "noEmit": True, "strict": True, "skipLibCheck": True,
                "moduleResolution": "node", "types": []}}, file)
        done = subprocess.run(
            ["node", "node_modules/typescript/bin/tsc", "--pretty", "false"],
            cwd=folder, check=False, text=True, capture_output=True)
    found = re.findall(r"^(\w+)\.ts\(.*error (.*)$", done.stdout, re.M)
    if done.returncode != 0 and not found:
        raise RuntimeError(done.stdout + done.stderr)
    return found


class Fleet:
    """Objects that belong together."""

    def __init__(self, objects):
        self.objects = objects
        self.deployment = self.only("Deployment")
        self.template = self.deployment["spec"]["template"]
        self.pod = self.template["spec"]
        self.container, = self.pod["containers"]
        self.arguments = self.container["args"]
        self.autoscaler = self.only("HorizontalPodAutoscaler")
        self.configuration = self.only("ConfigMap")["data"]["quantd.toml"]
        self.mounts = {mount["mountPath"]: mount["name"]
                       for mount in self.container["volumeMounts"]}
        self.volumes = {volume["name"]: volume
                        for volume in self.pod["volumes"]}
        self.probes = {name: self.container[name] for name in (
            "startupProbe", "readinessProbe", "livenessProbe")}

    def all(self, kind):
        return [item for item in self.objects if item["kind"] == kind]

    def only(self, kind):
        item, = self.all(kind)
        return item

    def environment(self):
        """The image's, and over it the container's; what is only known in the
        cluster stands for itself."""
        known = dict(configuration.image().environment)
        for item in self.container["env"]:
            source = item.get("valueFrom", {})
            if "secretKeyRef" in source:
                known[item["name"]] = "postgresql://quantd@db/quantd"
            elif "resourceFieldRef" in source:
                kind, resource = source["resourceFieldRef"][
                    "resource"].split(".")
                known[item["name"]] = self.container["resources"][kind][
                    resource]
            else:
                known[item["name"]] = item["value"]
        return known

    def secure(self):
        return any(text.startswith("--tls-certificate=")
                   for text in self.arguments)


class KubernetesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rendered = render_all()
        cls.quantd = configuration.Quantd(options.quantd)
        cls.image = configuration.image()
        with open(os.path.join(configuration.ROOT,
                               "deploy/examples/client-pod.yaml"),
                  encoding="utf-8") as file:
            cls.client = yaml.safe_load(file)

    def fleets(self):
        for name, objects in self.rendered.items():
            with self.subTest(name):
                yield Fleet(objects)

    def effective(self, fleet):
        return self.quantd.effective(
            fleet.environment(), fleet.arguments,
            {"/etc/quantd/config/quantd.toml": fleet.configuration})

    def test_TheApiKnowsEveryKeyAndItsType(self):
        if not os.path.exists(os.path.join(
                options.node, "node_modules/kubernetes-types")):
            self.skipTest("kubernetes-types is not installed")
        wrong = json.loads(json.dumps(self.rendered["base"]))
        container = Fleet(wrong).container
        container["readinessProbe"]["httpGet"]["portt"] = 1
        container["ports"][0]["containerPort"] = "grpc"
        found = type_errors({**self.rendered, "client": [self.client],
                             "wrong": wrong})
        # That it finds anything at all.
        self.assertEqual(len([name for name, _ in found if name == "wrong"]), 2)
        self.assertEqual([error for error in found if error[0] != "wrong"], [])

    def test_TheExampleIsRendered(self):
        if "example" not in self.rendered:
            self.skipTest("this kubectl knows no components")
        fleet = Fleet(self.rendered["example"])
        self.assertTrue(fleet.secure())
        self.assertNotIn("quantd", fleet.container["image"].split("/")[0])
        namespace = fleet.only("Namespace")
        for item in fleet.objects:
            if item is not namespace:
                self.assertEqual(item["metadata"]["namespace"],
                                 namespace["metadata"]["name"])
        self.assertEqual(namespace["metadata"]["labels"][
            "pod-security.kubernetes.io/enforce"], "restricted")

    def test_QuantdTakesItsConfiguration(self):
        for fleet in self.fleets():
            effective = self.effective(fleet)
            self.assertEqual(effective["threads"], 2)
            self.assertEqual(effective["log-format"], "json")
            self.assertTrue(effective["store"].startswith("postgresql:"))
            self.assertEqual(effective["insecure-listen"], not fleet.secure())
            flags = {text.split("=")[0].removeprefix("--")
                     for text in fleet.arguments}
            self.assertLessEqual(flags, self.quantd.flags)
            names = {name for name in fleet.environment()
                     if name.startswith("QUANTD_")}
            # The last is of quantctl.
            self.assertLessEqual(
                names, self.quantd.variables | {"QUANTD_SERVER"})
            # What wins over the file must not be in it.
            keys = set(re.findall(r"^([a-z-]+) *=", fleet.configuration, re.M))
            self.assertTrue(keys)
            self.assertFalse(keys & flags)
            self.assertFalse({configuration.variable(key)
                              for key in keys} & names)
            self.assertFalse(fleet.pod["enableServiceLinks"])

    def test_ItEndsBeforeItIsKilled(self):
        for fleet in self.fleets():
            command = fleet.container["lifecycle"]["preStop"]["exec"]["command"]
            self.assertEqual(command[0], "sleep")
            effective = self.effective(fleet)
            self.assertGreater(int(command[1]), configuration.seconds(
                effective["drain-delay"]))
            self.assertGreater(
                fleet.pod["terminationGracePeriodSeconds"],
                int(command[1]) + configuration.drain_s(effective))

    def test_MemoryAndConnectionsAreEnough(self):
        for fleet in self.fleets():
            effective = self.effective(fleet)
            resources = fleet.container["resources"]
            self.assertEqual(resources["limits"]["memory"],
                             resources["requests"]["memory"])
            configuration.check_memory(self, effective,
                                       resources["limits"]["memory"])
            # One more for a rolling update, one each that listens.
            replicas = fleet.autoscaler["spec"]["maxReplicas"] + (
                fleet.deployment["spec"]["strategy"]["rollingUpdate"][
                    "maxSurge"])
            self.assertLessEqual(
                replicas * (effective["store-connections"] + 1),
                configuration.POSTGRESQL_CONNECTIONS)

    def test_PortsAreThoseOfQuantd(self):
        for fleet in self.fleets():
            effective = self.effective(fleet)
            ports = {item["name"]: item["containerPort"]
                     for item in fleet.container["ports"]}
            self.assertEqual(ports, {
                "grpc": next(filter(None, map(configuration.port,
                                              effective["listen"]))),
                "metrics": configuration.port(effective["metrics-listen"])})
            self.assertEqual(set(ports.values()), self.image.ports)
            for service in fleet.all("Service"):
                for item in service["spec"]["ports"]:
                    self.assertEqual(item["name"], item["targetPort"])
                    self.assertEqual(item["port"], ports[item["name"]])
            headless, = [service for service in fleet.all("Service")
                         if service["spec"].get("clusterIP") == "None"]
            self.assertEqual({item["name"]
                              for item in headless["spec"]["ports"]},
                             set(ports))
            ingress = fleet.only("NetworkPolicy")["spec"]["ingress"]
            self.assertEqual({item["port"] for rule in ingress
                              for item in rule["ports"]}, set(ports))
            for rule in ingress:
                for source in rule["from"]:
                    self.assertEqual(set(source), {"namespaceSelector",
                                                   "podSelector"})

    def test_ProbesAskForHealthAndGetAnAnswer(self):
        for fleet in self.fleets():
            effective = self.effective(fleet)
            ports = {item["name"]: item["containerPort"]
                     for item in fleet.container["ports"]}
            for name, probe in fleet.probes.items():
                # Which takes none of the connections of callers.
                self.assertEqual(ports[probe["httpGet"]["port"]],
                                 configuration.port(
                                     effective["metrics-listen"]))
                self.assertEqual(probe["httpGet"]["path"], {
                    "readinessProbe": "/readyz?exclude=store"}.get(
                        name, "/healthz"))
            startup = fleet.probes["startupProbe"]
            self.assertGreaterEqual(
                startup["failureThreshold"] * startup["periodSeconds"], 30)

    def test_ThePodIsRestrictedAndHasWhatItTakes(self):
        for fleet in self.fleets():
            security = fleet.pod["securityContext"]
            self.assertTrue(security["runAsNonRoot"])
            self.assertEqual(
                f"{security['runAsUser']}:{security['runAsGroup']}",
                self.image.user)
            self.assertEqual(security["fsGroup"], security["runAsGroup"])
            self.assertEqual(security["seccompProfile"],
                             {"type": "RuntimeDefault"})
            self.assertEqual(fleet.container["securityContext"], {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]}})
            self.assertFalse(fleet.pod["automountServiceAccountToken"])
            self.assertEqual(fleet.pod["serviceAccountName"],
                             fleet.only("ServiceAccount")["metadata"]["name"])
            # What the image wants to write, and what arguments name.
            self.assertLessEqual(self.image.volumes, set(fleet.mounts))
            self.assertEqual(set(fleet.mounts.values()), set(fleet.volumes))
            for text in fleet.arguments:
                self.assertIn(os.path.dirname(text.split("=")[1]),
                              fleet.mounts)
            for volume in fleet.volumes.values():
                self.assertLessEqual(set(volume) - {"name"},
                                     RESTRICTED_VOLUMES)
            # Otherwise it would not see new certificates.
            for mount in fleet.container["volumeMounts"]:
                self.assertNotIn("subPath", mount)

    def test_SelectorsFindThePods(self):
        for fleet in self.fleets():
            labels = fleet.template["metadata"]["labels"]
            selectors = [fleet.deployment["spec"]["selector"]["matchLabels"],
                         fleet.only("PodDisruptionBudget")["spec"]["selector"][
                             "matchLabels"],
                         fleet.only("NetworkPolicy")["spec"]["podSelector"][
                             "matchLabels"]]
            selectors += [service["spec"]["selector"]
                          for service in fleet.all("Service")]
            selectors += [item["labelSelector"]["matchLabels"] for item in
                          fleet.pod["topologySpreadConstraints"]]
            for selector in selectors:
                self.assertTrue(selector)
                self.assertLessEqual(selector.items(), labels.items())
            target = fleet.autoscaler["spec"]["scaleTargetRef"]
            self.assertEqual(
                (target["kind"], target["name"], target["apiVersion"]),
                ("Deployment", fleet.deployment["metadata"]["name"],
                 fleet.deployment["apiVersion"]))
            # Or an update would undo what the autoscaler did.
            self.assertNotIn("replicas", fleet.deployment["spec"])
            self.assertGreater(fleet.autoscaler["spec"]["minReplicas"],
                               fleet.only("PodDisruptionBudget")["spec"][
                                   "maxUnavailable"])

    def test_ThePrometheusOperatorScrapesThePodsByTheRules(self):
        if "everything" not in self.rendered:
            self.skipTest("this kubectl knows no components")
        fleet = Fleet(self.rendered["everything"])
        kinds = {item["kind"]: item for item in fleet.objects
                 if item["apiVersion"] == OPERATOR}
        self.assertEqual(set(kinds), set(OPERATOR_KEYS))
        for kind, item in kinds.items():
            self.assertLessEqual(set(item["spec"]), OPERATOR_KEYS[kind])
        monitor = kinds["PodMonitor"]["spec"]
        self.assertLessEqual(monitor["selector"]["matchLabels"].items(),
                             fleet.template["metadata"]["labels"].items())
        endpoint, = monitor["podMetricsEndpoints"]
        self.assertLessEqual(set(endpoint), ENDPOINT_KEYS)
        self.assertIn(endpoint["port"], [item["name"] for item in
                                         fleet.container["ports"]])
        self.assertEqual(endpoint["path"], "/metrics")
        rules = os.path.join(configuration.ROOT, "deploy/prometheus/rules.yml")
        with open(rules, encoding="utf-8") as file:
            self.assertEqual(kinds["PrometheusRule"]["spec"],
                             yaml.safe_load(file))
        if shutil.which("promtool"):
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "rules.yml")
                with open(path, "w", encoding="utf-8") as file:
                    yaml.safe_dump(kinds["PrometheusRule"]["spec"], file)
                subprocess.run(["promtool", "check", "rules", path], check=True,
                               capture_output=True)

    def test_TheExampleOfAClientMayCall(self):
        if "example" not in self.rendered:
            self.skipTest("this kubectl knows no components")
        fleet = Fleet(self.rendered["example"])
        (source,), = [rule["from"] for rule in
                      fleet.only("NetworkPolicy")["spec"]["ingress"]
                      if rule["ports"] == [{"port": "grpc"}]]
        for selector, labels in (
                ("podSelector", self.client["metadata"]["labels"]),
                ("namespaceSelector",
                 fleet.only("Namespace")["metadata"]["labels"])):
            self.assertLessEqual(source[selector]["matchLabels"].items(),
                                 labels.items())
        pod = self.client["spec"]
        container, = pod["containers"]
        self.assertEqual(pod["securityContext"], fleet.pod["securityContext"])
        self.assertEqual(container["securityContext"],
                         fleet.container["securityContext"])
        self.assertEqual(container["image"], fleet.container["image"])
        mount, = container["volumeMounts"]
        server, *files = [item["value"] for item in container["env"]]
        self.assertIn(re.fullmatch(r"dns:///(.*)\.quantd\.svc:8430",
                                   server).group(1),
                      [service["metadata"]["name"]
                       for service in fleet.all("Service")])
        for path in files:
            self.assertEqual(os.path.dirname(path), mount["mountPath"])

    def test_TheMetricThatScalesIsOneOfQuantd(self):
        if "everything" not in self.rendered:
            self.skipTest("this kubectl knows no components")
        metrics = Fleet(self.rendered["everything"]).autoscaler["spec"][
            "metrics"]
        names = [item["pods"]["metric"]["name"] for item in metrics
                 if item["type"] == "Pods"]
        self.assertEqual(len(names), 1)
        with open(os.path.join(configuration.ROOT, "server/metrics/metrics.cc"),
                  encoding="utf-8") as file:
            self.assertIn(f'"{names[0]}"', file.read())


if __name__ == "__main__":
    if not shutil.which("kubectl"):
        print("skipped: there is no kubectl")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1] + unittest_arguments)
