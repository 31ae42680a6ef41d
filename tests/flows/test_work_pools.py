"""The templates of work pools in the documentation are complete, and what they make is valid where it is made."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/examples/work-pools"


@pytest.fixture(params=["docker", "kubernetes"])
def template(request: pytest.FixtureRequest) -> Any:
    return json.loads((FOLDER / f"{request.param}.json").read_text())


def read(kind: str) -> Any:
    return json.loads((FOLDER / f"{kind}.json").read_text())


def filled_in(job: Any, kind: str, **values: Any) -> Any:
    """The job as a worker of this class fills it in; no block is named, so that no server is asked."""
    return asyncio.run(job.from_template_and_values(read(kind), values, client=object()))


def plainly_filled_in(kind: str, **values: Any) -> Any:
    """The same, by what all workers have in common."""
    from prefect.workers.base import BaseJobConfiguration

    class AnyJob(BaseJobConfiguration, extra="allow"):
        pass

    return filled_in(AnyJob, kind, command="go", name="run-1", **values).model_dump()


def test_every_placeholder_is_a_variable_and_every_variable_is_used(template: Any) -> None:
    from prefect.utilities.templating import find_placeholders

    used = {placeholder.name for placeholder in find_placeholders(template["job_configuration"])}
    assert used == set(template["variables"]["properties"])


def test_every_default_is_valid_and_every_variable_is_explained(template: Any) -> None:
    import jsonschema

    schema = template["variables"]
    jsonschema.Draft202012Validator.check_schema(schema)
    defaults = {name: field["default"] for name, field in schema["properties"].items() if "default" in field}
    jsonschema.validate(defaults, {**schema, "additionalProperties": False})
    assert all(field["description"] and field["title"] for field in schema["properties"].values())


def test_a_container_gets_its_gpus_shared_memory_and_volumes() -> None:
    from docker.models.containers import _create_container_args

    made = plainly_filled_in("docker", gpu_ids=["GPU-1", "GPU-2"], shm_size="16g")
    asked = {"image": made["image"], "volumes": made["volumes"], "environment": made["env"]}
    asked["version"] = "1.45"
    arguments = _create_container_args(asked | made["container_create_kwargs"])
    host = arguments["host_config"]
    assert host["DeviceRequests"][0]["DeviceIDs"] == ["GPU-1", "GPU-2"]
    assert host["DeviceRequests"][0]["Capabilities"] == [["gpu"]]
    assert host["ShmSize"] == 16 << 30
    assert "/srv/perfladder:/srv/perfladder" in host["Binds"]
    assert "/tmp/perfladder-locks:/tmp/perfladder-locks" in host["Binds"]


def test_a_job_of_a_cluster_gets_its_gpus_shared_memory_and_volume() -> None:
    made = plainly_filled_in("kubernetes", gpus=2, gpu_product="NVIDIA-L40S")
    job = made["job_manifest"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L40S"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"shared-memory": "/dev/shm", "runs": "/srv/perfladder"}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)


def test_the_worker_for_clusters_takes_the_template() -> None:
    worker = pytest.importorskip("prefect_kubernetes.worker", reason="pip install prefect-kubernetes")
    made = filled_in(worker.KubernetesWorker.job_configuration, "kubernetes")
    assert made.job_manifest["spec"]["template"]["spec"]["containers"][0]["image"] == "perfladder:latest"
    assert (made.namespace, made.pod_watch_timeout_seconds) == ("perfladder", 1800)


def test_the_worker_for_containers_takes_the_template() -> None:
    worker = pytest.importorskip("prefect_docker.worker", reason="pip install prefect-docker")
    made = filled_in(worker.DockerWorker.job_configuration, "docker")
    assert made.container_create_kwargs["device_requests"][0]["device_ids"] == ["0"]
    assert made.volumes[0] == "/srv/perfladder:/srv/perfladder"


def test_what_is_deployed_can_be_imported() -> None:
    from prefect import Flow
    from prefect.utilities.importtools import import_object

    deployed = yaml.safe_load((FOLDER / "prefect.yaml").read_text())["deployments"]
    found = {import_object(entry["entrypoint"]).name for entry in deployed}
    assert found == {"profile-pipeline", "sweep"}
    assert all(isinstance(import_object(entry["entrypoint"]), Flow) for entry in deployed)
