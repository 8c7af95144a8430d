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
    Prompt(
        "summary",
        "Summarize the following text in two sentences: The honey bee lives in large colonies. Each colony has one queen, who "
        "lays all the eggs, and thousands of workers, who collect nectar, build the comb and feed the young. In winter the "
        "workers gather around the queen and keep her warm by moving their wings.",
    ),
    Prompt(
        "summary",
        "Give me a short summary of this paragraph: The town library was closed for a year while the roof was repaired. It "
        "opened again last week with a new reading room, twice as many computers and a garden where visitors can read outside.",
    ),
    Prompt("list", "List five ways to save energy at home."),
    Prompt("list", "Give me a list of ten healthy snacks for children."),
)
