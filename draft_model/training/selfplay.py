"""Self-play: the target writes user turns and answers them, many chats at a time.

Each chat runs through three phases: the system prompt and the opening words of a user turn are given, the target continues
the user turn, then it answers. All chats of a batch decode together; a chat that ends frees its slot for the next one at once.
What the target computes on the way, features and next-token probabilities, is cached with the tokens, so no chat goes through
the target twice. The opening words steer the topics towards what people ask assistants for; no outside text is used.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from draft_model.target_model import TargetModel
from draft_model.training.dataset import CachedSequence, count_tokens, save_shard

OPENERS = (
    *(
        "Write a Python function that",
        "Write a short program that",
        "Explain what this code does:",
        "How do I sort a list of",
    ),
    *(
        "Write a function to",
        "Give me a regular expression that",
        "Write a SQL query that",
        "What is the difference between a list and",
    ),
    *(
        "Fix the bug in this function:",
        "Write a unit test for",
        "Show me how to read a file in",
        "Implement a class for",
    ),
    *(
        "What is",
        "Explain",
        "Explain in simple terms how",
        "Why does",
        "How does",
        "How do",
        "Who was",
        "When did",
        "Where can I",
    ),
    *(
        "Describe the process of",
        "What are the main causes of",
        "What are the benefits of",
        "What happens when",
        "Tell me about",
    ),
    *(
        "Summarize the following text:",
        "Summarize this paragraph in two sentences:",
        "Give me a short summary of",
        "Shorten this:",
    ),
    *(
        "Rewrite the following sentence:",
        "Rewrite this email to be more polite:",
        "Translate this into simple English:",
    ),
    *(
        "List five",
        "List three",
        "List ten ideas for",
        "Give me a list of",
        "Name some",
        "Give me tips for",
        "What are some ways to",
    ),
    *(
        "Make a shopping list for",
        "Create a plan for",
        "Give me step by step instructions to",
        "Write a recipe for",
        "How can I",
    ),
    *(
        "Solve the equation",
        "Calculate",
        "What is the sum of",
        "If a train",
        "A shop sells",
        "How many",
        "What is the area of",
    ),
    *(
        "Find the value of x in",
        "Tom has",
        "Convert",
        "Prove that",
        "What is the probability of",
        "Simplify the expression",
    ),
    *(
        "Write a story about",
        "Write a short poem about",
        "Write an email to",
        "Write a letter to",
        "Write a paragraph about",
    ),
    *(
        "Write a product description for",
        "Write a dialogue between",
        "Compare",
        "What is the best way to",
        "Should I",
        "Can you",
    ),
    *(
        "I want to",
        "I need help with",
        "I have a problem with my",
        "My friend",
        "Please help me",
        "What do you think about",
    ),
    *(
        "Give me an example of",
        "Define",
        "Is it true that",
        "What would happen if",
        "How long does it take to",
        "Create a table of",
    ),
    *(
        "Plan a trip to",
        "Suggest a name for",
        "What should I eat",
        "How can I improve my",
        "What does the word",
        "Classify",
    ),
)


@dataclass(frozen=True)
class SelfPlaySettings:
    """How chats are written: counts in tokens; temperature 0 is greedy."""

    num_slots: int = 96
    max_user_tokens: int = 64
    max_answer_tokens: int = 192
    user_temperature: float = 0.8
    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.6)
    top_k: int = 50
    chats_per_slot: int = 3
    seed: int = 1


@dataclass
class _Chat:
    """A chat being written. Rows [0, prefix) are shared; rows[i] is what the target said about row prefix + i."""

    answer_temperature: float
    forced: list[int]
    token_ids: list[int]
    turn_start: int
    prompt_length: int | None = None
    rows: list[_Rows] = field(default_factory=list)


@dataclass(frozen=True)
class _Rows:
    """features [n, F] float16, topk_ids [n, K] int32, topk_probs [n, K] float16."""

    features: Tensor
    topk_ids: Tensor
    topk_probs: Tensor

    def row(self, index: int) -> _Rows:
        part = slice(index, index + 1)
        return _Rows(self.features[part], self.topk_ids[part], self.topk_probs[part])


class ChatFormat:
    """The token ids around the turns of the target's chat template."""

    def __init__(self, encode: Callable[[str], list[int]], system_prompt: str) -> None:
        self.encode = encode
        self.before_user = encode(f"<|im_start|>system\n{system_prompt}<|im_end|>\n<|im_start|>user\n")
        self.before_answer = encode("<|im_end|>\n<|im_start|>assistant\n")
        (self.end_of_turn,) = encode("<|im_end|>")


