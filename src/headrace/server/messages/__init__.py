"""Anthropic's /v1/messages: schema, blocks, parse, wire, routes."""
