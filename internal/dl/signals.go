package dl

// handler is what the kernel does when a signal comes.
type handler struct {
	address uintptr // 0 for the default, 1 for ignoring it
	flags   uint64
}

// change is a signal whose handler is not the same as before.
type change struct {
	signal     int
	onAltStack bool // false crashes a Go program when the signal comes while Go code runs
}
