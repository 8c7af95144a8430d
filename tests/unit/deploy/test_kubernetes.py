"""The Kubernetes manifests: they fit each other, the settings and the rules of a restricted namespace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from service.settings import ServeSettings, env_of, load_settings
from tests.support.compose import DOCKERFILE, ROOT

FOLDER = ROOT / "docker" / "kubernetes"
API_VERSIONS = {
    "Deployment": "apps/v1",
    "Service": "v1",
    "PodDisruptionBudget": "policy/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "NetworkPolicy": "networking.k8s.io/v1",
    "Gateway": "gateway.networking.k8s.io/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "BackendTrafficPolicy": "gateway.envoyproxy.io/v1alpha1",
}


@pytest.fixture(scope="module")
def objects() -> Mapping[str, dict[str, Any]]:
    """Every object by its kind; there is one of each."""
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files
    found = [document for name in sorted(files) for document in yaml.safe_load_all((FOLDER / name).read_text())]
    assert len({document["kind"] for document in found}) == len(found)
    return {document["kind"]: document for document in found}


def pod_of(objects: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return dict(objects["Deployment"]["spec"]["template"]["spec"])


def container_of(objects: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    (container,) = pod_of(objects)["containers"]
    return dict(container)


def test_every_object_has_the_version_of_its_kind_and_the_one_name(objects: Mapping[str, dict[str, Any]]) -> None:
    assert {kind: document["apiVersion"] for kind, document in objects.items()} == API_VERSIONS
    assert {document["metadata"]["name"] for document in objects.values()} == {"draft-engine"}


def test_all_that_select_pods_select_those_of_the_deployment(objects: Mapping[str, dict[str, Any]]) -> None:
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert objects["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert objects["Service"]["spec"]["selector"] == labels
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    (spread,) = pod_of(objects)["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == labels


def test_the_service_is_headless_and_ports_agree(objects: Mapping[str, dict[str, Any]]) -> None:
    (port,) = container_of(objects)["ports"]
    (service_port,) = objects["Service"]["spec"]["ports"]
    assert objects["Service"]["spec"]["clusterIP"] == "None"
    assert (service_port["targetPort"], service_port["port"]) == (port["name"], port["containerPort"])
    assert port["containerPort"] == ServeSettings.model_fields["port"].default
    (rule,) = objects["HTTPRoute"]["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "draft-engine", "port": 8100}]
    assert objects["NetworkPolicy"]["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 8100}]


def test_probes_ask_open_routes_and_a_draining_pod_is_not_killed(objects: Mapping[str, dict[str, Any]]) -> None:
    container = container_of(objects)
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    # A draining server is alive: were liveness to ask /health, the drain would end in a kill.
    assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/livez"}
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 600


def test_there_is_time_to_drain(objects: Mapping[str, dict[str, Any]]) -> None:
    container = container_of(objects)
    environment = {item["name"]: item.get("value") for item in container["env"]}
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = float(environment["DRAFT_ENGINE_DRAIN_SECONDS"] or 0)
    readiness = container["readinessProbe"]
    assert pause + drain + 30 < pod_of(objects)["terminationGracePeriodSeconds"]
    assert drain > readiness["periodSeconds"] * readiness["failureThreshold"]


def test_the_environment_and_the_configuration_are_read_by_serve(objects: Mapping[str, dict[str, Any]]) -> None:
    container = container_of(objects)
    environment = {item["name"]: item.get("value") for item in container["env"]}
    known = {env_of(name): name for name in ServeSettings.model_fields}
    flags = {known[name]: value for name, value in environment.items() if value is not None}
    assert environment["DRAFT_ENGINE_API_KEY"] is None, "the key comes from a secret"
    command, option, file = container["args"]
    assert (command, option) == ("serve", "--config")
    settings = load_settings(ServeSettings, flags, config=ROOT / file.removeprefix("/"))
    assert settings.disconnect_grace_seconds >= settings.lease_seconds, "connections are the gateway's"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert settings.model is not None
    assert any(str(settings.model).startswith(mount) for mount in mounts)
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod_of(objects)["volumes"]}


def test_the_pod_may_run_in_a_restricted_namespace(objects: Mapping[str, dict[str, Any]]) -> None:
    pod, container = pod_of(objects), container_of(objects)
    user = pod["securityContext"]["runAsUser"]
    assert f"USER {user}:{pod['securityContext']['runAsGroup']}" in DOCKERFILE.read_text()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False


def test_the_autoscaler_scales_the_deployment_on_queue_time_slowly_down(objects: Mapping[str, dict[str, Any]]) -> None:
    spec, deployment = objects["HorizontalPodAutoscaler"]["spec"], objects["Deployment"]
    assert spec["scaleTargetRef"] == {
        "apiVersion": deployment["apiVersion"],
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }
    (metric,) = spec["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert f"as: {name}" in (FOLDER / "autoscaler.yaml").read_text(), "the adapter's rule makes this metric"
    assert "replicas" not in deployment["spec"], "two owners of one number"
    assert spec["minReplicas"] > objects["PodDisruptionBudget"]["spec"]["maxUnavailable"]
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] >= 600


def test_the_gateway_hashes_consistently(objects: Mapping[str, dict[str, Any]]) -> None:
    policy = objects["BackendTrafficPolicy"]["spec"]
    assert policy["loadBalancer"]["type"] == "ConsistentHash"
    (target,) = policy["targetRefs"]
    assert (target["kind"], target["name"]) == ("HTTPRoute", objects["HTTPRoute"]["metadata"]["name"])
    (parent,) = objects["HTTPRoute"]["spec"]["parentRefs"]
    assert parent["name"] == objects["Gateway"]["metadata"]["name"]
    (listener,) = objects["Gateway"]["spec"]["listeners"]
    assert listener["protocol"] == "HTTPS"


def test_the_image_is_a_fixed_one_of_ours(objects: Mapping[str, dict[str, Any]]) -> None:
    (image,) = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["images"]
    assert container_of(objects)["image"] == f"{image['name']}:{image['newTag']}"
    assert image["newTag"].endswith("-cuda")
