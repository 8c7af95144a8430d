"""What a draft layer asks of attention, and what a backend claims to do: two frozen values and one comparison.

A backend states its limits as data, `AttentionCapabilities`. Nothing asks a backend "can you" in any other way, so a
refusal is always the complete list of reasons. A flag is a claim; `probe.py` is the proof.

Shape symbols: B requests, S draft_block_size, H query heads, G KV heads, L kv_lora_rank, R rope dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch

AttentionKind = Literal["mla", "gqa"]
LseBase = Literal["e", "2"]


class QueryLenSupport(StrEnum):
    """How many query rows of one request a kernel takes in one call."""

    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


@dataclass(frozen=True)
class AttentionProblem:
    """The attention of one draft layer.

    Args:
        kind: `mla` (absorbed: one latent row per token, shared by all heads) or `gqa`.
        draft_block_size: S, the query slots of one block.
        num_heads: H
        num_kv_heads: G; 1 for `mla`.
        key_dim: width of a query and a key; L + R for `mla`.
        value_dim: width of an output; L for `mla`, whose value is the first L numbers of the row.
        dtype: of queries and outputs.
        kv_cache_dtype: of the rows in the pool.
        page_size: rows in a page.
        device: where the pool lies.
        sliding_window: rows of history before the block that a slot sees, None for all; the whole block is always seen.
        needs_lse: whether the log-sum-exp is wanted too.

    Raises:
        ValueError: a size is not positive, or the sizes contradict each other.
    """

    kind: AttentionKind
    draft_block_size: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    page_size: int
    device: torch.device
    sliding_window: int | None = None
    needs_lse: bool = False

    def __post_init__(self) -> None:
        for name in ("draft_block_size", "num_heads", "num_kv_heads", "key_dim", "value_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.kind == "mla" and (self.num_kv_heads != 1 or self.value_dim > self.key_dim):
            raise ValueError("mla has one KV head, whose value is a prefix of its key")
        if self.kind == "gqa" and self.key_dim != self.value_dim:
            raise ValueError(f"gqa needs key_dim == value_dim, got {self.key_dim} and {self.value_dim}")
        if self.sliding_window is not None and self.sliding_window < 0:
            raise ValueError(f"sliding_window must not be negative, got {self.sliding_window}")

    def __str__(self) -> str:
        window = "" if self.sliding_window is None else f", window {self.sliding_window}"
        names = [str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.kv_cache_dtype)]
        return (
            f"{self.kind} attention ({self.draft_block_size} slots, {self.num_heads} heads over {self.num_kv_heads}, "
            f"dims {self.key_dim} and {self.value_dim}{window}) of {names[0]} over {names[1]} rows "
            f"in pages of {self.page_size} on {self.device}"
        )

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one cache row: (L + R,) for `mla`, (2, G, D) for `gqa`, keys before values."""
        return (self.key_dim,) if self.kind == "mla" else (2, self.num_kv_heads, self.key_dim)


