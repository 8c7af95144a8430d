"""Why vLLM cannot be started with this proposer. Each says in a sentence what to change."""


class PairingError(RuntimeError):
    """vLLM, its layout, its settings and the draft server do not go together."""
