"""The draft engine as a service: HTTP edge, serving engine, sessions, and the embedded target."""
