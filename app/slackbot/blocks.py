"""Answers as Block Kit: small pure functions, within Slack's limits (:mod:`app.slackbot.limits`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from app.slackbot.asking import MAX_INPUT_CHARACTERS, Asked
from app.slackbot.service import ServiceRefused

Block = dict[str, Any]

MAX_TEXT = 3000
MAX_CODE = 2800
"""Of an override shown in the message; a longer one becomes a file."""
BAR = 24
GIB = 1 << 30

HEADLINES = {
    "recommended": "Does not fit: here is what does",
    "fits_already": "Fits already: look for another cause",
    "nothing_fits": "Nothing fits on these GPUs",
    "not_gpu_memory": "Not GPU memory",
    "needs_input": "Something is missing",
}

KEY_WORDS = (
    "An administrator can make one (`oombudsman keys create slack --scope recommend`) and start the bot with it as "
    "OOMBUDSMAN_SLACK_API_KEY."
)

IMPOSSIBLE = "This job cannot be laid out on these GPUs"


def clip(text: str, most: int = MAX_TEXT) -> str:
    """Not longer than Slack takes, and not empty, which it does not take either."""
    if not text:
        return "–"
    return text if len(text) <= most else text[: most - 1] + "…"


def escape(text: str) -> str:
    """Slack's three control characters."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def section(text: str) -> Block:
    return {"type": "section", "text": {"type": "mrkdwn", "text": clip(text)}}


def context(*texts: str) -> Block:
    return {"type": "context", "elements": [{"type": "mrkdwn", "text": clip(text, 2000)} for text in texts[:10]]}


def header(text: str) -> Block:
    return {"type": "header", "text": {"type": "plain_text", "text": clip(text, 150), "emoji": False}}


def button(text: str, action_id: str, value: str = "", url: str = "", style: str = "") -> Block:
    found: Block = {"type": "button", "text": {"type": "plain_text", "text": clip(text, 75)}, "action_id": action_id}
    if value:
        found["value"] = value
    if url:
        found["url"] = url
    if style:
        found["style"] = style
    return found


def code(text: str) -> str:
    return "```" + escape(text).replace("```", "'''") + "```"


def gib(num_bytes: float | None) -> str:
    return "not known" if num_bytes is None else f"{num_bytes / GIB:.1f} GiB"


def chance(probability: float | None) -> str:
    if probability is None:
        return "not known"
    if probability >= 0.9995:
        return "over 99.9 %"
    return "under 0.1 %" if probability < 0.0005 else f"{100 * probability:.3g} %"


def memory_bars(rows: Sequence[tuple[str, int]], usable: int) -> str:
    """Lines of blocks against the card: readable in a code block."""
    whole = max([usable, *(need for _, need in rows), 1])
    width = max(len(label) for label, _ in rows)
    lines = []
    for label, need in rows:
        full = round(BAR * need / whole)
        lines.append(f"{label:{width}}  {'█' * full}{'░' * (BAR - full)}  {gib(need)}")
    full = round(BAR * usable / whole)
    lines.append(f"{'card':{width}}  {'█' * full}{'░' * (BAR - full)}  {gib(usable)} usable")
    return "\n".join(lines)


def title_of(asked: Asked) -> str:
    name = asked.recipe or ("a configuration" if asked.config else "the job of this log")
    more = f" with {len(asked.overrides)} override(s)" if asked.overrides else ""
    return f"{name}{more} on {asked.num_gpus or '?'} x {asked.gpu or '?'}"


def looking(asked: Asked) -> tuple[str, list[Block]]:
    text = f"Looking at {escape(title_of(asked))} …"
    return text, [section(text)]


def answer_message(answer: Mapping[str, Any], title: str, pages_url: str, shown: int = 1) -> tuple[str, list[Block]]:
    """(text for notifications, blocks): the answer with recommendation number ``shown``."""
    outcome = str(answer.get("outcome"))
    problems = list(answer.get("problems") or ())[:3]
    headline = IMPOSSIBLE if problems and outcome == "needs_input" else HEADLINES.get(outcome, outcome)
    diagnosis = answer.get("diagnosis") or {}
    summary = str(diagnosis.get("summary") or headline)
    blocks = [header(headline), context(escape(title)), section(escape(summary))]
    for action in list((diagnosis.get("advice") or {}).get("actions") or ())[:3]:
        blocks.append(section(f"• {escape(str(action))}"))
    missing = [str(row.get("path")) for row in answer.get("missing") or ()][:10]
    if missing and headline != IMPOSSIBLE:
        blocks.append(section("Missing: " + ", ".join(f"`{escape(path)}`" for path in missing)))
    for problem in (one for one in problems if str(one.get("message")) not in summary):  # said once
        blocks.append(section(f"*{escape(str(problem.get('rule_id')))}* {escape(str(problem.get('message')))}"))
    recommendations = list(answer.get("recommendations") or ())
    if recommendations:
        shown = min(max(1, shown), len(recommendations))
        blocks += _recommendation(answer, recommendations, shown)
    blocks.append(_buttons(answer, len(recommendations), shown, pages_url))
    return clip(escape(f"{headline}: {title}"), 300), blocks[:50]