def write_chats(
    target: TargetModel,
    chat_format: ChatFormat,
    folder: Path,
    *,
    num_tokens: int,
    target_layer_ids: tuple[int, ...],
    topk: int,
    settings: SelfPlaySettings,
) -> list[Path]:
    """Write chats until the shards of `folder` hold `num_tokens` tokens; shards already there count and are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = sorted(folder.glob("selfplay-*.safetensors"))
    written = sum(count_tokens(path) for path in paths)
    with tqdm(total=num_tokens, initial=written, unit="tok", desc="self-play") as progress:
        while written < num_tokens:
            player = _Player(target, chat_format, settings, target_layer_ids, topk, seed=settings.seed + len(paths))
            path = folder / f"selfplay-{len(paths):05d}.safetensors"
            save_shard(path, player.play(progress))
            paths.append(path)
            written += count_tokens(path)
    return paths


class _Player:
    """Writes the chats of one shard: some for each slot, one after the other, then the last ones run out."""

    def __init__(
        self,
        target: TargetModel,
        chat_format: ChatFormat,
        settings: SelfPlaySettings,
        target_layer_ids: tuple[int, ...],
        topk: int,
        *,
        seed: int,
    ) -> None:
        self._target, self._format, self._settings = target, chat_format, settings
        self._layers, self._topk = target_layer_ids, topk
        self._dice, self._noise = random.Random(seed), torch.Generator().manual_seed(seed)
        self._to_start = settings.chats_per_slot * settings.num_slots
        self._prefix_slot = settings.num_slots
        prefix = chat_format.before_user
        self._cache = target.new_cache(
            settings.num_slots + 1, len(prefix) + settings.max_user_tokens + settings.max_answer_tokens + 32
        )
        start = torch.zeros(1, dtype=torch.long)
        output = target.forward(torch.tensor([prefix]), start, self._cache, target_layer_ids, slot=self._prefix_slot)
        self._prefix_rows = self._keep(output.features[0], target.logits(output.hidden[0]))

    def play(self, progress: tqdm[None]) -> list[CachedSequence]:
        """Return the finished chats."""
        slots = [self._start_chat(slot) for slot in range(self._settings.num_slots)]
        finished: list[CachedSequence] = []
        while slots:
            starts = torch.tensor([len(chat.token_ids) - 1 for chat in slots])
            token_ids = torch.tensor([[chat.token_ids[-1]] for chat in slots])
            output = self._target.forward(token_ids, starts, self._cache, self._layers)
            logits = self._target.logits(output.hidden[:, 0])
            rows = self._keep(output.features[:, 0], logits)
            temperatures = [_temperature(chat, self._settings) for chat in slots]
            sampled = _sample(logits, temperatures, self._settings.top_k, self._noise).tolist()
            for slot in reversed(range(len(slots))):
                chat = slots[slot]
                chat.rows.append(rows.row(slot))
                if not _advance(chat, sampled[slot], self._format, self._settings):
                    continue
                finished.append(self._finish(chat))
                progress.update(len(chat.token_ids))
                if self._to_start > 0:
                    slots[slot] = self._start_chat(slot)
                    continue
                # No chat is left to start: the last slot moves into this one, so the batch shrinks.
                last = slots.pop()
                if slot < len(slots):
                    self._cache.move(len(slots), slot, len(last.token_ids))
                    slots[slot] = last
        return finished

    def _start_chat(self, slot: int) -> _Chat:
        self._to_start -= 1
        prefix = self._format.before_user
        self._cache.move(self._prefix_slot, slot, len(prefix))
        first, *forced = self._format.encode(self._dice.choice(OPENERS))
        heat = self._dice.choice(self._settings.answer_temperatures)
        return _Chat(heat, forced=forced, token_ids=[*prefix, first], turn_start=len(prefix))

    def _keep(self, features: Tensor, logits: Tensor) -> _Rows:
        top = logits.softmax(-1).topk(self._topk, dim=-1)
        return _Rows(features.half(), top.indices.int(), top.values.half())

    def _finish(self, chat: _Chat) -> CachedSequence:
        # The last token was never fed. No block sees its row or predicts what follows it, so the row before stands in.
        parts = [
            self._prefix_rows,
            *chat.rows,
            *chat.rows[-1:][: len(chat.token_ids) - len(chat.rows) - len(self._prefix_rows.features)],
        ]
        return CachedSequence(
            token_ids=torch.tensor(chat.token_ids),
            prompt_length=chat.prompt_length or 0,
            temperature=chat.answer_temperature,
            features=torch.cat([part.features for part in parts]),
            topk_ids=torch.cat([part.topk_ids for part in parts]),
            topk_probs=torch.cat([part.topk_probs for part in parts]),
        )


def _temperature(chat: _Chat, settings: SelfPlaySettings) -> float:
    return settings.user_temperature if chat.prompt_length is None else chat.answer_temperature


def _advance(chat: _Chat, sampled: int, chat_format: ChatFormat, settings: SelfPlaySettings) -> bool:
    """Append one token to a chat; returns True when the chat is complete."""
    if chat.forced:
        chat.token_ids.append(chat.forced.pop(0))
        return False
    in_answer = chat.prompt_length is not None and len(chat.token_ids) >= chat.prompt_length
    limit = settings.max_answer_tokens if in_answer else settings.max_user_tokens
    if sampled != chat_format.end_of_turn and len(chat.token_ids) - chat.turn_start < limit:
        chat.token_ids.append(sampled)
        return False
    if in_answer:
        chat.token_ids.append(sampled)
        return True
    chat.prompt_length = chat.turn_start = len(chat.token_ids) + len(chat_format.before_answer)
    first, *chat.forced = chat_format.before_answer
    chat.token_ids.append(first)
    return False


def _sample(logits: Tensor, temperatures: Rows[float], top_k: int, noise: torch.Generator) -> Tensor:
    """Draw one token a row, [B]; temperature 0 takes the largest logit."""
    heat = torch.tensor(temperatures)[:, None]
    top = logits.topk(top_k, dim=-1)
    weights = (top.values / heat.clamp_min(1e-4)).softmax(-1)
    drawn = torch.multinomial(weights, 1, generator=noise)[:, 0]
    drawn = torch.where(heat[:, 0] > 0, drawn, torch.zeros_like(drawn))
    return top.indices.gather(1, drawn[:, None])[:, 0]
