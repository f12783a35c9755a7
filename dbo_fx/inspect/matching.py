"""Match the items of two sides by structure.

First inputs, by where they come from. Then whatever is computed in the same way from matched
inputs. What is left lies at a difference or behind it: from every match on, its neighbours are
matched, at first those that are equal themselves, then those that differ in one thing. So one
changed constant is one changed item, and what lies behind it is matched again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dbo_fx.inspect.facts import Facts, Item

Key = Callable[[Item], Hashable]
_CANDIDATES = 8


@dataclass
class Matching:
    """Pairs of items.

    Attributes:
        now: Per old item the new one; -1 for none.
        was: Per new item the old one; -1 for none.
    """

    now: list[int]
    was: list[int]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """All pairs, by the old items."""
        return [(old, new) for old, new in enumerate(self.now) if new >= 0]


def match(old: Facts, new: Facts) -> Matching:
    """Match two sides; time grows with items and arguments, not with pairs of items."""
    matcher = _Matcher(old.items, new.items)
    matcher.inputs()
    matcher.equal()
    matcher.neighbours()
    return matcher.matching


_GIVEN: tuple[Key, ...] = (
    lambda i: (i.what, i.path, i.value),
    lambda i: (i.what, i.path),
    lambda i: (i.what, i.value),
)


def _exactly(item: Item) -> Hashable:
    return item.what, item.args, item.place


def _but_place(item: Item) -> Hashable:
    return item.what, item.args, item.place.microbatch


def _but_args(item: Item) -> Hashable:
    return item.what, item.place


def _place_only(item: Item) -> Hashable:
    return item.place, item.path


def _but_args_here(item: Item) -> Hashable:
    is_somewhere = item.place.phase or item.path
    return (item.what, item.place, item.path) if is_somewhere and not item.is_given else None


def _and_path(item: Item) -> Hashable:
    return item.what, item.args, item.place, item.path


@dataclass
class _Matcher:
    old: Sequence[Item]
    new: Sequence[Item]
    matching: Matching = field(init=False)
    found: deque[tuple[int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.matching = Matching([-1] * len(self.old), [-1] * len(self.new))
        self.old_users, self.new_users = _users(self.old), _users(self.new)

    def _join(self, old: int, new: int) -> None:
        self.matching.now[old], self.matching.was[new] = new, old
        self.found.append((old, new))

    def _free_old(self) -> Iterator[int]:
        return (i for i, other in enumerate(self.matching.now) if other < 0)

    def _free_new(self) -> Iterator[int]:
        return (i for i, other in enumerate(self.matching.was) if other < 0)

    def inputs(self) -> None:
        """By where they come from; renamed ones by their values, in order."""
        for key in _GIVEN:
            waiting: defaultdict[Hashable, deque[int]] = defaultdict(deque)
            for old in self._free_old():
                if self.old[old].is_given:
                    waiting[key(self.old[old])].append(old)
            for new in list(self._free_new()):
                if self.new[new].is_given and waiting[key(self.new[new])]:
                    self._join(waiting[key(self.new[new])].popleft(), new)

    def equal(self) -> None:
        """What is the same, computed from the same; equals in their order."""
        numbers: dict[Hashable, int] = {}
        pairs = self.matching.pairs
        old_ids = _structures(self.old, {old: -1 - old for old, _ in pairs}, numbers, "old")
        new_ids = _structures(self.new, {new: -1 - old for old, new in pairs}, numbers, "new")
        waiting: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        for old in self._free_old():
            waiting[old_ids[old]].append(old)
        for new in list(self._free_new()):
            if waiting[new_ids[new]]:
                self._join(waiting[new_ids[new]].popleft(), new)

    def neighbours(self) -> None:
        """What lies at and behind differences."""
        everything = (_exactly, _but_place, _but_args)
        self._spread((_exactly,))
        self._alike(_and_path, (_exactly,))
        self._again(everything[:2])
        self._again(everything)
        self._replaced()
        self._spread((_exactly,))
        self._alike(_exactly, everything)
        self._alike(_but_args_here, everything)
        self._replaced()
        self._spread(everything)

    def _again(self, keys: Sequence[Key]) -> None:
        self.found.extend(self.matching.pairs)
        self._spread(keys)

    def _spread(self, keys: Sequence[Key]) -> None:
        """From the latest matches on to their neighbours."""
        while self.found:
            old, new = self.found.popleft()
            for key in keys:
                self._users_of(old, new, key)
                self._inputs_of(old, new, key)

    def _users_of(self, old: int, new: int, key: Key) -> None:
        waiting: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        for user, slot in self.old_users[old]:
            if self.matching.now[user] < 0:
                waiting[slot, key(self.old[user])].append(user)
        if not waiting:
            return
        for user, slot in self.new_users[new]:
            if self.matching.was[user] < 0:
                left = waiting[slot, key(self.new[user])]
                while left and self.matching.now[left[0]] >= 0:
                    left.popleft()
                if left:
                    self._join(left.popleft(), user)

    def _inputs_of(self, old: int, new: int, key: Key) -> None:
        given = self.old[old].inputs, self.new[new].inputs
        if len(given[0]) != len(given[1]):
            return
        for one, other in zip(*given, strict=True):
            is_free = self.matching.now[one] < 0 and self.matching.was[other] < 0
            if is_free and key(self.old[one]) == key(self.new[other]):
                self._join(one, other)

    def _alike(self, key: Key, keys: Sequence[Key]) -> None:
        """Items of equal keys, one after the other; of several, the one with the most in common."""
        waiting: defaultdict[Hashable, list[int]] = defaultdict(list)
        for old in self._free_old():
            waiting[key(self.old[old])].append(old)
        waiting.pop(None, None)
        for bucket in waiting.values():
            bucket.reverse()
        for new in range(len(self.new)):
            if self.matching.was[new] >= 0:
                continue
            bucket = waiting[key(self.new[new])]
            while bucket and self.matching.now[bucket[-1]] >= 0:
                bucket.pop()
            near = [o for o in bucket[-_CANDIDATES:] if self.matching.now[o] < 0]
            if near:
                best = max(near, key=lambda old: (self._in_common(old, new), -old))
                self._join(best, new)
                self._spread(keys)

    def _in_common(self, old: int, new: int) -> int:
        now = self.matching.now
        given = zip(self.old[old].inputs, self.new[new].inputs, strict=False)
        users = {now[user] for user, _ in self.old_users[old]}
        return sum(now[one] == other for one, other in given) + sum(
            user in users for user, _ in self.new_users[new]
        )

    def _replaced(self) -> None:
        """Another call in the place of one: with the same inputs, or for the same user."""
        for around in (self._inputs_key, self._user_key):
            old = _unique((around(i, True), i) for i in list(self._free_old()))
            new = _unique((around(i, False), i) for i in list(self._free_new()))
            for key, one in old.items():
                if key is not None and key in new:
                    self._join(one, new[key])

    def _inputs_key(self, index: int, is_old: bool) -> Hashable:
        item = (self.old if is_old else self.new)[index]
        now = self.matching.now
        inputs = tuple(now[i] for i in item.inputs) if is_old else item.inputs
        known = bool(inputs) and all(
            i >= 0 and (is_old or self.matching.was[i] >= 0) for i in inputs
        )
        return (_place_only(item), inputs) if known and not item.is_given else None

    def _user_key(self, index: int, is_old: bool) -> Hashable:
        item = (self.old if is_old else self.new)[index]
        users = (self.old_users if is_old else self.new_users)[index]
        for user, slot in users:
            other = self.matching.now[user] if is_old else user
            if other >= 0 and (is_old or self.matching.was[user] >= 0):
                return _place_only(item), other, slot
        return None


def _users(items: Sequence[Item]) -> list[list[tuple[int, int]]]:
    users: list[list[tuple[int, int]]] = [[] for _ in items]
    for index, item in enumerate(items):
        for slot, given in enumerate(item.inputs):
            users[given].append((index, slot))
    return users


def _structures(
    items: Sequence[Item], given: dict[int, int], numbers: dict[Hashable, int], side: str
) -> list[int]:
    """A number for every item's structure, the same for the same one on both sides."""
    found: list[int] = []
    for index, item in enumerate(items):
        if index in given:
            found.append(given[index])
            continue
        key: Hashable = (_exactly(item), tuple(found[i] for i in item.inputs))
        if item.is_given:
            key = (side, index)
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def _unique(keyed: Iterable[tuple[Hashable, int]]) -> dict[Hashable, int]:
    found: dict[Hashable, int] = {}
    several: set[Hashable] = set()
    for key, index in keyed:
        if key in found:
            several.add(key)
        found[key] = index
    return {key: index for key, index in found.items() if key not in several}
