"""Policies by the names that commands, requests and evaluations use.

Each policy defines how it is written there, in its `_forms`; `policies/__init__` lists the classes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import combinations
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError, close_to
from kvcache_rag.policies.base import ReusePolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag.policies.base import Scorer


@dataclass(frozen=True)
class PolicySyntax:
    """One way to write a policy.

    Attributes:
        usage: As in messages, such as "cacheblend[:RATIO]"; begins with the name.
        make: Makes the policy from the text after the colon.
    """

    usage: str
    make: Callable[[PolicyArguments], ReusePolicy]

    @property
    def name(self) -> str:
        """The text before the colon."""
        return self.usage.partition(":")[0].partition("[")[0]


@dataclass(frozen=True)
class PolicyArguments:
    """The text after the colon.

    Attributes:
        form: How it should be written.
        values: The parts between commas.
        auxiliary: A scorer for policies that can have one.
    """

    form: PolicySyntax
    values: tuple[str, ...]
    auxiliary: Scorer | None = None

    def numbers(self, *kinds: type[int] | type[float]) -> list[Any]:
        """All of these numbers, or none.

        Raises:
            InvalidInputError: If there are others.
        """
        if len(self.values) not in (0, len(kinds)):
            raise self.refusal()
        return [self.number(index, kinds[index]) for index in range(len(self.values))]

    def number(self, index: int, kind: type[int] | type[float]) -> Any:
        """One number.

        Raises:
            InvalidInputError: If it is none.
        """
        value = self.values[index]
        try:
            return kind(value)
        except ValueError as error:
            what = "a whole number" if kind is int else "a number"
            raise InvalidInputError(
                f"{value!r} is not {what}, which {self.form.name} takes: {self.form.usage}"
            ) from error

    def refusal(self) -> InvalidInputError:
        """The error for a wrong number of values."""
        return InvalidInputError(
            f"{self.form.name} does not take {','.join(self.values)}; write {self.form.usage}"
        )


_FORMS: dict[str, PolicySyntax] = {}
_WAS = {"reordered": "reuse"}  # of 0.1
_WITH_RATIO: list[str] = []


def register(*kinds: type[ReusePolicy]) -> tuple[str, ...]:
    """Let `policy_by_name` know these policies; their names, in this order."""
    for kind in kinds:
        forms: tuple[PolicySyntax, ...] = vars(kind)["_forms"]
        for form in forms:
            _FORMS[form.name] = form
            if any(field.name == "ratio" for field in fields(kind)):  # type: ignore[arg-type]  # a dataclass
                _WITH_RATIO.append(form.name)
    return tuple(_FORMS)


def names_with_ratio() -> tuple[str, ...]:
    """The names whose first number is a ratio."""
    return tuple(_WITH_RATIO)


def policy_by_name(text: str, auxiliary: Scorer | None = None) -> ReusePolicy:
    """The policy with a name such as "cacheblend:0.2".

    Args:
        text: One of `POLICY_NAMES`, optionally with its numbers after a colon; the message about a
            wrong name lists all forms.
        auxiliary: Scorer for policies that take one; None for the engine's.

    Raises:
        InvalidInputError: If there is no such policy, or its numbers cannot be used.
    """
    if not isinstance(text, str):
        raise InvalidInputError(f'a policy\'s name is a text such as "cacheblend", not {text!r}')
    name, colon, rest = (part.strip() for part in text.lower().partition(":"))
    form = _FORMS.get(name)
    if name in _WAS:
        raise InvalidInputError(f"the policy {name!r} is called {_WAS[name]!r} now; write that")
    if form is None:
        close = close_to(name, _FORMS)
        hint = f"did you mean {close}? It" if close else "it"
        usages = ", ".join(known.usage for known in _FORMS.values())
        raise InvalidInputError(f"there is no policy {name!r}; {hint} is one of {usages}")
    if colon and not rest:
        raise InvalidInputError(f"nothing stands behind the colon of {text!r}; write {form.usage}")
    values = tuple(value.strip() for value in rest.split(",")) if rest else ()
    return form.make(PolicyArguments(form, values, auxiliary))


def given_policy(policy: ReusePolicy | str | None) -> ReusePolicy | None:
    """The policy that an application gave: itself, by its name, or None for the engine's.

    Raises:
        InvalidInputError: If it is not a policy.
    """
    if isinstance(policy, str):
        return policy_by_name(policy)
    if policy is not None and not isinstance(policy, ReusePolicy):
        raise no_policy(policy)
    return policy


def no_policy(given: object) -> InvalidInputError:
    """The error for a value that is not a policy."""
    made = f"; write {given.__name__}()" if isinstance(given, type) else ""
    return InvalidInputError(
        f"policy must be such as Reuse() or policy_by_name(...), not {given!r}{made}"
    )


def name_of(policy: ReusePolicy) -> str:
    """How a policy is written, so that `policy_by_name` gives it again.

    Raises:
        InvalidInputError: If it has settings that no name says, such as a scorer.
    """
    settings = [getattr(policy, one.name) for one in fields(policy) if one.init]  # type: ignore[arg-type]  # a dataclass
    words = [repr(one) for one in settings if type(one) in (int, float)]
    for form in vars(type(policy)).get("_forms", ()):
        for count in range(len(words) + 1):
            for chosen in combinations(words, count):
                text = ":".join([form.name, *([",".join(chosen)] if chosen else [])])
                with suppress(InvalidInputError):
                    if policy_by_name(text) == policy:
                        return text
    raise InvalidInputError(
        f"{policy!r} has settings that cannot be written down; a server takes policies by name"
    )
