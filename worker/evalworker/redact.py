"""Keeps the values of secrets out of everything that we write: each is replaced by `[redacted NAME]`.

`Redactor` and `Stream` are functions of the secrets they are given; a process keeps one redactor, which `learn` fills from its
environment and whose `text` the edges call (log lines, job output, messages, events, the terminal). Inspect's own logs are Inspect's.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

SHORTEST = 8
"""Characters of a value that is worth hiding: a shorter one is found in innocent words."""

PROVIDER_SECRETS = (
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
    "GOOGLE_API_KEY",
    "GEMINI_API_KEY",
    "MISTRAL_API_KEY",
    "AZUREAI_API_KEY",
    "AZUREAI_OPENAI_API_KEY",
    "AZUREAI_ANTHROPIC_API_KEY",
    "AZUREAI_MISTRAL_API_KEY",
    "AZURE_OPENAI_API_KEY",
    "AZURE_MISTRAL_API_KEY",
    "AZURE_API_KEY",
    "GROQ_API_KEY",
    "TOGETHER_API_KEY",
    "XAI_API_KEY",
    "GROK_API_KEY",
    "OPENROUTER_API_KEY",
    "DEEPSEEK_API_KEY",
    "PERPLEXITY_API_KEY",
    "FIREWORKS_API_KEY",
    "SAMBANOVA_API_KEY",
    "CF_API_TOKEN",
    "CLOUDFLARE_API_TOKEN",
    "GOODFIRE_API_KEY",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "KAGGLE_KEY",
    "TAVILY_API_KEY",
    "EXA_API_KEY",
    "GITHUB_TOKEN",
)
"""Keys of the model providers that Inspect knows, and tokens of data sets and tools: secrets of a run without being named."""

_CREDENTIAL = re.compile(
    r"(^|_)(api_?keys?|(access|private|secret|signing|account|subscription)_?keys?(_id)?|secrets?|token|credentials?"
    r"|pass(wd|word|phrase|code)s?|authori[sz]ation|bearer|cookies?|jwt)(_?[0-9]+)?$"
)
_NO_CREDENTIAL = re.compile(
    r"^(n|num|max|min|use|has|with|show|hide)_"
    r"|(^|_)(eos|bos|pad|unk|sep|mask|cls|stop|special|start|end|begin|first|last|next|image|audio|think(ing)?|per|each|input"
    r"|output|prompt)_token$"
)


def looks_secret(name: str) -> bool:
    """Whether a name (of an argument, a header, an environment variable) looks like a credential's."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = re.sub(r"[^a-z0-9]+", "_", words).strip("_")
    return bool(_CREDENTIAL.search(words)) and not _NO_CREDENTIAL.search(words)


def secret_variable(name: str) -> bool:
    """Whether an environment variable of this name is taken for a secret: here `…_KEY` is enough."""
    return name in PROVIDER_SECRETS or looks_secret(name) or name.upper().endswith("_KEY")


def secrets_of(environment: Mapping[str, str], named: Iterable[str] = ()) -> dict[str, str]:
    """The variables whose values are to be hidden, by their names' looks or because they were named."""
    wanted = frozenset(named)
    return {name: value for name, value in environment.items() if value and (name in wanted or secret_variable(name))}


_ORDINARY = re.compile(r"INSPECT_|AWS_(DEFAULT_)?(REGION|PROFILE)$|S3_BUCKET_NAME$|.*(_URL|_ENDPOINT|_HOST|_REGION)$")
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[\w+=.~-]{16,}")


def secrets_of_file(values: Mapping[str, str | None]) -> dict[str, str]:
    """The secrets of a `.env`: by name, or because a value looks like a token and no setting that we know of."""
    return {
        name: value
        for name, value in values.items()
        if value and (secret_variable(name) or (not _ORDINARY.match(name) and _RANDOM.fullmatch(value)))
    }


