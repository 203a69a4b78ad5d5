"""Megatron FSDP's parameter groups: which parameters share a buffer, in which order, padded to what.

Source: megatron-core 0.19.2 distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:1726-1960
(_get_parameter_groups)
and 257-383 (build_data_parallel_buffer_index).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from estimator.model.parameters import Parameter
from estimator.sharding.base import Stage, Unit


@dataclass(frozen=True, slots=True)
class Group:
    """One buffer: its parameters, its padded size in elements, and the FSDP unit (decoder layer) it belongs to."""

    index: int
    parameters: tuple[Parameter, ...]
    size: int
    unit: int | None
    shards: int
    """Ranks that the group is sharded over: those of expert data parallelism for experts."""


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """The groups of a stage, and who belongs to which. Shared by all steps with the same buckets: never changed."""

    groups: tuple[Group, ...]
    group_of: dict[tuple[int | None, str], Group]
    of_unit: dict[Unit, list[int]]
    of_module: dict[Unit, list[int]]
    """Buckets of the parameters that each module's hook gathers."""


_MODULE_OF = {
    "word_embeddings": "embedding",
    "position_embeddings": "embedding",
    "final_norm_weight": "final_norm",
    "final_norm_bias": "final_norm",
}


@lru_cache(maxsize=512)
def buckets_of(
    stage: Stage, with_units: bool, bucket_size: int | None, shards: int, padded: bool, expert_shards: int
) -> Buckets:
    """The stage's parameter groups as buckets."""
    groups = parameter_groups(stage.parameters, with_units, bucket_size, shards, padded, expert_shards)
    of_unit: dict[Unit, list[int]] = {}
    of_module: dict[Unit, set[int]] = {}
    for group in groups:
        if group.unit is not None:
            of_unit.setdefault(group.unit, []).append(group.index)
        for p in group.parameters:
            module: Unit = p.layer if p.layer is not None else _MODULE_OF.get(p.name, p.name)
            of_module.setdefault(module, set()).add(group.index)
    return Buckets(
        tuple(groups),
        {(p.layer, p.name): g for g in groups for p in g.parameters},
        of_unit,
        {module: sorted(indices) for module, indices in of_module.items()},
    )


def parameter_groups(
    parameters: tuple[Parameter, ...],
    with_units: bool,
    bucket_size: int | None,
    shards: int,
    padded: bool,
    expert_shards: int = 1,
) -> list[Group]:
    """Groups in the order in which FSDP numbers its buckets.

    ``with_units``: optim_grads_params, where each decoder layer is one group; parameters outside of layers are cut by
    ``bucket_size``. Without units every parameter is cut by ``bucket_size``, in order. Experts are apart (by their
    name, ``.experts.``, whether or not they are split).
    """
    by_unit: dict[tuple[int | None, bool], list[Parameter]] = {}
    for p in parameters:
        by_unit.setdefault((p.layer if with_units else None, p.is_routed), []).append(p)
    cut: list[tuple[int | None, list[Parameter]]] = []
    for (unit, _), members in by_unit.items():
        bucket: list[Parameter] = []
        for p in members:
            if p.shared_embedding and padded:
                if bucket:
                    cut.append((unit, bucket))
                cut.append((unit, [p]))
                bucket = []
                continue
            bucket.append(p)
            if unit is None and bucket_size and sum(q.num_elements for q in bucket) >= bucket_size:
                cut.append((unit, bucket))
                bucket = []
        if bucket:
            cut.append((unit, bucket))
    groups = []
    for index, (unit, members) in enumerate(cut):
        ordered = sorted(members, key=lambda p: p.row_size, reverse=True)
        factor = _chunk_factor(ordered)
        size = _packed_size([p.num_elements for p in ordered], factor)
        ranks = expert_shards if ordered[0].is_routed else shards
        if padded:
            size = -(-size // (ranks * factor)) * ranks * factor
        groups.append(Group(index, tuple(ordered), size, unit, ranks))
    return groups


def _chunk_factor(ordered: list[Parameter]) -> int:
    """Least common multiple of row sizes, so that no row is split between shards."""
    factor = ordered[0].row_size
    for p in ordered:
        fits = (
            p.row_size == factor
            or (factor % p.row_size == 0 and p.num_elements % factor == 0)
            or p.num_elements < factor
        )
        if not fits:
            factor = math.lcm(factor, p.row_size)
    return factor


def _packed_size(sizes: list[int], factor: int) -> int:
    """Elements that the items take when each starts at a multiple of ``factor``; small items fill the gaps."""
    fragments = [n for n in sizes if n < factor]
    regular = [n for n in sizes if n >= factor]
    position = 0
    while regular:
        size = regular.pop(0)
        if size % factor == 0:
            position += size
            continue
        position += (size // factor + 1) * factor
        remain = size % factor
        space = factor - remain
        for i, other in enumerate(regular):
            if other % factor and remain + other % factor <= factor:
                regular.pop(i)
                space -= other % factor
                position += other // factor * factor
                break
        for fragment in list(fragments):
            if fragment <= space:
                space -= fragment
                fragments.remove(fragment)
    return position + sum(fragments)
