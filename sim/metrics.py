"""What a run amounts to: one record a round, summed up under the names that the field uses. Engine and simulator share it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest

# What a round counts as: draft tokens, those of them that were kept, and hit and backup as Round has them.
Kind = tuple[int, int, bool | None, bool]


@dataclass(frozen=True, slots=True)
class Round:
    """One verification for one request.

    drafted, accepted: draft tokens received and accepted; committed: tokens kept, bonus included, after cropping at a stop. hit: the draft
    came from the speculation cache (True), did not (False), or there was no cache (None: AR, SD). backup: the draft, maybe empty,
    came from the backup. Seconds of the verification and of the target's wait for the draft before it; start: when that wait began, on
    the timeline's clock, 0 where nobody looked. drafter: who made the draft, in a word. ValueError for impossible counts.
    """

    request: str
    drafted: int
    accepted: int
    committed: int
    hit: bool | None
    backup: bool
    verify_seconds: float
    wait_seconds: float
    start: float = 0.0
    drafter: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.drafted:
            raise ValueError(f"accepted={self.accepted} must lie between 0 and drafted={self.drafted}")
        if not 0 <= self.committed <= self.accepted + 1:
            raise ValueError(f"committed={self.committed} must lie between 0 and accepted + 1 = {self.accepted + 1}")

    @property
    def kept(self) -> int:
        """Draft tokens that were accepted and not cropped."""
        return min(self.accepted, self.committed)


def drafter(drafted: int, hit: bool | None, from_backup: bool, backup: str) -> str:
    """Who made a draft: "cache", "draft" (the draft model in SD), the name of the backup, or "none"; as Round has it."""
    if not drafted:
        return "none"
    return "cache" if hit else backup if from_backup else "draft"


@dataclass(frozen=True)
class Metrics:
    """Sums and ratios over rounds. Only committed tokens count as accepted. A ratio whose denominator is 0 is None.

    num_rounds counts verifications, num_drafts those with at least one draft token. mean_acceptance_length = 1 + accepted / drafts,
    bonus included; ..._on_hit and ..._on_miss likewise, over all rounds of the kind: an empty draft counts with length 1.
    acceptance_histogram[k]: drafts with k tokens accepted. Seconds are summed over rounds, save total_seconds (wall clock) and
    time_to_first_token (a mean over requests). time_per_output_token: seconds for each token after the first. link_messages, link_bytes:
    both ways between target and draft, of an engine as a whole; link_seconds: the latency one way that it measured; None where nobody did.
    """

    num_rounds: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_histogram: tuple[int, ...]
    num_cache_hits: int
    num_cache_misses: int
    cache_hit_rate: float | None
    mean_acceptance_length_on_hit: float | None
    mean_acceptance_length_on_miss: float | None
    num_backups: int
    verify_seconds: float
    wait_seconds: float
    num_output_tokens: int
    total_seconds: float
    time_to_first_token: float | None
    output_tokens_per_second: float | None
    time_per_output_token: float | None
    num_requests: int = 1
    link_messages: int | None = None
    link_bytes: int | None = None
    link_seconds: float | None = None

    @classmethod
    def from_rounds(
        cls,
        rounds: Sequence[Round],
        *,
        num_output_tokens: int,
        total_seconds: float,
        time_to_first_token: float | None,
        num_requests: int = 1,
    ) -> "Metrics":
        """Sum up rounds of any order and of any number of requests.

        num_output_tokens: all tokens given out, the first of each request included; total_seconds: wall clock; time_to_first_token:
        seconds, the mean over requests, None if unknown; num_requests: requests that ran one after another, for time_per_output_token.
        """
        return cls.from_kinds(
            Counter((r.drafted, r.kept, r.hit, r.backup) for r in rounds),
            verify_seconds=sum(r.verify_seconds for r in rounds),
            wait_seconds=sum(r.wait_seconds for r in rounds),
            num_output_tokens=num_output_tokens,
            total_seconds=total_seconds,
            time_to_first_token=time_to_first_token,
            num_requests=num_requests,
        )

    @classmethod
    def from_kinds(
        cls,
        kinds: Mapping[Kind, int],
        *,
        verify_seconds: float,
        wait_seconds: float,
        num_output_tokens: int,
        total_seconds: float,
        time_to_first_token: float | None,
        num_requests: int = 1,
    ) -> "Metrics":
        """Sum up rounds of which only the number of each kind is known; the seconds of them all, and the rest as in from_rounds."""
        drafts = {kind: count for kind, count in kinds.items() if kind[0] > 0}
        hits, misses = ({kind: count for kind, count in kinds.items() if kind[2] is which} for which in (True, False))
        num_drafts, num_hits, num_misses = (sum(some.values()) for some in (drafts, hits, misses))
        drafted = sum(kind[0] * count for kind, count in drafts.items())
        accepted = sum(kind[1] * count for kind, count in drafts.items())
        after_first = total_seconds - num_requests * (time_to_first_token or 0.0)
        return cls(
            num_rounds=sum(kinds.values()),
            num_drafts=num_drafts,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            draft_acceptance_rate=_ratio(accepted, drafted),
            mean_acceptance_length=_mean_length(drafts),
            acceptance_histogram=_histogram(drafts),
            num_cache_hits=num_hits,
            num_cache_misses=num_misses,
            cache_hit_rate=_ratio(num_hits, num_hits + num_misses),
            mean_acceptance_length_on_hit=_mean_length(hits),
            mean_acceptance_length_on_miss=_mean_length(misses),
            num_backups=sum(count for kind, count in kinds.items() if kind[3]),
            verify_seconds=verify_seconds,
            wait_seconds=wait_seconds,
            num_output_tokens=num_output_tokens,
            total_seconds=total_seconds,
            time_to_first_token=time_to_first_token,
            output_tokens_per_second=_ratio(num_output_tokens, total_seconds),
            time_per_output_token=None if time_to_first_token is None else _ratio(after_first, num_output_tokens - num_requests),
            num_requests=num_requests,
        )

    def plus(self, other: "Metrics") -> "Metrics":
        """Both together: sums of counts and seconds, and what follows from them; means over requests are weighted by their number."""
        added = {
            name: getattr(self, name) + getattr(other, name)
            for name in (
                *(
                    "num_rounds",
                    "num_drafts",
                    "num_draft_tokens",
                    "num_accepted_tokens",
                    "num_cache_hits",
                    "num_cache_misses",
                    "num_backups",
                ),
                *("verify_seconds", "wait_seconds", "num_output_tokens", "total_seconds", "num_requests"),
            )
        }
        both = (self, other)
        firsts = [m.time_to_first_token for m in both if m.time_to_first_token is not None]
        first = sum(m.num_requests * (m.time_to_first_token or 0.0) for m in both) / added["num_requests"] if len(firsts) == 2 else None
        after = sum((m.time_per_output_token or 0.0) * (m.num_output_tokens - m.num_requests) for m in both)
        hits, misses = (sum((getattr(m, f"mean_acceptance_length_on_{kind}") or 0.0) * count(m) for m in both) for kind, count in _KINDS)
        return Metrics(
            **added,
            draft_acceptance_rate=_ratio(added["num_accepted_tokens"], added["num_draft_tokens"]),
            mean_acceptance_length=_ratio(added["num_drafts"] + added["num_accepted_tokens"], added["num_drafts"]),
            acceptance_histogram=tuple(map(sum, zip_longest(*(m.acceptance_histogram for m in both), fillvalue=0))),
            cache_hit_rate=_ratio(added["num_cache_hits"], added["num_cache_hits"] + added["num_cache_misses"]),
            mean_acceptance_length_on_hit=_ratio(hits, added["num_cache_hits"]),
            mean_acceptance_length_on_miss=_ratio(misses, added["num_cache_misses"]),
            time_to_first_token=first,
            output_tokens_per_second=_ratio(added["num_output_tokens"], added["total_seconds"]),
            time_per_output_token=None if first is None else _ratio(after, added["num_output_tokens"] - added["num_requests"]),
        )

    def over(self, seconds: float) -> "Metrics":
        """The same with other seconds in all, and the output tokens a second that follow: of requests that overlapped, wall clock."""
        return replace(self, total_seconds=seconds, output_tokens_per_second=_ratio(self.num_output_tokens, seconds))

    def to_dict(self) -> dict[str, object]:
        """The fields by name, ready for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


_KINDS: tuple[tuple[str, Callable[[Metrics], int]], ...] = (("hit", lambda m: m.num_cache_hits), ("miss", lambda m: m.num_cache_misses))


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def _mean_length(kinds: Mapping[Kind, int]) -> float | None:
    return _ratio(sum((1 + kept) * count for (_, kept, _, _), count in kinds.items()), sum(kinds.values()))


def _histogram(drafts: Mapping[Kind, int]) -> tuple[int, ...]:
    counts = [0] * (1 + max((drafted for drafted, *_ in drafts), default=-1))
    for (_, kept, _, _), count in drafts.items():
        counts[kept] += count
    return tuple(counts)
