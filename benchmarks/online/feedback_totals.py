"""What a server says of its feedback stream."""

from collections import Counter

import httpx

from adaspec.monitor import parse


def feedback_totals(url: str) -> Counter[str]:
    """Feedback records so far by outcome, and the ``bytes`` that were sent."""
    scrape = parse(httpx.get(f"{url}/metrics/", timeout=30.0).text)
    outcomes = scrape.by("adaspec_feedback_records_total", "outcome")
    totals = Counter({outcome: round(count) for outcome, count in outcomes.items()})
    totals["bytes"] = round(scrape.total("adaspec_feedback_bytes_total"))
    return totals
