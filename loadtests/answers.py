"""Is an answer right? The checks of a quality set, over the text that came. Pure; the verdict uses them."""

import json
import re

from loadtests.records import OK, Record
from loadtests.workload import QualityItem


def is_right(item: QualityItem, answer: str) -> bool:
    """True when `answer` passes the item's check.

    exact: it is one of the expected texts, outer space apart. contains: one of them is a part of it, in any case of
    letters. regex: the pattern is found in it. json: it is one JSON object, with at least the expected keys.
    """
    text = answer.strip()
    if item.check == "exact":
        return text in item.expect
    if item.check == "contains":
        return any(part.lower() in text.lower() for part in item.expect)
    if item.check == "regex":
        return re.search(item.expect[0], text) is not None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and all(key in value for key in item.expect)


def verdict_on(record: Record, items: dict[str, QualityItem]) -> str:
    """met, wrong, or the status of a request that did not end ok."""
    if record.status != OK:
        return record.status
    return "met" if is_right(items[record.item], record.answer or "") else "wrong"