def _recommendation(answer: Mapping[str, Any], recommendations: Sequence[Mapping[str, Any]], shown: int) -> list[Block]:
    chosen = recommendations[shown - 1]
    current = answer.get("current") or {}
    rows = [("now", int(current["required_bytes"]))] if current.get("required_bytes") else []
    rows.append(("then", int(chosen["estimate"]["required_bytes"])))
    usable = int(chosen["estimate"]["usable_bytes"])
    step = chosen.get("relative_step_time")
    cost = "step time not known" if step is None else f"step time {step:.2f}x"
    facts = (
        f"{cost} · fits: {chance(chosen.get('fit_probability'))} · {gib(chosen.get('headroom_bytes'))} to spare · "
        f"checkpoints {'have to be converted' if chosen['checkpoint']['conversion_needed'] else 'load as they are'}"
    )
    blocks: list[Block] = [
        {"type": "divider"},
        section(f"*{shown} of {len(recommendations)}: {escape(str(chosen['title']))}*\n{escape(facts)}"),
        section(code(memory_bars(rows, usable))),
    ]
    text = override_text(chosen)
    if len(escape(text)) <= MAX_CODE:
        blocks.append(section(code(text)))
    else:
        blocks.append(section("The override is long: it is attached as a file in this thread."))
    for warning in list(chosen.get("warnings") or ())[:5]:
        blocks.append(context(f":warning: {escape(str(warning.get('text')))}"))
    return blocks


def override_text(recommendation: Mapping[str, Any]) -> str:
    """The Python form, with what has to be exported before it."""
    override = recommendation["override"]
    env = override.get("env") or {}
    lines = [f"# unset {name}" if value is None else f"# export {name}={value}" for name, value in env.items()]
    return "\n".join([*lines, str(override.get("python") or override.get("cli") or "").rstrip()])


def needs_file(recommendation: Mapping[str, Any]) -> bool:
    return len(escape(override_text(recommendation))) > MAX_CODE


def _buttons(answer: Mapping[str, Any], count: int, shown: int, pages_url: str) -> Block:
    identity = str(answer["id"])
    elements = []
    if count > 1:
        following = shown % count + 1
        elements.append(button("Next alternative", "next_alternative", json.dumps([identity, following])))
    elements.append(button("Full report", "full_report", url=f"{pages_url}/r/{identity}"))
    if count:
        elements.append(button("It ran", "it_ran", json.dumps([identity, shown]), style="primary"))
    if answer.get("outcome") in ("recommended", "fits_already", "nothing_fits"):  # else nothing was predicted to run
        elements.append(button("It OOMed again", "it_oomed", json.dumps([identity, shown if count else 0])))
    return {"type": "actions", "elements": elements}


def refused_message(refused: ServiceRefused, asked: Asked) -> tuple[str, list[Block]]:
    """What the service refused, field by field, with what would be right; and a way back into the form."""
    if refused.status in (401, 403):
        text = "The service refuses the bot's API key. " + KEY_WORDS
        return text, [section(text), _again(asked)]
    lines = []
    for path, message, suggestion in refused.errors[:8]:
        more = f" ({escape(suggestion)})" if suggestion else ""
        lines.append(f"• `{escape(path)}` {escape(message)}{more}")
    if not lines:
        lines.append(f"• {escape(str(refused))}")
    lead = "This job cannot be answered:" if refused.status < 500 else "The service failed on this job:"
    blocks = [section(f"*{escape(title_of(asked))}*\n{lead}\n" + "\n".join(lines)), _again(asked)]
    return "This job cannot be answered", blocks


def down_message(asked: Asked | None) -> tuple[str, list[Block]]:
    text = "The Oombudsman service does not answer right now. Nothing was lost: try again in a moment."
    blocks = [section(text)]
    if asked is not None:
        blocks.append(_again(asked))
    return text, blocks


def failed_message(words: str) -> tuple[str, list[Block]]:
    return escape(words), [section(escape(words))]


def _again(asked: Asked) -> Block:
    return {"type": "actions", "elements": [button("Open the form", "open_form", packed(asked, 1900))]}


