"""Decoders of draft models."""
