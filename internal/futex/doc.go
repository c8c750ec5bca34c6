// Package futex is how a rank waits for a 32-bit word that another rank, often in another process, will write: it looks at
// the word for a microsecond or two, and then sleeps in the kernel until the writer wakes it.
//
// The two levels are
//
//   - [Wait] and [Wake], the system's futex on memory that processes share. Where the system has none they degrade to short
//     sleeps, which is correct and slow; there, processes cannot share memory through this module anyway.
//   - [Word], a counter with a count of its sleepers beside it, so that a writer enters the kernel only when somebody
//     sleeps, and [WaitAtLeast] with [Publish] for a plain word that has no such count.
//
// Every wait has a [Bound]. A word may lie in memory that any process of the group maps; nothing here keeps a Go pointer,
// a lock or a process id in it, so a process that dies while it waits leaves the word usable.
//
// This package knows nothing of groups, devices or ranks.
package futex
