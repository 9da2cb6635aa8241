"""The files under deploy/: they parse, name what exists, and keep what they promise. None of it needs Docker."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nucleate.cli.argument_parser import Configuration
from nucleate.cli.main import command_parser
from nucleate.outputs import EngineStats
from nucleate.server.limits import ServerLimits
from nucleate.server.metrics import Metrics

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text("utf-8"))
UNIT = (DEPLOY / "nucleate.service").read_text("utf-8")
PROGRAM = "/opt/nucleate/bin/nucleate"


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, with continued lines joined and without comments."""
    text = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(name, " ".join(rest.split())) for name, _, rest in pairs]


def values_of(name: str) -> list[str]:
    return [rest for kind, rest in instructions() if kind == name]


def check_environment(variables: dict[str, str]) -> None:
    """Every variable of ours is one that the server reads, with a valid value."""
    parser = command_parser("serve")
    Configuration([], variables).parse(parser, [])
    flags = {flag for action in parser.actions for flag in action.option_strings}
    for name in variables.keys() - {"NUCLEATE_CACHE", "NUCLEATE_API_KEYS"}:
        prefix, _, rest = name.partition("_")
        assert prefix != "NUCLEATE" or f"--{rest.lower().replace('_', '-')}" in flags


def test_the_dockerfile_copies_files_that_exist_and_are_not_ignored() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    assert ignored[0] == "*"
    for copy in values_of("COPY"):
        *sources, _ = [word for word in copy.split() if not word.startswith("--")]
        if "--from=" not in copy:
            for source in sources:
                assert (ROOT / source).exists()
                assert f"!{source}" in ignored
    assert not values_of("ADD")


