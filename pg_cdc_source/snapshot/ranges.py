"""Cut tables into ctid ranges: blocks in, ranges out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# As many as numPartitions may ask for. Each is a task, and the driver has all of them in its memory.
MOST_RANGES = 100_000


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks ``[start_block, end_block_exclusive)`` of one heap; an end of None is the end of the table.

    The last range of a table has no end: blocks that appear after planning belong to it.
    """

    start_block: int
    end_block_exclusive: int | None

    def __str__(self) -> str:
        end = "end" if self.end_block_exclusive is None else str(self.end_block_exclusive)
        return f"blocks [{self.start_block}, {end})"


def cut(heap_blocks: Sequence[int], count: int) -> list[list[tuple[int, BlockRange]]]:
    """Cut heaps, laid end to end, into ``count`` even ranges, which is no more than they have blocks.

    A range is a list of heaps, by their places in ``heap_blocks``, and their blocks: large heaps have many ranges, and
    small ones share them. The last range of a heap is open. Even ranges finish together; a short last range would leave
    an executor idle.
    """
    lengths = _lengths(heap_blocks)
    total = sum(lengths)
    ends = [total * i // count for i in range(1, count + 1)]
    cuts: list[list[tuple[int, BlockRange]]] = [[]]
    at = 0
    for heap, length in enumerate(lengths):
        start = 0
        while (end := ends[len(cuts) - 1] - at) < length:
            if end > start:
                cuts[-1].append((heap, BlockRange(start, end)))
                start = end
            cuts.append([])
        cuts[-1].append((heap, BlockRange(start, None)))
        at += length
    return cuts


def range_count(heap_blocks: Sequence[int], block_size: int, range_bytes: int, ranges: int | None) -> int:
    """How many ranges heaps are cut into: of a target size each, or a wanted number, as far as there are blocks."""
    total = sum(_lengths(heap_blocks))
    if ranges is None:
        return min(MOST_RANGES, -(-total // max(1, range_bytes // block_size)))
    return min(ranges, total)


def _lengths(heap_blocks: Sequence[int]) -> list[int]:
    # An empty heap takes time as well.
    return [max(1, blocks) for blocks in heap_blocks]


def length(blocks: BlockRange, heap_blocks: int) -> int:
    """How many blocks a range has of a heap of ``heap_blocks``."""
    end = heap_blocks if blocks.end_block_exclusive is None else blocks.end_block_exclusive
    return max(0, end - blocks.start_block)


def steps(blocks: BlockRange, blocks_now: int, blocks_per_step: int) -> Iterator[BlockRange]:
    """Cut one range into the steps that are read by a COPY each, in block order.

    ``blocks_now`` bounds the steps of an open range; the last step of an open range stays open.
    """
    end = blocks_now if blocks.end_block_exclusive is None else blocks.end_block_exclusive
    start = blocks.start_block
    while start + blocks_per_step < end:
        yield BlockRange(start, start + blocks_per_step)
        start += blocks_per_step
    yield BlockRange(start, blocks.end_block_exclusive)
