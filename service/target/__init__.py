"""The embedded target: an OpenAI-compatible server that verifies drafts."""
