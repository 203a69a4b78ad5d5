"""Slack's limits for blocks and views, checked on what the bot makes (tests do; so does the bot before it sends).

Figures: Slack's Block Kit reference, read in 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MESSAGE_BLOCKS, VIEW_BLOCKS = 50, 100
TEXT_LIMITS = {
    "section": 3000,
    "header": 150,
    "button": 75,
    "label": 2000,
    "hint": 2000,
    "context": 2000,
    "view title": 24,
    "view button": 24,
}
BUTTON_VALUE, BUTTON_URL, ACTION_ID, BLOCK_ID = 2000, 3000, 255, 255
ACTION_ELEMENTS, CONTEXT_ELEMENTS = 25, 10
PRIVATE_METADATA, INITIAL_VALUE = 3000, 3000
MESSAGE_TEXT = 40_000


def problems_of_blocks(blocks: Sequence[Mapping[str, Any]], most: int = MESSAGE_BLOCKS) -> list[str]:
    """What Slack would refuse; empty when nothing."""
    found = [] if 0 < len(blocks) <= most else [f"{len(blocks)} blocks"]
    ids = [block["block_id"] for block in blocks if "block_id" in block]
    if len(ids) != len(set(ids)):
        found.append("a block_id stands twice")
    for number, block in enumerate(blocks):
        found += [f"block {number}: {text}" for text in _of_block(block)]
    return found


def problems_of_view(view: Mapping[str, Any]) -> list[str]:
    found = problems_of_blocks(view["blocks"], VIEW_BLOCKS)
    found += _text(view["title"], "view title")
    for name in ("submit", "close"):
        if name in view:
            found += _text(view[name], "view button")
    if len(view.get("private_metadata", "")) > PRIVATE_METADATA:
        found.append("private_metadata is too long")
    if any(block["type"] == "input" for block in view["blocks"]) and "submit" not in view:
        found.append("a view with inputs needs submit")
    return found


def _of_block(block: Mapping[str, Any]) -> list[str]:
    kind = block["type"]
    if kind == "section":
        return _text(block["text"], "section")
    if kind == "header":
        plain = [] if block["text"]["type"] == "plain_text" else ["a header takes plain_text"]
        return plain + _text(block["text"], "header")
    if kind == "context":
        many = [] if 0 < len(block["elements"]) <= CONTEXT_ELEMENTS else ["elements of a context"]
        return many + [p for element in block["elements"] for p in _text(element, "context")]
    if kind == "actions":
        many = [] if 0 < len(block["elements"]) <= ACTION_ELEMENTS else ["elements of actions"]
        ids = [element["action_id"] for element in block["elements"]]
        twice = [] if len(ids) == len(set(ids)) else ["an action_id stands twice"]
        return many + twice + [p for element in block["elements"] for p in _of_button(element)]
    if kind == "input":
        return _of_input(block)
    return [] if kind == "divider" else [f"unknown type {kind}"]


def _of_button(element: Mapping[str, Any]) -> list[str]:
    found = _text(element["text"], "button")
    if element["text"]["type"] != "plain_text":
        found.append("a button takes plain_text")
    if len(element.get("value", "")) > BUTTON_VALUE or len(element.get("url", "")) > BUTTON_URL:
        found.append("value or url of a button is too long")
    return found


def _of_input(block: Mapping[str, Any]) -> list[str]:
    found = _text(block["label"], "label")
    if "hint" in block:
        found += _text(block["hint"], "hint")
    if len(block["element"].get("initial_value", "")) > INITIAL_VALUE:
        found.append("initial_value is too long")
    return found


def _text(text: Mapping[str, Any], what: str) -> list[str]:
    length = len(text["text"])
    return [] if 0 < length <= TEXT_LIMITS[what] else [f"text of {what} has {length} characters"]
