"""Runs what deploy/jobs has: whatever shares the parts of a model out, the
folder is that of one run, byte for byte.

  jobs_test.py --quantd BINARY --quantctl BINARY [unittest arguments]

Each recipe is skipped without what runs it: slurm-wlm, python3-distributed,
torch, kubectl.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import configuration

sys.path[:0] = [os.path.join(configuration.ROOT, "tests/client/python"),
                os.path.join(configuration.ROOT, "tests/e2e/python")]
# pylint: disable=wrong-import-position
import package
import numpy as np
import live_server
import quantd

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl", required=True)
options, unittest_arguments = arguments.parse_known_args()

os.environ["QUANTD_QUANTCTL"] = os.path.abspath(options.quantctl)

JOBS = os.path.join(configuration.ROOT, "deploy/jobs")
SPECS = ["*q_proj*=int4:group:32", "int8:per-channel"]
WAIT_S = 120
SLURM = ("munged", "sbatch", "slurmctld", "slurmd", "scontrol", "squeue")
SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=1,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


def free_ports(count):
    """Nobody listens there now."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


class Slurm:
    """One node on loopback; a context manager."""

    def __init__(self, folder):
        self.folder = folder
        self.processes = []
        self.environment = dict(os.environ,
                                SLURM_CONF=self.path("slurm.conf"))

    def path(self, name):
        return os.path.join(self.folder, name)

    def start(self, *command):
        with open(self.path(command[0] + ".out"), "wb") as log:
            self.processes.append(subprocess.Popen(
                live_server.with_parent(*command), stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, env=self.environment))

    def logs(self):
        found = []
        for name in sorted(os.listdir(self.folder)):
            if name.endswith((".log", ".out")):
                with open(self.path(name), encoding="utf-8",
                          errors="replace") as file:
                    found.append(f"{name}:\n{file.read()[-2000:]}")
        return "\n".join(found)

    def wait(self, what, is_done):
        deadline = time.monotonic() + WAIT_S
        while not is_done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} took too long:\n{self.logs()}")
            time.sleep(0.05)

    def run(self, *command, **environment):
        done = subprocess.run(
            command, env={**self.environment, **environment}, check=False,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stdout}\n{self.logs()}")
        return done.stdout

    def __enter__(self):
        os.chmod(self.folder, 0o755)
        for name in ("state", "spool"):
            os.mkdir(self.path(name))
        with open(self.path("munge.key"), "wb") as file:
            file.write(os.urandom(1024))
        os.chmod(self.path("munge.key"), 0o400)
        with open(self.path("slurm.conf"), "w", encoding="utf-8") as file:
            file.write(SLURM_CONF.format(
                host=socket.gethostname().split(".")[0], folder=self.folder,
                user="root", ports=free_ports(2)))
        try:
            self.start("munged", "--foreground", "--force",
                       "--key-file", self.path("munge.key"),
                       "--socket", self.path("munge.socket"),
                       "--pid-file", self.path("munged.pid"),
                       "--log-file", self.path("munged.log"),
                       "--seed-file", self.path("munged.seed"))
            self.wait("munged", lambda: os.path.exists(
                self.path("munge.socket")))
            self.start("slurmctld", "-D", "-i")
            self.start("slurmd", "-D")
            self.wait("slurm", lambda: "idle" in subprocess.run(
                ["sinfo", "-h"], env=self.environment, check=False, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *unused):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class JobsTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.server = live_server.LiveServer(options.quantd)
        cls.addClassCleanup(cls.server.stop)
        cls.client = quantd.Client(cls.server.address)
        cls.addClassCleanup(cls.client.close)

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name
        rng = np.random.default_rng(11)
        os.mkdir(self.path("llm"))
        weight_map = {}
        for shard in range(3):
            tensors = {
                f"layers.{shard}.{name}.weight": rng.standard_normal(
                    (rows, 64), np.float32)
                for name, rows in (("q_proj", 96), ("k_proj", 32),
                                   ("down_proj", 160), ("up_proj", 8))}
            tensors[f"layers.{shard}.norm.weight"] = rng.standard_normal(64)
            name = f"model-{shard + 1:05}-of-00003.safetensors"
            quantd.save(self.path("llm", name), tensors)
            weight_map.update({tensor: name for tensor in tensors})
        with open(self.path("llm", "model.safetensors.index.json"), "w",
                  encoding="utf-8") as file:
            json.dump({"weight_map": weight_map}, file)
        self.environment = dict(
            os.environ, QUANTD_SERVER=self.server.address,
            PYTHONPATH=package.FOLDER, PATH=os.pathsep.join(
                [self.path("bin"), os.environ["PATH"]]))
        os.mkdir(self.path("bin"))
        os.symlink(os.path.realpath(options.quantctl),
                   self.path("bin", "quantctl"))
        self.words = [self.path("llm"), "-o", self.path("parts"), *(
            word for spec in SPECS for word in ("--spec", spec))]
        quantd.quantize_model(self.path("llm"), self.path("one"), SPECS,
                              client=self.client)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def contents(self, folder):
        found = {}
        for name in os.listdir(self.path(folder)):
            with open(self.path(folder, name), "rb") as file:
                found[name] = file.read()
        return found

    def assert_is_that_of_one_run(self):
        self.assertEqual(sorted(self.contents("parts")),
                         sorted(self.contents("one")))
        self.assertEqual(self.contents("parts"), self.contents("one"))

    def run_quantctl(self, *words):
        return live_server.run("quantctl", "quantize", *self.words, *words,
                               env=self.environment)

    def test_TwoProcessesAtOnceMakeTheFolderOfOneRun(self):
        processes = [subprocess.Popen(
            ["quantctl", "quantize", *self.words, "--part", f"{part}/2"],
            env=self.environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True) for part in range(2)]
        for process in processes:
            output = process.communicate(timeout=WAIT_S)[0]
            self.assertEqual(process.returncode, 0, output)
        self.run_quantctl("--join")
        self.assert_is_that_of_one_run()

    @unittest.skipUnless(all(shutil.which(name) for name in SLURM) and
                         os.geteuid() == 0,
                         "without slurm-wlm, or not as root")
    def test_ASlurmArrayWithTwoPartsThatAreKilled(self):
        os.remove(self.path("bin", "quantctl"))
        with open(self.path("bin", "quantctl"), "w", encoding="utf-8") as file:
            # Parts 2 and 5 are killed in the midst of their first run.
            file.write(f"""#!/bin/bash
last="${{@: -1}}"
mark={self.path()}/killed-${{last%%/*}}
if [[ $last == [25]/8 && ! -e $mark ]]; then
  touch "$mark"
  {os.path.realpath(options.quantctl)} "$@" &
  kill -9 $!
  wait $!
  exit 137
fi
exec {os.path.realpath(options.quantctl)} "$@"
""")
        os.chmod(self.path("bin", "quantctl"), 0o755)
        os.mkdir(self.path("slurm"))
        os.chmod(self.folder, 0o755)
        with Slurm(self.path("slurm")) as slurm:
            slurm.environment.update(
                {name: self.environment[name]
                 for name in ("QUANTD_SERVER", "PATH")}, N="8")

            def submit(array):
                job = slurm.run(
                    "sbatch", "--parsable", f"--array={array}",
                    "--output", self.path("slurm", "task-%a.out"),
                    os.path.join(JOBS, "slurm.sh"), *self.words).strip()
                slurm.wait("the array", lambda: not slurm.run(
                    "squeue", "-h", "-j", job).strip())
            submit("0-7")
            self.assertTrue(os.path.exists(self.path("killed-2")))
            self.assertTrue(os.path.exists(self.path("killed-5")))
            missing = subprocess.run(
                ["quantctl", "quantize", *self.words, "--join"],
                env=self.environment, check=False, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            self.assertNotEqual(missing.returncode, 0)
            self.assertIn("FILE_INCOMPLETE", missing.stdout, slurm.logs())
            submit("2,5")
            self.run_quantctl("--join")
        self.assert_is_that_of_one_run()

    @unittest.skipUnless(importlib.util.find_spec("distributed"),
                         "without python3-distributed")
    def test_DaskWithFourWorkers(self):
        output = live_server.run(
            sys.executable, os.path.join(JOBS, "dask_parts.py"),
            self.path("llm"), self.path("parts"), " ".join(SPECS), "--server",
            self.server.address, env=self.environment, cwd=self.folder)
        self.assertRegex(output, r"tensors in 8 parts, \d+ bytes in ")
        self.assert_is_that_of_one_run()

    @unittest.skipUnless(importlib.util.find_spec("torch"), "without torch")
    def test_RanksOfTorchrun(self):
        live_server.run(
            sys.executable, "-m", "torch.distributed.run", "--no_python",
            "--standalone", "--nproc_per_node", "3",
            # Without these that of Debian 12 fails.
            "-r", "1", "-t", "1",
            os.path.join(JOBS, "ranks.sh"), *self.words, env=self.environment)
        self.run_quantctl("--join")
        self.assert_is_that_of_one_run()

    def test_RanksOfMpi(self):
        for names in (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
                      ("PMI_RANK", "PMI_SIZE"),
                      ("SLURM_PROCID", "SLURM_NTASKS")):
            for rank in range(2):
                live_server.run(
                    os.path.join(JOBS, "ranks.sh"), *self.words,
                    env={**self.environment,
                         **dict(zip(names, (str(rank), "2")))})
        self.run_quantctl("--join")
        self.assert_is_that_of_one_run()

    @unittest.skipUnless(shutil.which("kubectl") and
                         importlib.util.find_spec("yaml"),
                         "without kubectl or python3-yaml")
    def test_TheIndexedJobRendersAndItsPodsAreParts(self):
        # pylint: disable-next=import-outside-toplevel
        import yaml
        (job,) = yaml.safe_load_all(live_server.run(
            "kubectl", "kustomize", os.path.join(JOBS, "kubernetes")))
        spec = job["spec"]
        self.assertEqual((job["kind"], spec["completionMode"]),
                         ("Job", "Indexed"))
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        count = spec["completions"]
        paths = {"/models/llm-int4": self.path("parts"),
                 "/models/llm": self.path("llm"),
                 "--spec=int4:group:128": f"--spec={SPECS[0]}"}
        for index in range(count):
            words = [paths.get(word, re.sub(
                r"\$\(JOB_COMPLETION_INDEX\)", str(index), word))
                     for word in container["args"]] + ["--spec", SPECS[1]]
            self.assertIn(f"--part={index}/{count}", words)
            live_server.run(*container["command"], *words,
                            env=self.environment)
        self.run_quantctl("--join")
        self.assert_is_that_of_one_run()


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
