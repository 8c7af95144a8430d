"""The image, the compose file and the monitoring beside it. compose_spec.json is the schema of compose-spec (Apache-2.0)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml  # type: ignore[import-untyped]

from service.doctor import DoctorSettings
from service.settings import env_of, load_settings
from service.target.settings import TargetSettings
from tests.support.compose import (
    COMPOSE_FILE,
    DOCKERFILE,
    ROOT,
    ComposeError,
    dashboard_queries,
    image_environment,
    load_compose,
    published_port,
    services_of,
)
from tests.support.service import make_app, make_harness, serving

DOCKER = ROOT / "docker"
GRAFANA = DOCKER / "monitoring" / "grafana"
FIXED_IMAGE = re.compile(r"^[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*$")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return load_compose({"DRAFT_ENGINE_API_KEY": "a key of compose"})


# The image -----------------------------------------------------------------------------------------------------------


def stages() -> dict[str, list[str]]:
    """Instructions of each stage, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in filter(str.strip, text.splitlines()):
        if line.startswith("FROM "):
            current = found.setdefault(line.split(" AS ")[1].strip(), [])
        current.append(line)
    return found


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_takes_only_the_environment_from_its_build_and_runs_as_nobody_special(target: str) -> None:
    stage = stages()[target]
    assert stage[0] == f"FROM runtime AS {target}"
    assert f"COPY --from=builder-{target} /opt/venv /opt/venv" in stage
    assert [line for line in stage if line.startswith("USER ")] == ["USER 10001:10001"]
    assert stage[-1] == "USER 10001:10001"


def test_the_images_share_health_check_volumes_entry_point_and_signal() -> None:
    stage = "\n".join(stages()["runtime"])
    for line in (
        'CMD ["python", "/usr/local/bin/healthcheck.py"]',
        'ENTRYPOINT ["/usr/local/bin/entrypoint.sh"]',
        'CMD ["serve"]',
        'VOLUME ["/cache", "/models"]',
        "STOPSIGNAL SIGTERM",
    ):
        assert line in stage


def test_everything_that_is_installed_is_pinned() -> None:
    text = DOCKERFILE.read_text()
    assert re.search(r"^ARG PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-\w+$", text, re.MULTILINE)
    assert "ADD " not in text
    for install in re.findall(r"pip install ([^\n&]*)", text):
        assert "--constraint constraints.txt" in install or "--no-deps" in install, install
        for requirement in re.findall(r'"([^"]+)"', install):
            assert "==" in requirement, requirement
    torch = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None
    assert set(re.findall(r"torch==([\d.]+)", text)) == {torch.group(1)}


