"""The manifests and images in examples/cluster and the recipe in conda: structure, and that what they name exists."""

import pathlib
import re

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
CLUSTER = ROOT / "examples/cluster"
KINDS = {
    "job.yaml": ["v1 Service", "batch/v1 Job"],
    "jobset.yaml": ["jobset.x-k8s.io/v1alpha2 JobSet"],
    "pytorchjob.yaml": ["kubeflow.org/v1 PyTorchJob"],
    "trainjob.yaml": ["trainer.kubeflow.org/v1alpha1 TrainJob"],
}
SCRIPT = "/train/train.py"
RANK_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
CONTAINER_KEYS = {"name", "image", "command", "terminationMessagePolicy", "env", "resources", "volumeMounts"}


def documents(name):
    return list(yaml.safe_load_all((CLUSTER / name).read_text()))


def pod_specs(value):
    """All pod specifications inside `value`."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for child in value.values():
            yield from pod_specs(child)
    elif isinstance(value, list):
        for child in value:
            yield from pod_specs(child)


def final_codes():
    """Exit codes after which a new start would fail again: docs/how-to/kubernetes.md lists them."""
    text = (ROOT / "docs/how-to/kubernetes.md").read_text()
    sentence = re.search(r"Of these codes, ([\d, \nand]+) mean", text)
    codes = [int(code) for code in re.findall(r"\d+", sentence[1])]
    table = (ROOT / "docs/reference/exit-codes.md").read_text()
    assert codes and all(re.search(rf"^\| {code} \|", table, re.MULTILINE) for code in codes)
    return codes


def indexed_jobs():
    service, job = documents("job.yaml")
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    yield job["spec"], f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    (jobset,) = documents("jobset.yaml")
    name, (part,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    assert part["replicas"] == 1
    yield part["template"]["spec"], f"{name}-{part['name']}-0-0.{name}"


def test_every_manifest_is_known():
    assert sorted(KINDS) == sorted(path.name for path in CLUSTER.glob("*.yaml"))
    for name, kinds in KINDS.items():
        found = documents(name)
        assert [f"{one['apiVersion']} {one['kind']}" for one in found] == kinds
        assert all(set(one) == {"apiVersion", "kind", "metadata", "spec"} and one["metadata"]["name"] for one in found)


def check_container(pod, container):
    assert set(container) <= CONTAINER_KEYS
    assert container["image"] and container["command"] == ["python", SCRIPT]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert len(mounts) == len(volumes)
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    known = (ROOT / "docs/reference/environment.md").read_text()
    for variable in container["env"]:
        name = variable["name"]
        assert name in RANK_VARIABLES or f"`{name}`" in known
        assert isinstance(variable.get("value", ""), str) and ("value" in variable) != ("valueFrom" in variable)
    key = next(variable["value"] for variable in container["env"] if variable["name"] == "LOCKSTEP_KEY_FILE")
    assert "secret" in mounts[str(pathlib.PurePath(key).parent)]
    # With fsGroup, the mode becomes 0440, and the user of the image may read the key.
    assert mounts["/key"]["secret"]["defaultMode"] == 0o400 and pod["securityContext"]["fsGroup"] > 0
    assert int(container["resources"]["limits"]["cpu"]) > 0


@pytest.mark.parametrize("name", sorted(set(KINDS) - {"trainjob.yaml"}))
def test_containers(name):
    pods = list(pod_specs(documents(name)))
    assert pods
    for pod in pods:
        (container,) = pod["containers"]
        check_container(pod, container)


def test_indexed_jobs():
    for job, first_pod in indexed_jobs():
        (container,) = job["template"]["spec"]["containers"]
        env = {variable["name"]: variable for variable in container["env"]}
        assert env["RANK"]["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
        assert int(env["WORLD_SIZE"]["value"]) == job["completions"] == job["parallelism"]
        assert env["MASTER_ADDR"]["value"] == first_pod and 0 < int(env["MASTER_PORT"]["value"]) < 65536
        assert job["completionMode"] == "Indexed" and job["template"]["spec"]["restartPolicy"] == "Never"
        (rule,) = [rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
        assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": final_codes()}


def test_operators():
    (pytorch,) = documents("pytorchjob.yaml")
    replicas = pytorch["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    for part in replicas.values():
        assert part["template"]["spec"]["containers"][0]["name"] == "pytorch"  # the operator looks for this name
    (train,) = documents("trainjob.yaml")
    trainer = train["spec"]["trainer"]
    assert trainer["command"] == ["python", SCRIPT] and trainer["numProcPerNode"] == 1 and trainer["numNodes"] > 1


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images(name):
    lines = [line for line in (CLUSTER / name).read_text().splitlines() if line and not line.startswith("#")]
    words = [line.split(maxsplit=1)[0] for line in lines]
    assert set(words) <= {"ARG", "FROM", "RUN", "COPY", "USER", "CMD"}
    assert f"COPY {SCRIPT.rpartition('/')[2]} {SCRIPT.rpartition('/')[0]}/" in lines
    assert f'CMD ["lockstep", "run", "python", "{SCRIPT}"]' in lines  # the list form: process 1 receives SIGTERM
    assert any("lockstep_ddp-*.whl" in line for line in lines)


def test_conda_recipe():
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
    version = re.search(r"project\(Lockstep VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
    assert recipe["schema_version"] == 1 and recipe["context"]["version"] == version
    assert set(recipe) == {
        "schema_version", "context", "package", "source", "build", "requirements", "tests", "about"
    }  # fmt: skip
    assert recipe["package"] == {"name": "lockstep-ddp", "version": "${{ version }}"}
    assert set(recipe["requirements"]) == {"build", "host", "run"}
