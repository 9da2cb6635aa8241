"""The text of single tokens, for tables and pages."""

from __future__ import annotations

from nucleate.tokenization.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; bytes of an incomplete character as <0xNN>, and nothing for padding."""
    if tokenizer.is_padding(token):
        return ""
    text = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" not in text:
        return text
    return "".join(f"<0x{byte:02X}>" for byte in tokenizer.pieces.as_bytes(token))
