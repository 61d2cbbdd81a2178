"""The recipes for clusters: what can run here runs, the rest is parsed."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from penstock.config.source import load_config
from stages.tiny_run import TINY

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "examples" / "cluster"
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
PAGE = (ROOT / "docs" / "cluster.md").read_text()


def test_the_manifest_is_a_job_whose_config_finds_its_nodes(tmp_path: Path) -> None:
    parts = {one["kind"]: one for one in yaml.safe_load_all((RECIPES / "kuberay.yaml").read_text())}
    job, text = parts["RayJob"]["spec"], parts["ConfigMap"]["data"]["my.toml"]
    (tmp_path / "my.toml").write_text(text)
    command = shlex.split(job["entrypoint"])
    assert command[:3] == ["penstock", "train", "/config/my.toml"]
    launch = load_config(tmp_path / "my.toml", command[3:]).config.launch
    groups = {one["groupName"]: one for one in job["rayClusterSpec"]["workerGroupSpecs"]}
    for role, count in (
        (launch.ray_options["consumers"], launch.num_consumers),
        (launch.ray_options["producers"], launch.num_producers),
    ):
        group = groups[role.label_selector["role"]]
        assert group["rayStartParams"]["labels"] == f"role={role.label_selector['role']}"
        (pod,) = group["template"]["spec"]["containers"]
        gpus = int(pod["resources"]["limits"]["nvidia.com/gpu"])
        assert gpus * group["maxReplicas"] == role.num_gpus * count
        assert "/dev/shm" in {one["mountPath"] for one in pod["volumeMounts"]}
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    volumes = {one["name"]: one for one in head["volumes"]}
    assert volumes["config"]["configMap"]["name"] == parts["ConfigMap"]["metadata"]["name"]
    claim = volumes["runs"]["persistentVolumeClaim"]["claimName"]
    assert claim == parts["PersistentVolumeClaim"]["metadata"]["name"]


def test_the_slurm_script_starts_ray_on_every_node_and_the_command_on_the_first(
    tmp_path: Path,
) -> None:
    """`srun` notes what it is asked for and runs the rest; ray and penstock only note it."""
    for name, body in {
        "scontrol": "printf 'n1\\nn2\\nn3\\n'",
        "hostname": "echo 10.0.0.1 fe80::1",
        "srun": "while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && node=${1#*=}; shift; done\n"
        'NODE=$node "$@"',
        "ray": f'echo "$NODE: ray $*" >> {tmp_path}/log',
        "penstock": f'wait; printf "%s\\n" "$@" > {tmp_path}/words',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
    script = [str(RECIPES / "slurm.sh"), "train", "my.toml", "run.name=first"]
    subprocess.run(["bash", "-n", script[0]], check=True)
    subprocess.run(["bash", "-c", '"$@"; wait', "bash", *script], check=True, env=environment)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:3] == ["train", "my.toml", "run.name=first"]
    launch = load_config(None, ["train.groups_per_step=8", *words[3:]]).config.launch
    assert (launch.address, launch.num_producers) == ("10.0.0.1:20007", 16)
    assert launch.ray_options["producers"].label_selector == {"role": "generate"}


@contextmanager
def ray_node(command: str, folder: Path, number: int) -> Iterator[None]:
    """Run a `ray start` of the page in the foreground until it has joined; end it at the end."""
    words = [*shlex.split(command), "--block", "--num-cpus=2", "--object-store-memory=134217728"]
    words += ["--node-ip-address=127.0.0.1", "--disable-usage-stats"]
    if "--head" in words:
        words += [f"--temp-dir={folder}", "--include-dashboard=false"]
    log = folder / f"node-{number}.log"
    with log.open("w") as output:
        binary = str(Path(sys.executable).parent / words[0])
        node = subprocess.Popen(
            [binary, *words[1:]],
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env={**os.environ, **TOKEN},
        )
        assert node.stdout is not None
        told = next((line for line in node.stdout if "Ray runtime started" in line), None)
        assert told is not None, log.read_text()
        try:
            yield
        finally:
            node.terminate()
            node.wait()
            node.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_ssh_commands_make_a_cluster_that_trains(tmp_path: Path) -> None:
    port = str(free_port())

    def here(line: str) -> str:
        return line.strip().replace("HEAD", "127.0.0.1").replace("6379", port)

    starts = [here(line) for line in re.findall(r"^    ray start .*$", PAGE, re.MULTILINE)]
    (train,) = re.findall(r"^    penstock train .*HEAD.*$", PAGE, re.MULTILINE)
    words = [word for word in shlex.split(here(train))[3:] if word.startswith("launch.")]
    with tempfile.TemporaryDirectory() as short, ExitStack() as nodes:  # sockets have short names
        for number, start in enumerate(starts):
            nodes.enter_context(ray_node(start, Path(short), number))
        command = [sys.executable, "-m", "penstock.cli", "train", *TINY, *words]
        environment = {**os.environ, **TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        done = subprocess.run(
            [*command, "run.name=ssh", f"run.dir={tmp_path}"],
            env=environment,
            text=True,
            capture_output=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(starts) == 2
