"""A draft server and vLLM servers for the tests, and the requests that every vLLM server has to answer alike."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from draft_engine_client.wire import ModelList
from service.prompts import DEMO_PROMPTS
from service.subprocesses import ServerProcess
from service.vllm_args import vllm_flags
from service.vllm_process import SERVED_NAME

VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
MAX_MODEL_LEN = 640
PROMPT_BUDGET = 64
# A small budget cuts prompts into chunks that share steps with decoding; float32 keeps near ties of the argmax rare.
BASE_FLAGS = (
    "--enforce-eager",
    "--dtype",
    "float32",
    "--max-model-len",
    str(MAX_MODEL_LEN),
    "--max-num-seqs",
    "4",
    "--max-num-batched-tokens",
    str(PROMPT_BUDGET),
)
# Nothing is timed here, so no step goes without drafts because the machine is busy.
PATIENT = {"step_deadline_ms": 20_000.0, "request_timeout_s": 30.0, "log_interval_s": 5.0}

LONG_TEXT = " ".join(
    f"On day {day} the crew of the ship counted {7 * day % 31} barrels, wrote a letter home and looked for land."
    for day in range(1, 15)
)


class DraftServer:
    """The draft server with the drafter that ships, on one port, started as often as a test likes."""

    def __init__(self, target_folder: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._target_folder, self._log = target_folder, log
        self.process: ServerProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        arguments = ["serve", "--port", str(self.port), "--threads", "1", "--target-model", str(self._target_folder)]
        self.process = ServerProcess(arguments, self._log)
        self.process.wait_ready(300.0)  # beside a vLLM server under load, on the same cores

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()

    def flags(self, **settings: Any) -> list[str]:
        entry = ModelList.model_validate_json(httpx.get(f"{self.url}/v1/models", timeout=30).content).data[0]
        return vllm_flags(entry, self.url, None, **{**PATIENT, **settings})

    def metrics(self) -> dict[str, float]:
        return read_metrics(self.url, "draft_engine_")

    def sessions(self) -> list[dict[str, Any]]:
        return list(httpx.get(f"{self.url}/v1/sessions", timeout=30).json()["data"])


def read_metrics(url: str, prefix: str) -> dict[str, float]:
    """Counters and gauges by name and labels, without vLLM's own labels of engine and model."""
    values = {}
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        if line.startswith(prefix) and "_created" not in line:
            name, value = line.rsplit(" ", 1)
            name = re.sub(r'(engine|model_name)="[^"]*",?', "", name).replace("{}", "").replace(",}", "}")
            values[name] = float(value)
    return values


def counts(url: str) -> tuple[float, float, float]:
    """Verified blocks, drafted tokens, accepted tokens, as vLLM counts them."""
    metrics = read_metrics(url, "vllm:spec_decode")
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return tuple(metrics[f"vllm:spec_decode_{name}_total"] for name in names)  # type: ignore[return-value]


@dataclass(frozen=True)
class Ask:
    """One request: its body without the model, and whether it is a chat."""

    name: str
    body: Mapping[str, Any]
    is_chat: bool = False


def answer(url: str, ask: Ask) -> list[tuple[Any, ...]]:
    """What came back for each choice: tokens, text, why it ended."""
    path = "/v1/chat/completions" if ask.is_chat else "/v1/completions"
    body = {"model": SERVED_NAME, "temperature": 0.0, "max_tokens": 48, "return_token_ids": True, **ask.body}
    reply = httpx.post(url + path, json=body, timeout=600)
    assert reply.status_code == 200, f"{ask.name}: {reply.text}"
    return [
        (
            tuple(choice["token_ids"]),
            choice["message"]["content"] if ask.is_chat else choice["text"],
            choice["finish_reason"],
            choice["stop_reason"],
        )
        for choice in sorted(reply.json()["choices"], key=lambda choice: choice["index"])
    ]


def answer_all(url: str, asks: Sequence[Ask], at_once: int = 4) -> dict[str, list[tuple[Any, ...]]]:
    """Answers by name."""
    with ThreadPoolExecutor(at_once) as pool:
        answers = pool.map(lambda ask: answer(url, ask), asks)
        return dict(zip((ask.name for ask in asks), answers, strict=True))


def chat(name: str, text: str, **more: Any) -> Ask:
    return Ask(name, {"messages": [{"role": "user", "content": text}], **more}, is_chat=True)


CHATS = [chat(f"chat {index}", prompt.text) for index, prompt in enumerate(DEMO_PROMPTS[:8])]

# Prompts of several chunks beside short ones: steps that mix prompt chunks with decoding.
MIXED = [
    Ask("long 1", {"prompt": f"{LONG_TEXT} In short, the crew"}),
    chat("short 1", "Name three colours."),
    Ask("long 2", {"prompt": f"Read this log. {LONG_TEXT} The captain then"}),
    chat("short 2", "What is 12 times 4?"),
    Ask("long 3", {"prompt": f"{LONG_TEXT} Nobody knew that"}),
    Ask("one token", {"prompt": "The"}),
]

# The same long beginning, one after the other: from the second on its blocks come from vLLM's prefix cache.
SHARED = [
    Ask(f"shared {place}", {"prompt": f"{LONG_TEXT} {end}"}) for place, end in enumerate(("The cook", "One sailor", "A storm"))
]

_FORM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

SPECIAL = [
    # top_k 1 leaves one token, so sampling is as determined as an argmax.
    Ask("three answers", {"prompt": "My favourite season is", "n": 3, "temperature": 1.0, "top_k": 1, "seed": 5}),
    Ask("stop string", {"prompt": "One, two, three, four, five, six,", "stop": [" ten", "eleven"]}),
    Ask("many tokens", {"prompt": "Here is a list of numbers: 1, 2, 3, 4,", "max_tokens": 90}),
    Ask("past the end", {"prompt": "Goodbye.", "ignore_eos": True, "max_tokens": 64}),
    Ask("one token only", {"prompt": "The sky is", "max_tokens": 1}),
    Ask("two tokens only", {"prompt": "The sky is", "max_tokens": 2}),
    Ask("penalties", {"prompt": "la la la la la la", "repetition_penalty": 1.3, "presence_penalty": 0.5}),
    Ask("logprobs", {"prompt": "Water boils at", "logprobs": 2}),
    chat(
        "form",
        "Invent a person. Answer in JSON.",
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": _FORM}},
    ),
    chat("choice", "Is fire hot?", structured_outputs={"choice": ["yes, it is very hot", "no, it is very cold"]}),
    # These two run into the longest length, beside requests that go on.
    Ask("to the end", {"prompt": " ".join([LONG_TEXT] * 2)[:2_000], "max_tokens": MAX_MODEL_LEN - 527, "ignore_eos": True}),
    chat("beside it", "Tell me about the sea.", max_tokens=80),
]

STOP_PLACE = 9


def stop_token_asks(plain: Sequence[tuple[Any, ...]]) -> list[Ask]:
    """Requests that end at tokens which the answer is known to have, so that one falls into the middle of a block."""
    tokens = plain[0][0]
    return [
        Ask(f"stop token {place}", {"prompt": "Here is a list of numbers: 1, 2, 3, 4,", "stop_token_ids": [tokens[place]]})
        for place in range(STOP_PLACE, STOP_PLACE + 4)
    ]


def describe(answers: Mapping[str, Any]) -> str:
    """For a failure: the answers as JSON."""
    return json.dumps(answers, indent=1)
