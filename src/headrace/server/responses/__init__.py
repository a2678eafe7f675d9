"""OpenAI's /v1/responses: schema, items, parse, wire, store, background, routes."""
