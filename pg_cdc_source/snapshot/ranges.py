"""Cut tables into ctid ranges: blocks in, ranges out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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


WHOLE = BlockRange(0, None)


def cut(blocks: int, blocks_per_range: int) -> list[BlockRange]:
    """Cut a heap of ``blocks`` into even ranges of at most ``blocks_per_range``; the last one is open.

    Even ranges finish together; a short last range would leave an executor idle.
    """
    count = max(1, -(-blocks // blocks_per_range))
    starts = [blocks * i // count for i in range(count)]
    ends: list[int | None] = [*starts[1:], None]
    return [BlockRange(start, end) for start, end in zip(starts, ends, strict=True)]


def blocks_per_range(heap_blocks: Sequence[int], block_size: int, range_bytes: int, ranges: int | None) -> int:
    """Blocks that one range should have, from a target size or from a wanted number of ranges over all heaps.

    A wanted number is met as closely as heaps allow: each has at least one range of its own.
    """
    if ranges is None:
        return max(1, range_bytes // block_size)
    return max(1, -(-sum(heap_blocks) // ranges))


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
