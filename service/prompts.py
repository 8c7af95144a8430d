"""The prompts of the demo: short requests of the kinds that people send to an assistant."""

from __future__ import annotations

from typing import NamedTuple


class Prompt(NamedTuple):
    """One user turn and the kind of work it asks for."""

    kind: str
    text: str


DEMO_PROMPTS = (
    Prompt("chat", "What is the difference between weather and climate?"),
    Prompt("chat", "I have a job interview tomorrow and I am nervous. What should I do tonight?"),
    Prompt("chat", "Why do cats sleep so much?"),
    Prompt("code", "Write a Python function that returns the largest number in a list, and explain how it works."),
    Prompt("code", "Write a Python class for a bank account with methods to deposit and withdraw money."),
    Prompt("code", "Show me how to count the words in a text file with Python."),
    Prompt(
        "maths",
        "A shop sells pens for 2 dollars each. Tom buys 7 pens and pays with a 20 dollar bill. How much change does he get?",
    ),
    Prompt("maths", "Solve the equation 3x + 5 = 20 and show each step."),
    Prompt("summary", "Summarize how the French Revolution began and what came of it."),
    Prompt("summary", "Give me a summary of the story of Robin Hood."),
    Prompt("list", "List five ways to save energy at home."),
    Prompt("list", "Give me a list of ten healthy snacks for children."),
)