def test_the_build_context_has_what_is_copied_and_no_more() -> None:
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    copied: set[str] = set()
    for line in (line for stage in stages().values() for line in stage):
        if line.startswith("COPY ") and "--from" not in line:
            copied |= {part for part in line.split()[1:-1] if not part.startswith("--")}
    assert copied == allowed
    for path in copied:
        assert (ROOT / path).exists(), path


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_has_nothing_to_say() -> None:
    result = subprocess.run(["hadolint", str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_the_image_sets_only_what_the_commands_read() -> None:
    known = {env_of(name) for settings in (DoctorSettings, TargetSettings) for name in settings.model_fields}
    assert {name for name in image_environment() if name.startswith("DRAFT_ENGINE_")} <= known


def run_entry_point(tmp_path: Path, **environment: str) -> dict[str, str]:
    """What the server is given: its arguments, process id and environment."""
    program = tmp_path / "draft-engine"
    script = "import json, os, sys; print(json.dumps({**os.environ, 'ARGS': ' '.join(sys.argv[1:]), 'PID': str(os.getpid())}))"
    program.write_text(f"#!{sys.executable}\n{script}\n")
    program.chmod(0o755)
    process = subprocess.Popen(
        [str(DOCKER / "entrypoint.sh"), "serve", "--port", "0"],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **environment},
        stdout=subprocess.PIPE,
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    told = dict(json.loads(output))
    assert told["PID"] == str(process.pid), "the server is a child, so it would not get the signals"
    return told


def test_the_entry_point_reads_keys_from_files_and_becomes_the_server(tmp_path: Path) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_text("the key\n")
    other.write_text("the other key")
    told = run_entry_point(tmp_path, DRAFT_ENGINE_API_KEY_FILE=str(key), DRAFT_ENGINE_DRAFT_API_KEY_FILE=str(other))
    assert told["ARGS"] == "serve --port 0"
    assert (told["DRAFT_ENGINE_API_KEY"], told["DRAFT_ENGINE_DRAFT_API_KEY"]) == ("the key", "the other key")
    assert not [name for name in told if name.endswith("_FILE")]
    assert "DRAFT_ENGINE_API_KEY" not in run_entry_point(tmp_path)


def test_the_health_check_needs_no_key_and_sees_a_server_that_is_gone() -> None:
    def check(url: str) -> int:
        environment = {**os.environ, "DRAFT_ENGINE_PORT": url.rpartition(":")[2]}
        return subprocess.run([sys.executable, str(DOCKER / "healthcheck.py")], env=environment, check=False).returncode

    with serving(make_harness(), api_key="a key of eight") as server:
        assert check(server.url) == 0
    assert check(server.url) == 1


# The compose file ----------------------------------------------------------------------------------------------------


def test_the_compose_file_fits_the_schema_before_and_after_variables(document: dict[str, Any]) -> None:
    schema = json.loads((Path(__file__).parent / "compose_spec.json").read_text())
    validator = jsonschema.Draft7Validator(schema)
    for content in (yaml.safe_load(COMPOSE_FILE.read_text()), document):
        assert [error.message for error in validator.iter_errors(content)] == []


def test_every_profile_has_its_services(document: dict[str, Any]) -> None:
    profiles = {profile: list(services_of(document, profile)) for profile in ("cpu", "gpu", "monitoring")}
    assert profiles == {
        "cpu": ["draft", "target"],
        "gpu": ["draft-gpu", "vllm"],
        "monitoring": ["prometheus", "grafana"],
    }
    assert sum(map(len, profiles.values())) == len(document["services"])


def test_nothing_is_published_on_all_interfaces(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        assert published_port(service).address == "127.0.0.1", name
        assert service.get("network_mode") is None, name


def test_no_two_services_of_one_start_take_the_same_port(document: dict[str, Any]) -> None:
    for profile in ("cpu", "gpu"):
        services = [*services_of(document, profile).values(), *services_of(document, "monitoring").values()]
        ports = [published_port(service).port for service in services]
        assert len(set(ports)) == len(ports)


def test_a_target_waits_for_a_healthy_drafter_and_starts_without_one(document: dict[str, Any]) -> None:
    for target, draft in (("target", "draft"), ("vllm", "draft-gpu")):
        assert document["services"][target]["depends_on"] == {draft: {"condition": "service_healthy", "required": False}}
        assert "healthcheck" in document["services"][draft]


def test_no_secret_is_written_down_or_put_into_an_environment(document: dict[str, Any]) -> None:
    assert "a key of compose" not in json.dumps(document)
    assert document["secrets"] == {"api_key": {"environment": "DRAFT_ENGINE_API_KEY"}}
    for name, service in document["services"].items():
        secret = [key for key in service.get("environment", {}) if re.search(r"KEY$|PASSWORD$|TOKEN$", key)]
        assert secret in ([], ["VLLM_API_KEY"]), name
        assert service.get("environment", {}).get("VLLM_API_KEY", "") == ""


def test_images_of_others_have_fixed_versions(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        if not service["image"].startswith("draft-engine:"):
            assert FIXED_IMAGE.match(service["image"]), name


@pytest.mark.parametrize("name", ["draft", "target", "draft-gpu"])
def test_our_services_name_real_settings_and_stop_after_they_have_drained(document: dict[str, Any], name: str) -> None:
    service = document["services"][name]
    settings_class = TargetSettings if name == "target" else DoctorSettings
    known = {env_of(field) for field in settings_class.model_fields}
    for variable in service["environment"]:
        assert variable.removesuffix("_FILE") in known, variable
    drain = float(service["environment"].get("DRAFT_ENGINE_DRAIN_SECONDS", 0))
    assert float(service["stop_grace_period"].removesuffix("s")) > drain + 30
    assert service["init"] is True
    assert service["cap_drop"] == ["ALL"]
    dockerfile_target = service["build"]["target"]
    assert dockerfile_target in stages()
    assert service["image"].endswith(f"-{dockerfile_target}")


def test_the_configurations_that_are_named_exist_and_are_read(document: dict[str, Any]) -> None:
    for name in ("draft", "draft-gpu"):
        command = document["services"][name]["command"]
        assert command[:2] == ["serve", "--config"]
        file = ROOT / command[2].removeprefix("/")
        load_settings(DoctorSettings, {}, config=file)


def test_variables_are_put_in() -> None:
    assert load_compose({"DRAFT_PORT": "9100"})["services"]["draft"]["ports"] == ["127.0.0.1:9100:8100"]
    assert load_compose({"DRAFT_CONFIG": "kimi-k3"})["services"]["draft-gpu"]["command"][-1] == "/configs/kimi-k3.toml"


def test_a_variable_that_must_be_given_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text("name: ${NAME:?give it a name}")
    with pytest.raises(ComposeError, match="give it a name"):
        load_compose({}, tmp_path / "compose.yaml")


# Monitoring ----------------------------------------------------------------------------------------------------------


def exported_names() -> set[str]:
    """Every name that a query can use of what the draft server exports."""
    harness = make_harness()
    make_app(harness)
    names = set()
    for line in harness.metrics.exposition().decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bdraft_engine_\w+", expression))


def test_the_dashboard_asks_only_for_metrics_that_exist() -> None:
    exported = exported_names()
    for title, expression in dashboard_queries():
        assert names_in(expression), title
        assert names_in(expression) <= exported, title


def test_the_dashboard_shows_what_an_operator_asks_for() -> None:
    asked = set().union(*(names_in(expression) for _, expression in dashboard_queries()))
    for part in (
        "accepted_tokens_per_position_total", "verified_drafts_total", "queue_seconds_bucket", "forward_seconds_bucket",
        "free_pages", "session_errors_total", "calls_total", "evictions_total", "rows_restored_total", "warnings",
    ):  # fmt: skip
        assert f"draft_engine_{part}" in asked
    by = " ".join(expression for _, expression in dashboard_queries())
    assert {"by (position)", "by (context)", "by (coverage)"} <= set(re.findall(r"by \(\w+\)", by))


def test_the_dashboard_is_provisioned_with_its_data_source() -> None:
    dashboard = json.loads((GRAFANA / "dashboards/draft-engine.json").read_text())
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == source["uid"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    document = load_compose({})
    assert source["url"] == f"http://prometheus:{published_port(document['services']['prometheus']).container_port}"
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/draft-engine.yml").read_text())["providers"]
    mounts = [volume.split(":") for volume in document["services"]["grafana"]["volumes"]]
    assert ["./monitoring/grafana/dashboards", provider["options"]["path"], "ro"] in mounts


def test_no_two_panels_lie_over_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((GRAFANA / "dashboards/draft-engine.json").read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_prometheus_scrapes_the_draft_servers_of_the_compose_file_with_the_key() -> None:
    config = yaml.safe_load((DOCKER / "monitoring/prometheus.yml").read_text())
    services = load_compose({})["services"]
    for job in config["scrape_configs"]:
        for discovery in job["dns_sd_configs"]:
            for name in discovery["names"]:
                assert published_port(services[name]).container_port == discovery["port"]
    assert config["scrape_configs"][0]["authorization"]["credentials_file"] == "/run/secrets/api_key"
    assert services["prometheus"]["secrets"] == ["api_key"]
    mounted = [volume.split(":")[0] for volume in services["prometheus"]["volumes"]]
    for file in config["rule_files"]:
        assert f"./monitoring/{file}" in mounted


def test_the_alerts_ask_only_for_metrics_that_exist() -> None:
    groups = yaml.safe_load((DOCKER / "monitoring/rules.yml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        assert names_in(rule["expr"]) <= exported_names(), rule["alert"]
        assert rule["annotations"]["summary"]
