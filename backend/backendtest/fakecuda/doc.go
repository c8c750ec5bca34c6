// Package fakecuda pretends to be the GPUs of a host and their driver, for tests of backends on machines without any. It has
// what does not depend on the backend: which GPUs there are, the contexts of threads, streams and events, pinned memory of the
// host, modules, and a record of misuse that a real driver would not survive. What memory the GPUs have, and what the rest of the table
// does, each backend's own tests add to the table that [GPUs.Driver] gives.
//
// Streams run their work at once: whoever adds copies to the table does them before the call returns. It works on Linux, where
// one thread's contexts can be told from another's.
//
// The package imports device and the driver's table in internal/cuda, and is for tests alone.
package fakecuda