@dataclass(frozen=True)
class AttentionCapabilities:
    """What a backend claims. A limit of None is no limit.

    Args:
        kinds: attention kinds it serves.
        query_len_support: query rows per request in one call.
        supports_non_causal: a query may see every row that `seq_lens` counts; a flattened block needs no more.
        supports_non_causal_multi_token: so may each of several query rows in one call; a fused block needs this.
        dtypes: of queries.
        kv_cache_dtypes: of pool rows.
        device_types: `cpu`, `cuda`.
        max_query_len: query rows per request in one fused call.
        max_num_heads: H
        page_sizes: page sizes it walks.
        page_size_multiple: a page size must be a multiple of this.
        key_value_dims: pairs (key_dim, value_dim) it is compiled for.
        supports_sliding_window: the history may be cut.
        lse_base: base of the log-sum-exp it returns, None if it returns none.
        kv_dtype_is_query_dtype: pool rows must have the queries' dtype, unless they are float8.
        compute_capabilities: the CUDA devices it is compiled for.
        min_compute_capability: the oldest CUDA device it runs on.
        supports_graph_capture: a call may be recorded in a CUDA graph.
    """

    kinds: frozenset[AttentionKind]
    query_len_support: QueryLenSupport
    supports_non_causal: bool
    supports_non_causal_multi_token: bool
    dtypes: frozenset[torch.dtype]
    kv_cache_dtypes: frozenset[torch.dtype]
    device_types: frozenset[str]
    max_query_len: int | None = None
    max_num_heads: int | None = None
    page_sizes: frozenset[int] | None = None
    page_size_multiple: int = 1
    key_value_dims: frozenset[tuple[int, int]] | None = None
    supports_sliding_window: bool = False
    lse_base: LseBase | None = None
    kv_dtype_is_query_dtype: bool = False
    compute_capabilities: frozenset[tuple[int, int]] | None = None
    min_compute_capability: tuple[int, int] | None = None
    supports_graph_capture: bool = False

    def unsupported_reasons(self, problem: AttentionProblem) -> list[str]:
        """Every reason why no path of the backend can serve `problem`; empty if one can."""
        dims = (problem.key_dim, problem.value_dim)
        checks = [
            (problem.kind in self.kinds, f"{problem.kind} attention is not supported"),
            (self.supports_non_causal, "non-causal attention is not supported"),
            (problem.dtype in self.dtypes, f"queries of {problem.dtype} are not supported"),
            (
                problem.kv_cache_dtype in self.kv_cache_dtypes,
                f"a KV cache of {problem.kv_cache_dtype} is not supported",
            ),
            (
                not self.kv_dtype_is_query_dtype or problem.kv_cache_dtype in (problem.dtype, torch.float8_e4m3fn),
                f"the KV cache must have the queries' dtype, got {problem.kv_cache_dtype} and {problem.dtype}",
            ),
            (problem.device.type in self.device_types, f"device {problem.device.type} is not supported"),
            (
                self.max_num_heads is None or problem.num_heads <= self.max_num_heads,
                f"{problem.num_heads} heads; at most {self.max_num_heads} are supported",
            ),
            (
                self.page_sizes is None or problem.page_size in self.page_sizes,
                f"page_size {problem.page_size}; supported: {sorted(self.page_sizes or ())}",
            ),
            (
                problem.page_size % self.page_size_multiple == 0,
                f"page_size {problem.page_size} is not a multiple of {self.page_size_multiple}",
            ),
            (
                self.key_value_dims is None or dims in self.key_value_dims,
                f"key and value dims {dims}; supported: {sorted(self.key_value_dims or ())}",
            ),
            (
                problem.sliding_window is None or self.supports_sliding_window,
                f"a sliding window (of {problem.sliding_window}) is not supported",
            ),
            (not problem.needs_lse or self.lse_base is not None, "the log-sum-exp is not returned"),
        ]
        return [reason for is_met, reason in checks if not is_met]

    def fused_reasons(self, problem: AttentionProblem) -> list[str]:
        """Every reason why one call cannot take all S slots of a block; empty if it can."""
        slots = problem.draft_block_size
        if slots == 1:
            return []
        checks = [
            (self.query_len_support is not QueryLenSupport.SINGLE_ONLY, "one query row per request only"),
            (self.supports_non_causal_multi_token, "a query of several rows is masked causally"),
            (
                self.max_query_len is None or slots <= self.max_query_len,
                f"{slots} query rows per request; at most {self.max_query_len} are supported",
            ),
        ]
        return [reason for is_met, reason in checks if not is_met]

    def device_reasons(self, compute_capability: tuple[int, int] | None) -> list[str]:
        """Every reason why it cannot run beside a CUDA device of this compute capability; None if there is no such device."""
        if "cuda" not in self.device_types:
            return []
        if compute_capability is None:
            return [] if "cpu" in self.device_types else ["there is no CUDA device"]
        reasons = []
        if self.compute_capabilities is not None and compute_capability not in self.compute_capabilities:
            wanted = ", ".join(f"{major}.{minor}" for major, minor in sorted(self.compute_capabilities))
            reasons.append(f"compute capability {compute_capability[0]}.{compute_capability[1]}; supported: {wanted}")
        if self.min_compute_capability is not None and compute_capability < self.min_compute_capability:
            major, minor = self.min_compute_capability
            reasons.append(
                f"compute capability {compute_capability[0]}.{compute_capability[1]}; {major}.{minor} or newer is needed"
            )
        return reasons