def read_message(answer: Mapping[str, Any], asked: Asked) -> tuple[str, list[Block]]:
    """What was read in a thread, where more is needed to answer."""
    missing = [str(row.get("path")) for row in answer.get("missing") or ()][:8]
    summary = escape(str(answer.get("summary") or ""))
    blocks = [section(summary)] if summary else []
    for cause in list(answer.get("causes") or ())[:3]:
        share = f"{100 * float(cause.get('confidence') or 0):.0f} %"
        blocks.append(context(f"*{escape(str(cause.get('cause')).replace('_', ' '))}* ({share}): "
                              f"{escape(str(cause.get('evidence')))}"))  # fmt: skip
    if missing:
        blocks.append(section("To recommend settings I still need: " + ", ".join(f"`{escape(p)}`" for p in missing)))
    blocks.append(_again(asked))
    return clip(summary or "Read", 300), blocks


def packed(asked: Asked, most: int) -> str:
    """A form in a button or a modal, without its long parts if they do not fit."""
    values: dict[str, Any] = {
        "r": asked.recipe[:200],
        "g": asked.gpu[:100],
        "n": asked.num_gpus[:10],
        "o": "\n".join(asked.overrides),
        "e": asked.evidence_id[:80],
        "t": asked.text,
    }
    for name in ("t", "o"):
        if len(json.dumps(values)) > most:
            values[name] = ""
    return json.dumps(values)


def unpacked(text: str) -> Asked:
    try:
        values = json.loads(text)
        return Asked(
            recipe=str(values["r"]),
            gpu=str(values["g"]),
            num_gpus=str(values["n"]),
            overrides=tuple(line for line in str(values["o"]).split("\n") if line),
            evidence_id=str(values["e"]),
            text=str(values["t"]),
        )
    except (ValueError, KeyError, TypeError):
        return Asked()


def _input(
    block_id: str, label: str, value: str, *, multiline: bool = False, hint: str = "", optional: bool = True
) -> Block:
    element: Block = {"type": "plain_text_input", "action_id": "value", "multiline": multiline}
    if value:
        element["initial_value"] = value[:MAX_INPUT_CHARACTERS]
    found: Block = {
        "type": "input",
        "block_id": block_id,
        "optional": optional,
        "label": {"type": "plain_text", "text": label},
        "element": element,
    }
    if hint:
        found["hint"] = {"type": "plain_text", "text": clip(hint, 2000)}
    return found


def form_view(asked: Asked, place: Mapping[str, Any], notes: Sequence[str] = ()) -> dict[str, Any]:
    """The modal. ``place``: channel and thread where the answer goes, and what else has to come back."""
    blocks = [section(escape(note)) for note in notes[:5]]
    if asked.evidence_id:
        blocks.append(context("A file of this message was read; it goes with the form."))
    blocks += [
        _input(
            "recipe", "Recipe", asked.recipe, hint="As Megatron-Bridge names it, for example llama3_8b_pretrain_config"
        ),
        _input("gpu", "GPU", asked.gpu, hint="For example h100-80gb", optional=False),
        _input("num_gpus", "Number of GPUs of the whole job", asked.num_gpus, optional=False),
        _input(
            "overrides",
            "Overrides",
            "\n".join(asked.overrides),
            multiline=True,
            hint="One a line: a.b=c or cfg.a.b = c",
        ),
        _input("text", "Error text or end of the log", asked.text, multiline=True),
    ]
    kept = {**place, "evidence_id": asked.evidence_id}
    return {
        "type": "modal",
        "callback_id": "oom_form",
        "title": {"type": "plain_text", "text": "Out of memory"},
        "submit": {"type": "plain_text", "text": "Find what fits"},
        "close": {"type": "plain_text", "text": "Cancel"},
        "private_metadata": json.dumps(kept)[:3000],
        "blocks": blocks,
    }


def loading_view(place: Mapping[str, Any]) -> dict[str, Any]:
    """Opened at once, while the message and its files are read."""
    return {
        "type": "modal",
        "callback_id": "oom_loading",
        "title": {"type": "plain_text", "text": "Out of memory"},
        "close": {"type": "plain_text", "text": "Cancel"},
        "private_metadata": json.dumps(dict(place))[:3000],
        "blocks": [section("Reading the message and its files …")],
    }


def outcome_view(place: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "modal",
        "callback_id": "oom_outcome",
        "title": {"type": "plain_text", "text": "It OOMed again"},
        "submit": {"type": "plain_text", "text": "Report"},
        "close": {"type": "plain_text", "text": "Cancel"},
        "private_metadata": json.dumps(dict(place))[:3000],
        "blocks": [
            _input("text", "Its error text", "", multiline=True, optional=False),
            _input("peak", "Peak in GiB, if you know it", ""),
        ],
    }
