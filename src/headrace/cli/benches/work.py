"""Where a server says its time went."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from headrace.cli.api_client import ApiClient
from headrace.errors import StartError

FAMILY = "headrace_work_seconds"


def read_work(client: ApiClient) -> dict[str, float] | None:
    """Seconds since the server's start by kind, as `headrace_work_seconds_total` has them; None of a server that does not say."""
    try:
        with client.content("/metrics") as stream:
            text = stream.read().decode()
    except StartError:
        return None
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError:
        return None
    found = {sample.labels["kind"]: sample.value for family in families if family.name == FAMILY for sample in family.samples}
    return found or None


def work_between(before: dict[str, float] | None, after: dict[str, float] | None) -> dict[str, float] | None:
    """What was added; None where one of them is not known."""
    return {kind: seconds - before.get(kind, 0.0) for kind, seconds in after.items()} if before is not None and after is not None else None
