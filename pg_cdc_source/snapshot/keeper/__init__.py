"""The keeper: one process on the driver's host that holds one snapshot for each SQL execution.

The problem: all tasks of one Spark action have to see the same snapshot, and a snapshot lives only as long as the
session that exported it. But Spark gives a Python source no process that lasts: planning workers die a minute after
planning, tasks run anywhere, and a DataFrame may be planned once and used in many actions, an hour later. A snapshot
made while planning would be stale in the second action, or differ between two scans of one.

So planning makes sure that a keeper runs (``launch``), and tasks ask it. They meet on the board (``snapshot.board``)::

          task                     PostgreSQL                        keeper
           │ connect as …?16384 ──────►│                                │
           │ holder of 7? ────────────►│ none                           │
           │ NOTIFY {execution: 7} ───►│───────────────────────────────►│ export, or: slot, export, drop slot
           │                           │◄── session …:7:<id> ───────────│ lock the relation
           │ holder of 7? ────────────►│ <id>, maybe its LSN            │
           │ SET TRANSACTION SNAPSHOT ►│                                │

Invariants:

- One keeper per JVM, server, database and role: it holds an advisory lock for its lifetime, and a second one leaves.
- An execution never changes snapshots. Once all holders are lost or released, it has failed, for good.
- Executions that wait at one moment share one snapshot. It is taken after each of them began: a task has asked.
- Executions that show no LSN have their snapshots in the *pool*: one session whose READ COMMITTED transaction exports
  one in each statement. It cannot have a slot's snapshot, release locks, or be replaced. So what is read for longer is
  held by sessions of its own, which import it.
- The keeper has no more sessions than its share of ``maxConnections``, but always one snapshot; executions that need an
  LSN wait in line beyond. Two sessions hold a snapshot of its own while that takes at most half of the share; one that
  dies is replaced from the other. Nobody waits for a second one.
- A snapshot is released ``snapshotIdle`` after the last session of a reader of its executions was seen, or earlier when
  an execution in line needs an LSN and nobody has read in it for a second. That never happens to one in the pool.
- Tables are locked (ACCESS SHARE) only while tasks of the execution read: DDL does not wait for an idle snapshot. The
  locks are also released once somebody waits for them, since the next tasks would queue behind. A reader that comes
  after DDL finds out by itself, see ``check_files``.
- The keeper ends when the driver JVM is gone. It holds nothing but sessions, so nothing outlives it, whatever ends it.

A standby has no NOTIFY; there the keeper finds requests by looking at the board.

The process runs ``__main__``, which serves a ``server.Keeper``. That keeps ``executions`` and their snapshots, the
work on which is ``shared``'s, watches their ``readers``, and shows with ``marks`` why an execution has no snapshot.
"""
