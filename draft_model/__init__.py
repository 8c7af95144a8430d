"""The draft model: config, checkpoint, backbone, heads, sampling, drafter and training."""
