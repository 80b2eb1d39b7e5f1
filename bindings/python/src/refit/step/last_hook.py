"""A hook of an optimizer that runs after all others, also those that are registered later.

PyTorch calls the hooks of a dictionary in their order, and does not allow that the order changes
meanwhile; a value may. So a hook that is called while others are after it puts itself into the
place of the last one, for this once, together with it. Independent of what the hook does.
"""

from collections.abc import Callable
from typing import Any


class LastHook:
    """Calls ``action`` after all other hooks of the same dictionary.

    ``hooks`` is the name of the dictionary that it is registered in. Hooks return None or what
    replaces their arguments after the first, a tuple or a single one.
    """

    def __init__(self, hooks: str, action: Callable[..., Any]) -> None:
        self._hooks = hooks
        self._action = action

    def __call__(self, optimizer: Any, *arguments: Any) -> Any:
        hooks = getattr(optimizer, self._hooks)
        key = next(reversed(hooks))
        last = hooks[key]
        if last is self:
            return self._action(optimizer, *arguments)
        if not (isinstance(last, _Behind) and last.action is self._action):
            hooks[key] = _Behind(hooks, key, last, self._action)
        return None


class _Behind:
    """The last hook, and then ``action``; once."""

    def __init__(self, hooks: Any, key: Any, last: Any, action: Callable[..., Any]) -> None:
        self._hooks, self._key, self._last = hooks, key, last
        self.action = action

    def __call__(self, optimizer: Any, *arguments: Any) -> Any:
        self._hooks[self._key] = self._last
        changed = self._last(optimizer, *arguments)
        if changed is not None:
            arguments = changed if isinstance(changed, tuple) else (changed,)
        found = self.action(optimizer, *arguments)
        return changed if found is None else found
