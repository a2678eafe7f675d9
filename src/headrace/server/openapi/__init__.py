"""The OpenAPI document of the server."""
