"""Tokens as quoted text for a terminal, and the line of tokens that a step follows."""

from __future__ import annotations

from collections.abc import Sequence

from nucleate.cli.terminal import Terminal, text_width
from nucleate.tokenization.tokenizer import Tokenizer, token_text


class TokenNames:
    """The quoted texts of tokens, by token id and maximum width."""

    def __init__(self, tokenizer: Tokenizer, terminal: Terminal) -> None:
        self.tokenizer, self.terminal = tokenizer, terminal

    def __call__(self, token: int, width: int | None = None) -> str:
        return self.terminal.quoted(token_text(self.tokenizer, token), width)


def prompt_line(prompt: Sequence[int], output: Sequence[int], names: TokenNames, start: str, end: str) -> str:
    """The last tokens of a prompt, then those of its output after a |, between two texts, on one line."""
    terminal = names.terminal
    limit = 1000 if terminal.columns is None else terminal.columns - text_width(start) - text_width(end)
    tokens = [*prompt, *output]
    shown_tokens, used = list[str](), 4 + 2 * bool(output)
    for index, token in reversed([*enumerate(tokens)][-8:]):
        name = names(token, max(8, limit - 6))
        used += text_width(name) + 1
        if used > limit and shown_tokens:
            break
        mark = "| " if output and index == len(prompt) else ""
        shown_tokens.insert(0, f"{mark}{terminal.paint(name, 'sampled' if index >= len(prompt) else '')}")
    dots = "... " * (len(shown_tokens) < len(tokens))
    return f"{terminal.paint(start, 'bold')}{dots}{' '.join(shown_tokens)}{end}"
