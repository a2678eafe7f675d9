"""Chat messages to the text, and the ids, that a model is given."""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta

from headrace.errors import InvalidRequest, ModelLoadError
from headrace.text.call_history import CallHistory
from headrace.text.chat_messages import normalize_messages
from headrace.text.template_sandbox import TemplateEnvironment, TemplateLimit
from headrace.text.tokenizer import Tokenizer, replace_surrogates
from headrace.text.tool_prompt import tools_as_text

MAX_TEMPLATE_CHARS = 1_000_000
MAX_DEPTH = 100  # of objects in messages and tools
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"})


class _UserText:
    """Keeps the text of control tokens that users write apart from the template's own, for one rendering.

    In what users supply each such text is replaced by an alias that only this rendering knows. An alias is made of digits: those survive
    trim, replace, split, upper and JSON.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._nonce = f"{secrets.randbits(128):039d}"
        self._tokens = tokenizer.special_tokens
        self._pattern = tokenizer.control_pattern
        self._texts = {token_id: text for text, token_id in self._tokens.items()}
        self._alias = re.compile(rf"{self._nonce}(\d{{8}})")

    def hide(self, value: Any, param: str, depth: int = 0) -> Any:
        """A copy of a JSON value with aliases in all its strings."""
        if isinstance(value, str):
            text = replace_surrogates(value)
            return self._pattern.sub(lambda match: f"{self._nonce}{self._tokens[match[0]]:08d}", text) if self._pattern else text
        if value is None or isinstance(value, bool | int | float):
            return value
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{param} is nested deeper than {MAX_DEPTH} levels.", param=param)
        if isinstance(value, Mapping):
            return {self.hide(key, param): self.hide(item, param, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item, param, depth + 1) for item in value]
        raise InvalidRequest(f"{param} must hold JSON values only, not {type(value).__name__}.", param=param)

    def segments(self, rendered: str) -> list[tuple[str, bool]]:
        """The rendered text in parts: (text, whether control tokens in it are meant as such)."""
        parts = self._alias.split(rendered)  # text, id, text, id, ..., text
        return [(self._texts[int(part)], False) if index % 2 else (part, True) for index, part in enumerate(parts)]

    def restore(self, rendered: str) -> str:
        return "".join(text for text, _ in self.segments(rendered))


class ChatTemplate:
    """The chat template of a model, or none. Threads may share it.

    `template` is jinja source in the dialect of transformers. Raises `ModelLoadError` if it is too long or not valid.
    """

    def __init__(self, template: str | None, tokenizer: Tokenizer) -> None:
        self.source = template
        self._tokenizer = tokenizer
        self._environment = TemplateEnvironment()
        self._template: jinja2.Template | None = None
        self.variables: frozenset[str] = frozenset()  # what the template reads
        self.supports_tools = False  # whether the template writes the tools it is given; else they become text before it
        self._knows_developer = template is not None and "developer" in template
        if template is None:
            return
        if len(template) > MAX_TEMPLATE_CHARS:
            raise ModelLoadError(f"The chat template has more than {MAX_TEMPLATE_CHARS} characters.")
        try:
            self._template = self._environment.from_string(template)
            self.variables = frozenset(meta.find_undeclared_variables(self._environment.parse(template)))
            self.supports_tools = "tools" in self.variables
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"The chat template is not valid: line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise ModelLoadError("The chat template is nested too deeply.") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, as `render_ids` turns it into ids; for people to read."""
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return "".join(text for text, _ in self._segments(messages, kwargs=kwargs, **options))

    def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation. Only the template's own control tokens become such; in messages, tools and kwargs their text is text.
        No start token is added: the template writes it where the model wants one.

        `add_generation_prompt` opens the assistant's turn; `continue_final_message` leaves the last message open instead. `kwargs` are
        more variables for the template. Raises `InvalidRequest`, which names the field, for messages that the template refuses.
        """
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return self._tokenizer.encode_segments(self._segments(messages, kwargs=kwargs, **options))

    def _segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any,
        add_generation_prompt: Any,
        continue_final_message: Any,
        kwargs: Mapping[str, Any] | None,
    ) -> list[tuple[str, bool]]:
        if self._template is None:
            raise InvalidRequest("This model has no chat template. Start the server with --chat-template, or use /v1/completions.", param="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message leaves the last turn open and add_generation_prompt opens a new one; set only one of them.",
                param="continue_final_message",
            )
        for name in kwargs or {}:
            if name in _OWN_VARIABLES or name in self._tokenizer.named_tokens:
                raise InvalidRequest(f"chat_template_kwargs must not set {name}.", param="chat_template_kwargs")

        user = _UserText(self._tokenizer)
        turns = [
            # A role that templates compare with stays as it is, even if some tokenizer has a control token of that text.
            {key: value if key == "role" and value in _ROLES else user.hide(value, "messages", 1) for key, value in message.items()}
            for message in normalize_messages(messages, knows_developer=self._knows_developer)
        ]
        tools = user.hide(tools, "tools") or None
        if not self.supports_tools:
            turns, tools = tools_as_text(turns, tools), None
        elif any("tool_calls" in turn for turn in turns):
            turns = [self._history.fit(turn) for turn in turns]
        variables = {
            "documents": None,
            **self._tokenizer.named_tokens,
            **user.hide(dict(kwargs or {}), "chat_template_kwargs"),
            "messages": turns,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        if not continue_final_message:
            return user.segments(self._run(variables, user))
        # The trailing space tells whether the template trims: then it would have trimmed the message's own end too.
        tag = f"{secrets.randbits(128):039d}"
        turns[-1]["content"] += tag + " "
        rendered, found, rest = self._run(variables, user).rpartition(tag)
        if not found:
            raise InvalidRequest("The chat template does not write the last message, so it cannot be continued.", param="continue_final_message")
        return user.segments(rendered if rest.startswith(" ") else rendered.rstrip())

    @functools.cached_property
    def _history(self) -> CallHistory:
        """What the template takes of earlier calls."""
        return CallHistory.probe(self._render_plain, self.source or "")

    def _render_plain(self, messages: list[dict[str, Any]]) -> str | None:
        """The text of messages of our own, or None where the template fails."""
        variables = {**self._tokenizer.named_tokens, "messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return self._run(variables, _UserText(self._tokenizer))
        except InvalidRequest:
            return None

    def _run(self, variables: dict[str, Any], user: _UserText) -> str:
        assert self._template is not None
        self._environment.start_rendering()
        try:
            return self._template.render(variables)
        except TemplateLimit as error:
            raise InvalidRequest(f"The chat template was stopped: {user.restore(str(error))}.", param="messages") from error
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"The chat template refuses these messages: {user.restore(str(error))}", param="messages") from error
        except Exception as error:  # templates run into whatever Python raises
            text = user.restore(f"{type(error).__name__}: {error}")
            raise InvalidRequest(f"The chat template cannot render these messages ({text}).", param="messages") from error
