"""What a route's body calls the fields that a turn is made of, for the errors that name them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFields:
    """{} stands for a tool's index."""

    messages: str = "messages"
    tools: str = "tools"
    tool_name: str = "tools[{}].function.name"
    tool_parameters: str = "tools[{}].function.parameters"
    tool_choice: str = "tool_choice"
    budget: str = "thinking_token_budget"
    effort: str = "reasoning_effort"
