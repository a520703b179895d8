"""A place in one arena for each buffer of a C program, by when it is alive."""

import dataclasses
import itertools
import random
from collections import defaultdict
from collections.abc import Sequence

from poet_jax.emit.c99.buffers import Buffer, Step

Span = tuple[int, int]  # first and last step, both included

TRIES = 200  # changes of an order in which blocks are placed
WORK = 100_000  # blocks that are placed in all, about


@dataclasses.dataclass(frozen=True, eq=False)
class Arena:
    """Where buffers lie.

    Attributes:
      offsets: of each buffer, in bytes.
      nbytes: of the arena.
      floor_bytes: most that is alive at one step, below which no arena can be.
      busiest: the step at which that is so.
      copied: (where a buffer lies, where it has to be for the next step).
      spans: when each buffer is alive.
    """

    offsets: dict[Buffer, int]
    nbytes: int
    floor_bytes: int
    busiest: int
    copied: tuple[tuple[Buffer, Buffer], ...]
    spans: dict[Buffer, Span]


class _Block:
    """Buffers that have one place, as each ends where the next one begins."""

    def __init__(self, buffer: Buffer, span: Span):
        self.buffers, self.spans = [buffer], [span]
        self.nbytes, self.alignment = buffer.nbytes, buffer.itemsize

    def absorb(self, other: "_Block") -> None:
        self.buffers += other.buffers
        self.spans = sorted(self.spans + other.spans)
        self.nbytes = max(self.nbytes, other.nbytes)
        self.alignment = max(self.alignment, other.alignment)

    def meets(self, other: "_Block", *at: int) -> bool:
        """Whether both are alive at one step, other than those of `at`."""
        return any(
            max(a[0], b[0]) <= min(a[1], b[1])
            and not (max(a[0], b[0]) == min(a[1], b[1]) in at)
            for a in self.spans
            for b in other.spans
        )


def alive(steps: Sequence[Step]) -> dict[Buffer, Span]:
    """When each buffer in RAM is alive: from the step that writes it to the last one
    that reads it."""
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for number, step in enumerate(steps):
        for buffer in step.writes:
            if not buffer.in_flash:
                first.setdefault(buffer, number)
                last[buffer] = number
        for buffer in step.reads:
            if not buffer.in_flash:
                last[buffer] = number
    return {buffer: (start, last[buffer]) for buffer, start in first.items()}


def place(steps: Sequence[Step], ties: Sequence[tuple[Buffer, Buffer]] = ()) -> Arena:
    """Offsets in an arena as small as can be found.

    Of `ties` each second buffer ends where the first one begins: it has its place, or
    it is copied there after the last step.
    """
    spans = alive(steps)
    blocks = {buffer: _Block(buffer, span) for buffer, span in spans.items()}
    _tie_inside(steps, spans, blocks)
    copied = _tie(steps, spans, blocks, ties)
    _overlay(steps, spans, blocks)
    distinct = list(dict.fromkeys(blocks.values()))
    floor_bytes, busiest = _most_alive(distinct, len(steps))
    places, nbytes = _packed(distinct, floor_bytes)
    offsets = {buffer: places[block] for buffer, block in blocks.items()}
    return Arena(offsets, nbytes, floor_bytes, busiest, tuple(copied), spans)


def _merge(blocks: dict[Buffer, _Block], first: _Block, second: _Block) -> None:
    first.absorb(second)
    for buffer in second.buffers:
        blocks[buffer] = first


def _tie_inside(
    steps: Sequence[Step], spans: dict[Buffer, Span], blocks: dict[Buffer, _Block]
) -> None:
    """One block for both of each pair of a step's ties, where nothing else is in the
    way."""
    touched: dict[Buffer, list[int]] = {x: [] for s in steps for x, _ in s.ties}
    for number, step in enumerate(steps):
        for buffer in {*step.reads, *step.writes} & touched.keys():
            touched[buffer].append(number)
    for number, step in enumerate(steps):
        for old, new in step.ties:
            if old not in blocks or new not in blocks:
                continue
            first, second = blocks[old], blocks[new]
            whole = list(first.spans)
            before = [x for x in touched[old] if x < number]
            if before:  # it is not alive from the last of these on to this step
                first.spans.remove(spans[old])
                first.spans += [
                    (before[0], before[-1]),
                    (touched[old][len(before)], spans[old][1]),
                ]
            start = spans[new][0]
            is_over = (old, new) in steps[start].over
            if not first.meets(second, number, *([start] if is_over else [])):
                _merge(blocks, first, second)
                continue
            first.spans = whole
            if not before:
                first.spans.append((number, number))


def _tie(
    steps: Sequence[Step],
    spans: dict[Buffer, Span],
    blocks: dict[Buffer, _Block],
    ties: Sequence[tuple[Buffer, Buffer]],
) -> list[tuple[Buffer, Buffer]]:
    """One block for both, if the second is made after the first, or over it."""
    copied = []
    for old, new in ties:
        if new not in spans or blocks[old] is blocks[new]:
            continue
        start = spans[new][0]
        is_over = (old, new) in steps[start].over
        if not blocks[old].meets(blocks[new], *([start] if is_over else [])):
            _merge(blocks, blocks[old], blocks[new])
            continue
        end = len(steps) - 1
        if spans[old][1] < end:
            blocks[old].spans.append((end, end))
        copied.append((new, old))
    return copied


