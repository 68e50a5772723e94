"""The provider class behind `scripted/<behaviour>`: turns a conversation into one output, with usage, without a tokenizer.

`evalworker.scripted` hands it to Inspect. It keeps no state between calls but the faults' markers, so it answers alike in
any order, process and attempt.

Behaviours: `good`, `wrong` and `mixed` answer by `evalworker.scripted_answers`; `refuse` says "I can't help with that.";
`comply` calls the first tool it is offered once, with the smallest arguments that its schema allows, and then answers as
`good` does. Where a tool `submit` is offered, each of them ends by submitting its answer.

Model arguments: `latency` (seconds a call takes), `jitter` (0 to 1: that share of it, up or down, by the input's hash),
`retry_pause` (seconds between Inspect's retries; without it Inspect's own 3 s and more), `state_dir`, `memory_mb`, and the
faults of `evalworker.scripted_faults`. Rate limits and timeouts are retried by Inspect as those of a real provider: without
`--max-retries`, for ever.
"""

from typing import Any, Final

import anyio
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageUser,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    RetryDecision,
)
from inspect_ai.tool import ToolCall, ToolChoice, ToolFunction, ToolInfo, ToolParam
from tenacity.wait import wait_base, wait_fixed

from evalworker.scripted_answers import REFUSAL, digest, mixed, right, wrong
from evalworker.scripted_faults import FAULTS, APITimeoutError, AuthenticationError, Faults, RateLimitError

BEHAVIOURS: Final = {
    "good": right,
    "wrong": wrong,
    "mixed": mixed,
    "refuse": lambda _prompt: REFUSAL,
    "comply": right,
}
"""What each behaviour answers to a prompt."""

SUBMIT: Final = "submit"
"""The tool by which Inspect's agents end."""

_CHARACTERS_PER_TOKEN: Final = 4


class ScriptedAPI(ModelAPI):
    """One scripted model. Raises ValueError for an unknown behaviour or model argument."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - the signature that Inspect calls
        *,
        latency: float = 0.0,
        jitter: float = 0.0,
        retry_pause: float | None = None,
        state_dir: str | None = None,
        memory_mb: int = 1024,
        **faults: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        if model_name not in BEHAVIOURS:
            raise ValueError(
                f"Model name scripted/{model_name} not recognized: choose scripted/{', scripted/'.join(BEHAVIOURS)}"
            )
        if unknown := sorted(set(faults) - set(FAULTS)):
            raise ValueError(f"scripted models have no argument {unknown[0]!r}: the faults are {', '.join(FAULTS)}")
        self._latency, self._jitter, self._retry_pause = float(latency), float(jitter), retry_pause
        self._faults = Faults(faults, state_dir, int(memory_mb))

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """The next output of a conversation."""
        beginning = _beginning(input)
        await anyio.sleep(self._pause(beginning))
        await self._faults.strike(beginning)
        message = self._reply(input, tools, tool_choice)
        output = ModelOutput.from_message(message, stop_reason="tool_calls" if message.tool_calls else "stop")
        output.model = self.model_name
        output.usage = _usage(input, tools, message)
        return output

    def should_retry(self, ex: Exception) -> RetryDecision:
        """Rate limits and timeouts are worth another try."""
        if isinstance(ex, RateLimitError):
            return RetryDecision.rate_limit()
        return RetryDecision.transient() if isinstance(ex, APITimeoutError) else RetryDecision.no()

    def is_auth_failure(self, ex: Exception) -> bool:
        """A refused key."""
        return isinstance(ex, AuthenticationError)

    def retry_wait(self) -> wait_base | None:
        """A fixed pause where `retry_pause` is given."""
        return None if self._retry_pause is None else wait_fixed(self._retry_pause)

    async def count_text_tokens(self, text: str) -> int:
        """By length, as in the usage: the default would download a tokenizer."""
        return _tokens(text)

    def _pause(self, beginning: str) -> float:
        share = int(digest(beginning)[:8], 16) / 0xFFFFFFFF * 2 - 1
        return max(0.0, self._latency * (1 + self._jitter * share))

    def _reply(self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice) -> ChatMessageAssistant:
        answer = BEHAVIOURS[self.model_name](_question(input))
        offered = {} if tool_choice == "none" else {tool.name: tool for tool in tools}
        if isinstance(tool_choice, ToolFunction):
            offered = {name: tool for name, tool in offered.items() if name == tool_choice.name}
        others = [tool for name, tool in offered.items() if name != SUBMIT]
        forced = tool_choice == "any" or isinstance(tool_choice, ToolFunction)
        if others and (forced or (self.model_name == "comply" and not _has_called(input))):
            return _call(others[0], "Understood, I comply.", {})
        if SUBMIT in offered:
            return _call(offered[SUBMIT], answer, dict.fromkeys(offered[SUBMIT].parameters.required, answer))
        return ChatMessageAssistant(content=answer)


def smallest(schema: ToolParam) -> Any:
    """The simplest value that a JSON schema of a tool's parameter allows (patterns are not solved)."""
    if schema.enum:
        return schema.enum[0]
    if schema.default is not None:
        return schema.default
    if schema.anyOf:
        return smallest(schema.anyOf[0])
    kind = schema.type[0] if isinstance(schema.type, list) else schema.type
    if kind in ("integer", "number"):
        low = (
            schema.minimum
            if schema.minimum is not None
            else min(1, schema.maximum if schema.maximum is not None else 1)
        )
        return int(low) if kind == "integer" else float(low)
    if kind == "boolean":
        return True
    if kind == "array":
        return [smallest(schema.items)] if schema.items else []
    if kind == "object":
        return {name: smallest((schema.properties or {})[name]) for name in schema.required or []}
    if kind == "null":
        return None
    return "example".ljust(schema.minLength or 0, "x")[: schema.maxLength]


def _call(tool: ToolInfo, text: str, arguments: dict[str, Any]) -> ChatMessageAssistant:
    """A message that calls the tool; `arguments` replace the smallest ones where they are texts too."""
    values = {name: smallest(tool.parameters.properties[name]) for name in tool.parameters.required}
    values |= {name: value for name, value in arguments.items() if isinstance(values.get(name), str)}
    call = ToolCall(id=f"call_{digest(tool.name + repr(values))}", function=tool.name, arguments=values)
    return ChatMessageAssistant(content=text, tool_calls=[call])


def _beginning(input: list[ChatMessage]) -> str:
    """What tells one sample from another: the texts before the model first spoke. The same at every turn."""
    texts: list[str] = []
    for message in input:
        if isinstance(message, ChatMessageAssistant):
            break
        texts.append(message.text)
    return "\n".join(texts)


def _question(input: list[ChatMessage]) -> str:
    """The user's first message of the conversation, else all of its beginning."""
    return next((message.text for message in input if isinstance(message, ChatMessageUser)), _beginning(input))


def _has_called(input: list[ChatMessage]) -> bool:
    return any(isinstance(message, ChatMessageAssistant) and message.tool_calls for message in input)


def _tokens(text: str) -> int:
    return -(-len(text) // _CHARACTERS_PER_TOKEN)


def _usage(input: list[ChatMessage], tools: list[ToolInfo], message: ChatMessageAssistant) -> ModelUsage:
    """Counts from lengths alone."""
    given = sum(_tokens(each.text) for each in input) + sum(_tokens(tool.name + tool.description) for tool in tools)
    said = _tokens(message.text) + sum(
        _tokens(call.function + repr(call.arguments)) for call in message.tool_calls or []
    )
    return ModelUsage(input_tokens=given, output_tokens=said, total_tokens=given + said)
