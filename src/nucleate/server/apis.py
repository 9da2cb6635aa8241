"""The endpoints of other APIs for chats."""

from __future__ import annotations

from collections.abc import Sequence

from nucleate.server.anthropic.message_request import MESSAGES
from nucleate.server.chat_api import ChatAPI
from nucleate.server.ollama.ollama_request import CHAT_API, GENERATE_API
from nucleate.server.responses.response_request import RESPONSES

APIS: Sequence[ChatAPI] = (RESPONSES, MESSAGES, CHAT_API, GENERATE_API)
