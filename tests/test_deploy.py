"""What operators import: the Grafana dashboard and the alert rules name metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCUMENTED = (ROOT / "docs" / "metrics.md").read_text()
SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def unknown(expressions: list[str]) -> set[str]:
    names = {n for text in expressions for n in re.findall(r"\badaspec_[a-z_]+", text)}
    assert names
    return {n for n in names if f"`{SUFFIX.sub('', n)}`" not in DOCUMENTED}


def balanced(text: str) -> bool:
    return all(text.count(a) == text.count(b) for a, b in ("()", "{}", "[]"))


def test_the_dashboard_reads_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    panels = dashboard["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    expressions += [mark["expr"] for mark in dashboard["annotations"]["list"]]
    assert unknown(expressions) == set()
    assert all(balanced(text) and "$instance" in text for text in expressions)
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in panels]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_alerts_read_metrics_that_exist_and_say_what_to_do() -> None:
    (group,) = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
    rules = group["rules"]
    assert unknown([rule["expr"] for rule in rules]) == set()
    for rule in rules:
        assert balanced(rule["expr"])
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert len(rule["annotations"]["description"]) > 20
    assert len({rule["alert"] for rule in rules}) == len(rules)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus's promtool")
def test_prometheus_takes_the_alerts() -> None:
    rules = str(ROOT / "deploy" / "alerts.yml")
    done = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "9 rules found" in done.stdout