def _overlay(
    steps: Sequence[Step], spans: dict[Buffer, Span], blocks: dict[Buffer, _Block]
) -> None:
    """Let results be over operands that nobody reads later, where steps allow it."""
    for number, step in enumerate(steps):
        for old, new in step.over:
            if old not in blocks or new not in blocks or spans[old][1] != number:
                continue
            first, second = blocks[old], blocks[new]
            if first is second or first.meets(second, number):
                continue
            # Another result may be over this operand already.
            if any(span[0] == number for span in first.spans):
                continue
            if any(span[1] == number for span in second.spans):
                continue
            _merge(blocks, first, second)


def _most_alive(blocks: Sequence[_Block], count: int) -> tuple[int, int]:
    """(bytes, step): a block counts once where it is handed on."""
    changes = [0] * (count + 1)
    for block in blocks:
        for start, stop in _joined(block.spans):
            changes[start] += block.nbytes
            changes[stop + 1] -= block.nbytes
    live = list(itertools.accumulate(changes))
    busiest = max(range(count), key=live.__getitem__, default=0)
    return live[busiest] if count else 0, busiest


def _joined(spans: Sequence[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _neighbours(blocks: Sequence[_Block]) -> dict[_Block, list[_Block]]:
    """The blocks that are alive together with each, in an order that a plan decides."""
    starts: dict[int, list[tuple[_Block, int]]] = defaultdict(list)
    for block in blocks:
        for start, stop in _joined(block.spans):
            starts[start].append((block, stop))
    found: dict[_Block, dict[_Block, None]] = {block: {} for block in blocks}
    now: list[tuple[_Block, int]] = []
    for start in sorted(starts):
        now = [(block, stop) for block, stop in now if stop >= start]
        for block, stop in starts[start]:
            for other, _ in now:
                if other is not block:
                    found[block][other] = found[other][block] = None
            now.append((block, stop))
    return {block: list(others) for block, others in found.items()}


def _packed(
    blocks: Sequence[_Block], floor_bytes: int
) -> tuple[dict[_Block, int], int]:
    """Places of blocks, lowest first, in several orders: the best of them."""
    neighbours = _neighbours(blocks)
    length = {b: sum(stop - start + 1 for start, stop in b.spans) for b in blocks}
    orders = [
        sorted(blocks, key=lambda b: (-b.nbytes, -length[b])),
        sorted(blocks, key=lambda b: (-b.nbytes * length[b], -b.nbytes)),
        sorted(blocks, key=lambda b: (-length[b], -b.nbytes)),
        sorted(blocks, key=lambda b: (b.spans[0][0], -b.nbytes)),
    ]
    best: dict[_Block, int] = {}
    chance = random.Random(0)
    rounds = max(1, WORK // max(1, len(blocks)) // TRIES)
    for order, _ in zip(itertools.cycle(orders), range(rounds + 3), strict=False):
        places = _improved(order, neighbours, floor_bytes, chance)
        if not best or _height(places) < _height(best):
            best = places
        if _height(best) <= floor_bytes:
            break
    return best, _height(best)


def _improved(
    order: Sequence[_Block],
    neighbours: dict[_Block, list[_Block]],
    floor_bytes: int,
    chance: random.Random,
) -> dict[_Block, int]:
    """Places of blocks in an order that is changed wherever that does not raise the
    arena: what ends highest is placed earlier, and at times a neighbour of it, too."""
    best = _fill(order, neighbours)
    height = _height(best)
    for _ in range(TRIES if len(order) <= WORK // TRIES else 0):
        if height <= floor_bytes:
            break
        top = chance.choice([b for b in order if best[b] + b.nbytes == height])
        changed = list(order)
        place = changed.index(top)
        changed.insert(chance.randrange(place + 1), changed.pop(place))
        if chance.random() < 0.5 and neighbours[top]:
            other = chance.choice(neighbours[top])
            changed.remove(other)
            changed.insert(chance.randrange(len(order)), other)
        places = _fill(changed, neighbours)
        if _height(places) <= height:
            best, order, height = places, changed, _height(places)
    return best


def _height(places: dict[_Block, int]) -> int:
    return max((start + block.nbytes for block, start in places.items()), default=0)


def _fill(
    order: Sequence[_Block], neighbours: dict[_Block, list[_Block]]
) -> dict[_Block, int]:
    """Each block at the lowest place that is free while it is alive."""
    places: dict[_Block, int] = {}
    for block in order:
        taken = sorted(
            (places[other], places[other] + other.nbytes)
            for other in neighbours[block]
            if other in places
        )
        offset = 0
        for start, stop in taken:
            if start >= offset + block.nbytes and block.nbytes:
                break
            offset = max(offset, -(-stop // block.alignment) * block.alignment)
        places[block] = offset
    return places
