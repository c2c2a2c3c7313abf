"""The canary: one small greedy request to an OpenAI-style server after each resume. Must not know any version."""

from dataclasses import dataclass
from typing import Any

import structlog

from weighbridge.errors import EngineError
from weighbridge.tasks.engines.control import Control

log = structlog.get_logger("weighbridge.canary")


@dataclass(slots=True)
class Canary:
    """A prompt, and how many tokens are asked for. Succeeds when the engine answers with text that is text."""

    prompt: str = "The"
    tokens: int = 4
    model: str | None = None
    """The name the server knows its model by; found by asking when not given."""

    def find_model(self, control: Control, *, seconds: float) -> str:
        """The served model's name. Raises EngineError."""
        if self.model is None:
            served = control.get("/v1/models", seconds=seconds, admin=False).get("data")
            first = served[0] if isinstance(served, list) and served else None
            if not isinstance(first, dict) or not isinstance(first.get("id"), str):
                raise EngineError(f"{control.url} serves no model.")
            self.model = first["id"]
        return self.model

    def sing(self, control: Control, *, seconds: float) -> str:
        """Asks, and returns what the engine generated. Raises EngineError when it did not generate."""
        order: dict[str, Any] = {
            "model": self.find_model(control, seconds=seconds),
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": 0.0,
        }
        answer = control.post("/v1/completions", order, seconds=seconds, admin=False)
        choices = answer.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        text = first.get("text") if isinstance(first, dict) else None
        if not isinstance(text, str):
            raise EngineError(f"{control.url} generated nothing for the canary: {str(answer)[:200]}")
        log.info("canary", engine=control.url, said=text[:80])
        return text