def test_the_dockerfile_has_pinned_images_a_user_and_a_health_check() -> None:
    images = [image.split()[0] for image in values_of("FROM")]
    assert len(set(images)) == 1  # the virtual environment links to the interpreter
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", images[0])
    assert values_of("USER") == ["nucleate"]
    last = [name for name, _ in instructions()].index("USER")
    assert not [1 for name, _ in instructions()[last:] if name in ("RUN", "COPY")]
    [check] = values_of("HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "HEALTHCHECK", "exec")
    assert "/health" in command[2]
    assert [json.loads(values_of(name)[0]) for name in ("ENTRYPOINT", "CMD")] == [["nucleate"], ["serve"]]
    assert any("nucleate warm" in step for step in values_of("RUN"))


def test_the_kernels_are_where_the_server_looks_for_them() -> None:
    copied = [line.split()[-1] for line in values_of("COPY") if "--chown=nucleate" in line]
    assert len(copied) == 1
    [step] = [step for step in values_of("RUN") if "nucleate warm" in step]
    [variable] = [word for line in values_of("ENV") for word in line.split() if word.startswith("NUCLEATE_CACHE=")]
    assert variable == f"NUCLEATE_CACHE={copied[0]}" == step.split()[0]
    assert not any(line.endswith(" /opt/nucleate") and copied[0].startswith("/opt") for line in values_of("COPY"))


def test_the_variables_of_the_dockerfile() -> None:
    words = [word for line in values_of("ENV") for word in line.split()]
    check_environment(dict(word.split("=", 1) for word in words))


@pytest.mark.parametrize("step", values_of("RUN"), ids=lambda step: step[:30])
def test_the_steps_of_the_dockerfile_are_valid_shell(step: str) -> None:
    subprocess.run(["sh", "-n", "-c", step], check=True)


def test_the_extra_exists() -> None:
    extras = (ROOT / "pyproject.toml").read_text("utf-8").partition("[project.optional-dependencies]")[2]
    assert re.search(rf"^{values_of('ARG')[0].partition('=')[2]} = ", extras, re.MULTILINE)


def test_the_example_configuration() -> None:
    file = DEPLOY / "nucleate.yaml"
    options = ["--config", str(file)]
    found = Configuration(options, {}).parse(command_parser("serve"), options)
    assert (found.host, found.port, found.max_num_seqs, found.log_format) == ("127.0.0.1", 8000, 64, "json")
    keys = re.findall(r"^# ([a-z-]+): ", file.read_text("utf-8"), re.MULTILINE)
    assert {"model", "uds", "api-key-file", "ssl-certfile", "ssl-keyfile"} == set(keys)
    flags = {flag for action in command_parser("serve").actions for flag in action.option_strings}
    assert {f"--{key}" for key in keys} <= flags


def test_the_compose_file() -> None:
    services = COMPOSE["services"]
    assert services.keys() == {"nucleate", "prometheus", "grafana"}
    build = services["nucleate"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    check_environment(services["nucleate"]["environment"])
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        if "image" in service:
            assert re.fullmatch(r"[\w/.-]+:v?\d+\.\d+\.\d+", service["image"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]
    seconds = int(services["nucleate"]["stop_grace_period"].removesuffix("s"))
    assert seconds > ServerLimits().shutdown_timeout_seconds


KUBERNETES = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8"))}
POD = KUBERNETES["Deployment"]["spec"]["template"]["spec"]


def test_the_kubernetes_deployment() -> None:
    [container] = POD["containers"]
    check_environment({variable["name"]: variable["value"] for variable in container["env"]})
    [port] = container["ports"]
    assert port == {"name": "http", "containerPort": 8000}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    needed = int(seconds) + ServerLimits().shutdown_timeout_seconds
    assert needed + 10 <= POD["terminationGracePeriodSeconds"]
    user = next(step for step in values_of("RUN") if "useradd" in step)
    assert f"--uid {POD['securityContext']['runAsUser']} " in user
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}
    keys = next(v["value"] for v in container["env"] if v["name"] == "NUCLEATE_API_KEY_FILE")
    assert "/models" in next(line for line in values_of("ENV") if "HF_HOME=/models" in line)
    assert keys.rpartition("/")[0] in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_kubernetes_objects_select_the_pods() -> None:
    labels = KUBERNETES["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert KUBERNETES["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert KUBERNETES["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert KUBERNETES["Service"]["spec"]["selector"] == labels
    assert KUBERNETES["Service"]["metadata"]["labels"] == labels  # the ServiceMonitor of the guide selects them
    [port] = KUBERNETES["Service"]["spec"]["ports"]
    assert port["targetPort"] == POD["containers"][0]["ports"][0]["name"] == port["name"]


def test_the_yaml_of_the_guides() -> None:
    for name in ("kubernetes", "monitor_a_server"):
        page = (ROOT / "docs" / "how-to" / f"{name}.md").read_text("utf-8")
        found = [yaml.safe_load(code) for code in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
        assert len(found) == 2
        if name == "kubernetes":
            probe, monitor = found
            assert probe == {"startupProbe": POD["containers"][0]["startupProbe"]}
            assert monitor["spec"]["selector"]["matchLabels"] == KUBERNETES["Service"]["metadata"]["labels"]
            [endpoint] = monitor["spec"]["endpoints"]
            assert endpoint["authorization"]["credentials"]["name"] == POD["volumes"][2]["secret"]["secretName"]


def test_the_metrics_of_the_guides_exist() -> None:
    known = emitted()
    for name in ("kubernetes", "monitor_a_server", "size_the_kv_cache", "speculative_decoding"):
        page = (ROOT / "docs" / "how-to" / f"{name}.md").read_text("utf-8")
        metrics = {name for name in re.findall(r"\b(?:nucleate|vllm:)_?\w+", page) if not name.endswith("_")}
        assert metrics & known.keys()
        assert metrics <= known.keys()


def test_prometheus_and_grafana_reach_each_other() -> None:
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text("utf-8"))
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": ["nucleate:8000"]}]
    assert COMPOSE["services"]["nucleate"]["environment"]["NUCLEATE_ALLOWED_HOST"] == "nucleate"
    [source] = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text("utf-8"))["datasources"]
    [variable] = [each for each in DASHBOARD["templating"]["list"] if each["type"] == "datasource"]
    assert variable["current"]["value"] == source["uid"]
    [provider] = yaml.safe_load((DEPLOY / "grafana" / "provider.yaml").read_text("utf-8"))["providers"]
    folders = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"] if ".json" in volume]
    assert folders == [f"{provider['options']['path']}/nucleate.json"]


def emitted() -> dict[str, set[str]]:
    """The labels of each metric that the server emits."""
    metrics = Metrics("m", lambda: EngineStats(*(0,) * 14))
    metrics.count_request("/v1/completions", 200, 0.1)
    found: dict[str, set[str]] = {}
    for family in metrics.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[str]:
    variables = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    return variables + [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_uses_only_metrics_and_labels_that_exist() -> None:
    known = emitted()
    assert len(expressions()) > 25
    for expression in expressions():
        names = re.findall(r"\bnucleate_\w+", expression)
        assert names
        labels = set.union(*(known[name] for name in names))  # a KeyError: no such metric
        assert set(re.findall(r"by \(([^)]*)\)", expression)) <= {"", "le", "kind", "finish_reason", "route, status"}
        for group in re.findall(r"by \(([^)]+)\)", expression):
            assert set(group.split(", ")) <= labels
        assert expression.count("(") == expression.count(")")
        for name in names:  # counters and histograms are read as rates
            if name.endswith(("_total", "_bucket")):
                assert f"rate({name}{{" in expression


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    legends = [target["legendFormat"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    assert all(legends)


def settings(section: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    body = UNIT.partition(f"[{section}]\n")[2].partition("\n[")[0]
    for line in body.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_the_unit() -> None:
    service: Any = settings("Service")
    [start] = service["ExecStart"]
    assert start == f"{PROGRAM} serve --config /etc/nucleate/nucleate.yaml"
    assert service["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert int(service["TimeoutStopSec"][0]) > ServerLimits().shutdown_timeout_seconds
    assert service["User"] == ["nucleate"]
    assert service["MemoryDenyWriteExecute"] == ["no"]  # kernels are loaded as machine code


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "nucleate.service"
    unit.write_text(UNIT.replace(PROGRAM, sys.executable))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert [line for line in verified.stderr.splitlines() if "nucleate.service" in line] == []
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", unit]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout[-300:] + checked.stderr