class Redactor:
    """Replaces known values. More may be learned at any time; replacing is safe from several threads."""

    def __init__(self, secrets: Mapping[str, str] | None = None) -> None:
        self._names: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None
        self.learn(secrets or {})

    def learn(self, secrets: Mapping[str, str]) -> None:
        """Hide these values from now on, also where JSON writes them with escapes."""
        names = dict(self._names)
        for name, value in secrets.items():
            for text in {value, value.strip(), json.dumps(value)[1:-1]}:
                if len(text) >= SHORTEST:
                    names.setdefault(text, name)
        if names != self._names:
            longest_first = sorted(names, key=len, reverse=True)
            self._names, self._pattern = names, re.compile("|".join(map(re.escape, longest_first)))

    @property
    def values(self) -> list[str]:
        """What is hidden."""
        return list(self._names)

    def find(self, text: str) -> str | None:
        """The name of a secret whose value the text holds, None if it holds none."""
        found = self._pattern.search(text) if self._pattern else None
        return self._names[found[0]] if found else None

    def find_in(self, value: Any) -> str | None:
        """The same for JSON values, keys included."""
        if isinstance(value, str):
            return self.find(value)
        if isinstance(value, dict):
            value = [*value.keys(), *value.values()]
        if isinstance(value, list):
            return next((name for item in value if (name := self.find_in(item)) is not None), None)
        return None

    def text(self, text: str) -> str:
        """The text without the values; also without the first part of one at its very end, where somebody has cut it."""
        if self._pattern is None:
            return text
        text = self._pattern.sub(lambda found: f"[redacted {self._names[found[0]]}]", text)
        for value, name in self._names.items():
            start = text.rfind(value[:SHORTEST])
            if start >= 0 and value.startswith(text[start:].removesuffix("…")):
                text = f"{text[:start]}[redacted {name}]"
        return text

    def json(self, value: Any) -> Any:
        """A copy of JSON values in which every text, keys aside, is redacted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.json(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.json(item) for item in value]
        return value


class Stream:
    """Redacts bytes that come in pieces. What may be the beginning of a value is held back until more comes."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """What can be written by now."""
        data = self._held + piece
        values = [value.encode("utf-8", "surrogateescape") for value in self._redactor.values]
        data = self._replace(data)
        keep = max((_overlap(data, value) for value in values), default=0)
        self._held = data[len(data) - keep :]
        return data[: len(data) - keep]

    def end(self) -> bytes:
        """What was held back."""
        held, self._held = self._held, b""
        return self._replace(held)

    def _replace(self, data: bytes) -> bytes:
        text = data.decode("utf-8", "surrogateescape")
        pattern = self._redactor._pattern
        if pattern is None or not pattern.search(text):
            return data
        names = self._redactor._names
        return pattern.sub(lambda found: f"[redacted {names[found[0]]}]", text).encode("utf-8", "surrogateescape")


def _overlap(data: bytes, value: bytes) -> int:
    """The length of the longest end of `data` that is a beginning, but not the whole, of `value`."""
    for length in range(min(len(value) - 1, len(data)), 0, -1):
        if data.endswith(value[:length]):
            return length
    return 0


_process = Redactor()


def learn(secrets: Mapping[str, str]) -> None:
    """Make the process hide these values."""
    _process.learn(secrets)


def learn_environment(named: Iterable[str] = ()) -> None:
    """Make the process hide the secrets of its environment as it is now."""
    learn(secrets_of(os.environ, named))


def text(said: str) -> str:
    """The text as this process may write it."""
    return _process.text(said)


def json_values(value: Any) -> Any:
    """JSON values as this process may write them."""
    return _process.json(value)


def find(said: str) -> str | None:
    """The name of a secret of this process whose value the text holds."""
    return _process.find(said)


def find_in(value: Any) -> str | None:
    """The same for JSON values."""
    return _process.find_in(value)


def stream() -> Stream:
    """A stream that hides what this process hides."""
    return Stream(_process)
