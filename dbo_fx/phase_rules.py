"""Why a node is in its phase, in words: the `regions` pass notes one of these in `Tag.rule`.

`dbo-fx explain` shows them. A node of A that has two reasons carries both.
"""

from __future__ import annotations

SENDS = "sends rows to the ranks of their experts"
RETURNS = "brings the experts' results back"
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
AFTER = "after the last combine"
UNREAD = "no other op needs it: with the last op that it needs"
