// Package nixl calls NVIDIA's inference transfer library through its C interface, libnixl_capi.so, which it finds and loads
// when [Load] is called: building needs no headers and no library. It has the functions that this module uses, with the
// values and layouts that go with them, and hides the lists that only carry arguments.
//
// # What there is
//
// An [Agent] is one party: it owns one engine over UCX, with or without a progress thread. It registers memory, returns metadata by which others can
// reach it, as bytes for the caller to send, and takes theirs. A [Request] is a transfer between registered memory of this agent and of another one,
// prepared once and posted many times. It has ended when the data has arrived, on the other side too. Two requests are ordered only by waiting for
// the end of the first.
//
// # The library
//
// The Python packages nixl-cu12 and nixl-cu13 hold it, with a UCX of their own beside it. NIXL is built for a major version of
// CUDA; Load takes the one that goes with the driver. UCX reads its settings from the environment when it is loaded, with the
// first agent: Load sets those that this module needs, and none that the user has set. What one agent may use of the network is a
// setting of that agent.
//
// # Waits
//
// Making an agent, its engine included, and taking metadata, which makes the connection, may block for as long as the system
// takes: see [Bound]. Post and Status do not block.
//
// # What it may know
//
// This package imports the loader of native libraries and the shared errors, but no devices, groups or backends.
package nixl
