"""Non-causal attention of draft blocks over a paged pool of context rows. Needs torch and nothing else of ours.

A layer states its `AttentionProblem`; `select_backend` picks a backend and a path from their claims; the probe proves the
path; `BlockAttention` runs it.
"""
