"""Cache of pure functions of an immutable object, for the lifetime of the object."""

import weakref
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
A = TypeVar("A")


def remembered(function: Callable[Concatenate[S, P], A]) -> Callable[Concatenate[S, P], A]:
    """Return the pure function with a cache per subject, its first argument.

    A subject is frozen and identified by identity: two equal subjects have separate caches. Exceptions are not cached.
    """
    answers: dict[int, tuple[weakref.ref[S], dict[Hashable, A]]] = {}

    @wraps(function)
    def asked(subject: S, /, *rest: P.args, **named: P.kwargs) -> A:
        known = answers.get(id(subject))
        if known is None:
            known = answers[id(subject)] = (weakref.ref(subject, _forgetting(answers, id(subject))), {})
        key: Any = (*rest, *named.items())
        if key not in known[1]:
            known[1][key] = function(subject, *rest, **named)
        return known[1][key]

    return asked


def _forgetting(answers: dict[int, Any], key: int) -> Callable[[Any], None]:
    return lambda _: answers.pop(key, None)
