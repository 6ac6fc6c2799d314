"""LlamaIndex metadata filters against Chroma.

Chroma's `where` knows comparisons, membership and `$contains` on lists, joined by and / or.  What
it can express it evaluates; the rest (negated comparisons, text search, emptiness, comparisons of
text) becomes a predicate over the rows' metadata.  Both give what LlamaIndex's own
`build_metadata_filter_fn` gives: a missing value fails every operator but `!=` and `nin`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
)

from kvcache_rag import InvalidInputError

if TYPE_CHECKING:
    from kvcache_rag.integration import Where

Row: TypeAlias = Mapping[str, Any]
Predicate: TypeAlias = Callable[[Row], bool]

_COMPARISONS: Final = {
    FilterOperator.GT: "$gt",
    FilterOperator.GTE: "$gte",
    FilterOperator.LT: "$lt",
    FilterOperator.LTE: "$lte",
}
_NEGATIONS: Final = {
    "$eq": "$ne",
    "$ne": "$eq",
    "$in": "$nin",
    "$nin": "$in",
    "$contains": "$not_contains",
}


@dataclass(frozen=True)
class RowFilter:
    """A filter in two parts; a row passes if it passes both.

    Attributes:
        where: For Chroma, None to select everything.
        predicate: For what Chroma cannot express, None if there is nothing of the kind.
    """

    where: Where | None = None
    predicate: Predicate | None = None


def row_filter(filters: MetadataFilters | None) -> RowFilter:
    """Split filters into what Chroma evaluates and what is left.

    Raises:
        InvalidInputError: If a filter's value does not suit its operator.
    """
    if filters is None or not filters.filters:
        return RowFilter()
    if _condition(filters) is not FilterCondition.AND:
        where = _group_where(filters)
        return RowFilter(where) if where else RowFilter(predicate=_group_predicate(filters))
    # Of a conjunction Chroma can take its share; only the rest is left to the predicate.
    wheres: list[Where] = []
    rest: list[Predicate] = []
    for part in filters.filters:
        where = _where(part)
        if where:
            wheres.append(where)
        else:
            rest.append(_predicate(part))
    return RowFilter(
        all_of(wheres), (lambda row: all(test(row) for test in rest)) if rest else None
    )


def all_of(wheres: Sequence[Where | None]) -> Where | None:
    """Conjunction of `where` clauses, in the form Chroma accepts for any number of them."""
    given = [where for where in wheres if where]
    return _join("$and", given) if given else None


def _join(operator: str, wheres: list[Where]) -> Where:
    return wheres[0] if len(wheres) == 1 else {operator: wheres}


def _condition(filters: MetadataFilters) -> FilterCondition:
    return FilterCondition(filters.condition or FilterCondition.AND)


def _where(part: MetadataFilter | MetadataFilters) -> Where | None:
    """The exact translation, None if there is none."""
    return _group_where(part) if isinstance(part, MetadataFilters) else _single_where(part)


def _group_where(filters: MetadataFilters) -> Where | None:
    condition = _condition(filters)
    wheres = [_where(part) for part in filters.filters]
    if condition is FilterCondition.NOT:
        wheres = [_negated(where) for where in wheres]
    given = [where for where in wheres if where]
    if not given or len(given) != len(wheres):
        return None
    return _join("$or" if condition is FilterCondition.OR else "$and", given)


def _negated(where: Where | None) -> Where | None:
    """The complement, where Chroma's own complement treats rows without the key as ours does."""
    if where is None or len(where) != 1:
        return None
    ((key, test),) = where.items()
    if key == "$or":
        parts = [_negated(part) for part in test]
        return {"$and": parts} if all(parts) else None
    if key == "$and" or not isinstance(test, dict):
        return None
    ((operator, value),) = test.items()
    return {key: {_NEGATIONS[operator]: value}} if operator in _NEGATIONS else None


