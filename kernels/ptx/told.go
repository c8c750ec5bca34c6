package ptx

// Told is the kernel that makes a plan give up when a word of this device is not 0, one block. It takes Comm and the word's address.
var Told = Kernel{File: "told.ptx", Name: "symmem_told"}

// FaultTold is why Told gave up, as Fault.Why, and FaultTeller which kernel that is.
const (
	FaultTold   = 18
	FaultTeller = 40
)
