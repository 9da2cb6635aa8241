"""Chats: tools and tool calls, reasoning sections, and messages for chat templates."""
