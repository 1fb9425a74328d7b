"""Write the Grafana dashboard, deploy/grafana/coordexp.json, from the list of its panels.

python tools/dashboard.py
"""

import json
from pathlib import Path

FILE = Path(__file__).parents[1] / "deploy/grafana/coordexp.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RUN, SERVER = '{run=~"$run"}', '{instance=~"$server"}'

# Title, unit, and queries with their legends; the width of a row is 24.
STATES = [
    ("Running", "bool_yes_no", [(f"coordexp_learner_running{RUN}", "{{run}}")]),
    ("Step", "none", [(f"coordexp_learner_step{RUN}", "{{run}}")]),
    ("Share done", "percentunit", [(f"coordexp_learner_step{RUN} / coordexp_learner_max_steps{RUN}", "{{run}}")]),
    (
        "Since the latest step",
        "s",
        [(f"time() - coordexp_learner_last_step_timestamp_seconds{RUN}", "{{run}}")],
    ),
    ("Servers with the latest weights", "none", [(f"coordexp_learner_servers{RUN}", "{{run}}")]),
    ("Servers that answer", "none", [(f'sum(up{{job="coordexp", {SERVER[1:]})', "servers")]),
]
CURVES = [
    ("Loss", "none", [(f"coordexp_learner_loss{RUN}", "{{run}}")]),
    ("Samples per second", "none", [(f"rate(coordexp_learner_samples_total{RUN}[5m])", "{{run}}")]),
    (
        "Rollouts of rank 0 per second",
        "none",
        [
            (f"rate(coordexp_learner_rollouts_total{RUN}[5m])", "made, {{run}}"),
            (f"rate(coordexp_learner_rollouts_lost_total{RUN}[5m])", "lost, {{run}}"),
        ],
    ),
    ("Failed weight syncs", "none", [(f"increase(coordexp_learner_syncs_failed_total{RUN}[5m])", "{{run}}")]),
    (
        "Generated tokens per second",
        "none",
        [(f"rate(coordexp_generated_tokens_total{SERVER}[1m])", "{{instance}}")],
    ),
    (
        "Requests per second, by outcome",
        "none",
        [(f"sum by (instance, outcome) (rate(coordexp_requests_total{SERVER}[1m]))", "{{outcome}}, {{instance}}")],
    ),
    ("Running requests", "none", [(f"coordexp_running_requests{SERVER}", "{{instance}}")]),
    (
        "Seconds of a call",
        "s",
        [
            (
                f"histogram_quantile({share}, sum by (le) (rate(coordexp_infer_seconds_bucket{SERVER}[5m])))",
                f"{share:.0%} are faster",
            )
            for share in (0.5, 0.95)
        ],
    ),
    (
        "Seconds of a weight update",
        "s",
        [
            (
                f"rate(coordexp_update_seconds_sum{SERVER}[5m]) / rate(coordexp_update_seconds_count{SERVER}[5m])",
                "{{instance}}",
            )
        ],
    ),
    (
        "Weight updates, by outcome",
        "none",
        [
            (
                f"sum by (instance, outcome) (increase(coordexp_updates_total{SERVER}[5m]))",
                "{{outcome}}, {{instance}}",
            )
        ],
    ),
    ("Weights received per second", "Bps", [(f"rate(coordexp_update_bytes_total{SERVER}[5m])", "{{instance}}")]),
    (
        "KV cache in use",
        "percentunit",
        [(f"vllm:kv_cache_usage_perc{SERVER}", "{{instance}}, engine {{engine}}")],
    ),
    (
        "Requests that wait in vLLM",
        "none",
        [(f"vllm:num_requests_waiting{SERVER}", "{{instance}}, engine {{engine}}")],
    ),
]


def make_dashboard() -> dict:
    """Return the dashboard: a row of states, then curves, three to a row."""
    panels = [
        _panel("stat", number, *panel, {"h": 4, "w": 4, "x": 4 * number, "y": 0})
        for number, panel in enumerate(STATES)
    ]
    panels += [
        _panel(
            "timeseries",
            len(STATES) + number,
            *panel,
            {"h": 8, "w": 8, "x": 8 * (number % 3), "y": 4 + 8 * (number // 3)},
        )
        for number, panel in enumerate(CURVES)
    ]
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "title": "coordexp",
        "uid": "coordexp",
        "tags": ["coordexp"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                source,
                _variable("run", "Run", "label_values(coordexp_learner_running, run)"),
                _variable("server", "Server", "label_values(coordexp_running_requests, instance)"),
            ]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def _variable(name: str, label: str, query: str) -> dict:
    common = {
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }
    return {"name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query, **common}


def _panel(kind: str, number: int, title: str, unit: str, queries: list[tuple[str, str]], place: dict) -> dict:
    targets = [
        {"refId": chr(65 + index), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        for index, (expression, legend) in enumerate(queries)
    ]
    panel = {
        "id": number + 1,
        "type": kind,
        "title": title,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": targets,
    }
    defaults = {"unit": unit, "min": 0} if title != "Loss" else {"unit": unit}
    options = (
        {"reduceOptions": {"calcs": ["lastNotNull"]}} if kind == "stat" else {"legend": {"displayMode": "list"}}
    )
    return panel | {"fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}


if __name__ == "__main__":
    FILE.write_text(json.dumps(make_dashboard(), indent=1) + "\n")
    print(f"wrote {FILE}")