def _single_where(part: MetadataFilter) -> Where | None:
    operator, value = FilterOperator(part.operator), part.value
    if operator in (FilterOperator.EQ, FilterOperator.NE):
        name = "$eq" if operator is FilterOperator.EQ else "$ne"
        return {part.key: {name: value}} if isinstance(value, str) or _is_whole(value) else None
    if operator in _COMPARISONS:
        # Chroma compares numbers only.
        return {part.key: {_COMPARISONS[operator]: value}} if _is_whole(value) else None
    if operator in (FilterOperator.IN, FilterOperator.NIN):
        values = _listed(part)
        name = "$in" if operator is FilterOperator.IN else "$nin"
        return {part.key: {name: values}} if values and _are_simple(values) else None
    if operator is FilterOperator.CONTAINS:
        # Chroma tells 1 and 1.0 apart inside a list, so only texts are left to it.
        return {part.key: {"$contains": value}} if isinstance(value, str) else None
    if operator in (FilterOperator.ANY, FilterOperator.ALL):
        values = _listed(part)
        if not values or not all(isinstance(one, str) for one in values):
            return None
        tests = [{part.key: {"$contains": one}} for one in values]
        return _join("$or" if operator is FilterOperator.ANY else "$and", tests)
    return None


def _is_whole(value: Any) -> bool:
    # Chroma cuts a fraction off before it compares with rows that hold integers.
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _are_simple(values: Sequence[Any]) -> bool:
    """Whether they are all texts or all integers."""
    return len({type(value) for value in values}) == 1 and isinstance(values[0], (str, int))


def _listed(part: MetadataFilter) -> list[Any]:
    if not isinstance(part.value, list):
        operator = FilterOperator(part.operator).value
        raise InvalidInputError(
            f"filter {part.key!r}: operator {operator!r} needs a list, not {part.value!r}"
        )
    return list(part.value)


def _group_predicate(filters: MetadataFilters) -> Predicate:
    tests = [_predicate(part) for part in filters.filters]
    condition = _condition(filters)
    if condition is FilterCondition.OR:
        return lambda row: any(test(row) for test in tests)
    if condition is FilterCondition.NOT:
        return lambda row: not any(test(row) for test in tests)
    return lambda row: all(test(row) for test in tests)


def _predicate(part: MetadataFilter | MetadataFilters) -> Predicate:
    if isinstance(part, MetadataFilters):
        return _group_predicate(part)
    operator, key, value = FilterOperator(part.operator), part.key, part.value
    if operator is FilterOperator.IS_EMPTY:
        return lambda row: row.get(key) in (None, "", [])
    if value is None and operator in (FilterOperator.EQ, FilterOperator.NE):
        wanted = operator is FilterOperator.EQ
        return lambda row: (row.get(key) is None) is wanted
    test = _TESTS[operator]
    operand = value
    if operator in (FilterOperator.IN, FilterOperator.NIN, FilterOperator.ANY, FilterOperator.ALL):
        operand = _listed(part)
    elif operator in (FilterOperator.TEXT_MATCH, FilterOperator.TEXT_MATCH_INSENSITIVE):
        operand = str(value)
    passes_missing = operator in (FilterOperator.NE, FilterOperator.NIN)

    def matches(row: Row) -> bool:
        found = row.get(key)
        return passes_missing if found is None else test(found, operand)

    return matches


def _compared(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def test(found: Any, value: Any) -> bool:
        try:
            return compare(found, value)
        except TypeError:  # a text against a number: not comparable, so not a match
            return False

    return test


def _held(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


_TESTS: Final[dict[FilterOperator, Callable[[Any, Any], bool]]] = {
    FilterOperator.EQ: lambda found, value: bool(found == value),
    FilterOperator.NE: lambda found, value: bool(found != value),
    FilterOperator.GT: _compared(lambda found, value: bool(found > value)),
    FilterOperator.GTE: _compared(lambda found, value: bool(found >= value)),
    FilterOperator.LT: _compared(lambda found, value: bool(found < value)),
    FilterOperator.LTE: _compared(lambda found, value: bool(found <= value)),
    FilterOperator.IN: lambda found, value: found in value,
    FilterOperator.NIN: lambda found, value: found not in value,
    FilterOperator.CONTAINS: lambda found, value: value in _held(found),
    FilterOperator.ANY: lambda found, value: any(one in _held(found) for one in value),
    FilterOperator.ALL: lambda found, value: all(one in _held(found) for one in value),
    FilterOperator.TEXT_MATCH: lambda found, value: value in str(found),
    FilterOperator.TEXT_MATCH_INSENSITIVE: lambda found, value: value.lower() in str(found).lower(),
}
