"""Decorator that caches a pure function of an immutable object for the lifetime of the object."""

import weakref
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
A = TypeVar("A")


def cache_per_object(function: Callable[Concatenate[S, P], A]) -> Callable[Concatenate[S, P], A]:
    """Return the pure function with one cache per subject. The subject is the first argument.

    A subject is frozen and identified by identity: two equal subjects have separate caches. Exceptions are not cached.
    """
    caches: dict[int, tuple[weakref.ref[S], dict[Hashable, A]]] = {}

    @wraps(function)
    def cached(subject: S, /, *rest: P.args, **named: P.kwargs) -> A:
        key = id(subject)
        if key not in caches:
            # The id may be reused once the subject is freed, so the subject's cache is dropped with it.
            caches[key] = (weakref.ref(subject, lambda _: caches.pop(key, None)), {})
        results = caches[key][1]
        arguments: Any = (*rest, *named.items())
        if arguments not in results:
            results[arguments] = function(subject, *rest, **named)
        return results[arguments]

    return cached
