"""Why a node is in its phase, in words: the `regions` pass notes one of these in `Tag.rule`.

`dbo-fx explain` shows them. A node of A that has two reasons carries both.
"""

from __future__ import annotations

SENDS = "sends rows to their experts: launches that need each other have levels, this one is even"
RETURNS = "brings results back: launches that need each other have levels, this one is odd"
SIZE = "size arithmetic"
NO_TOKENS = "no token reaches it: one copy serves all microbatches"
EXPERTS = "needs the dispatched rows, and the combine needs it"
FOR_COMBINE = "no dispatched row reaches it, but only the combine needs it"
PLAIN = "stands between two communications that it cannot cross"
NOT_COMBINED = "needs the dispatched rows, and the combine does not need it"
BESIDE = "follows the attention core, independent of dispatch and combine"
LATE = "independent of the communication before it: as late as possible"
FOR_CORE = "the attention core needs it"
CORE = "the attention core"
FEEDS = "feeds the dispatch, and the attention core does not need it"
NO_CORE = "feeds the dispatch; this layer has no attention core"
AFTER = "follows the last combine, or nothing before it needs it"
UNREAD = "no other op needs it: with the last op that it needs"
