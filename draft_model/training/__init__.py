"""Self-play, features and training of a drafter for the embedded target."""
